"""`from_pretrained` through bigload gives the model that transformers' own gives, with less said about it."""

import threading
from pathlib import Path

import model_types
import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload import OptionError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

FEW = ["llama", "mixtral", "bert", "t5", "deepseek_v3", "imagegpt"]
OTHERS = sorted({*model_types.NAMES} - {*FEW, "JevForDecision"})
"""Without the class whose own `from_pretrained` fails with `output_loading_info` in transformers 5.24."""


@pytest.fixture
def llama(tmp_path):
    return type(model_types.saved(transformers, "llama", tmp_path)), tmp_path


def through_bigload(kind, folder, **arguments):
    """Return what bigload makes and says, and what it has read."""
    with bigload.transformers.reading_with_bigload() as reads:
        return kind.from_pretrained(folder, output_loading_info=True, **arguments), reads


def check_same(found, expected):
    (model, said), (plain, plain_said) = found, expected
    assert said == plain_said
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model_types.differences(model.state_dict(), plain.state_dict()) == []
    assert {name: each.requires_grad for name, each in model.named_parameters()} == {
        name: each.requires_grad for name, each in plain.named_parameters()
    }
    assert not model.training


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in FEW for dtype in (None, torch.float16)),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_it_is_the_model_that_transformers_makes(name, dtype, tmp_path):
    kind = type(model_types.saved(transformers, name, tmp_path))
    arguments = {} if dtype is None else {"dtype": dtype}
    expected = kind.from_pretrained(tmp_path, output_loading_info=True, **arguments)
    found, reads = through_bigload(kind, tmp_path, **arguments)
    check_same(found, expected)
    assert [read.left_to_transformers for read in reads] == [None]


@pytest.mark.parametrize(("name", "is_mapped"), [("llama", True), ("mixtral", False)])
def test_weights_stay_in_their_files_unless_most_are_fused(name, is_mapped, tmp_path):
    kind = type(model_types.saved(transformers, name, tmp_path))
    model = bigload.transformers.from_pretrained(kind, tmp_path)
    assert model is not None
    assert (str(tmp_path) in Path("/proc/self/maps").read_text("utf-8")) is is_mapped


def test_sharded_files_and_auto_classes(llama):
    kind, folder = llama
    plain = kind.from_pretrained(folder)
    plain.save_pretrained(folder / "shards", max_shard_size="20KB")
    model = bigload.transformers.from_pretrained(transformers.AutoModelForCausalLM, folder / "shards")
    assert type(model) is kind
    assert model_types.differences(model.state_dict(), plain.state_dict()) == []


def test_torch_archives_are_read_too(llama):
    kind, folder = llama
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check_same(through_bigload(kind, folder)[0], kind.from_pretrained(folder, output_loading_info=True))


def test_what_no_file_has_is_initialised_by_transformers(llama):
    _, folder = llama
    kind = transformers.LlamaForSequenceClassification
    (model, said), _ = through_bigload(kind, folder)
    plain, plain_said = kind.from_pretrained(folder, output_loading_info=True)
    assert (said, {*said["missing_keys"]}) == (plain_said, {"score.weight"})
    assert model.score.weight.abs().sum() > 0
    assert torch.equal(model.model.norm.weight, plain.model.norm.weight)


def test_names_of_the_caller_count(llama):
    kind, folder = llama
    stored = load_file(folder / "model.safetensors")
    odd = {f"odd.{name}" if name.startswith("model.") else name: value for name, value in stored.items()}
    save_file(odd, folder / "model.safetensors", {"format": "pt"})
    arguments = {"key_mapping": {"^odd.model.": "model."}}
    expected = kind.from_pretrained(folder, output_loading_info=True, **arguments)
    check_same(through_bigload(kind, folder, **arguments)[0], expected)
    assert expected[1]["missing_keys"] == set()


def test_a_saved_model_has_the_names_of_its_files(tmp_path):
    kind = type(model_types.saved(transformers, "mixtral", tmp_path))
    bigload.transformers.from_pretrained(kind, tmp_path).save_pretrained(tmp_path / "again")
    again, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", tmp_path))
    assert model_types.differences(again, first) == []


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_the_rest_is_left_to_transformers(llama, change):
    kind, folder = llama
    stored = load_file(folder / "model.safetensors")
    norm = stored["model.norm.weight"]
    stored["model.norm.weight"] = norm[1:].clone() if change == "shape" else norm.to(torch.int32)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    arguments = {"ignore_mismatched_sizes": True}
    (_, said), reads = through_bigload(kind, folder, **arguments)
    assert said == kind.from_pretrained(folder, output_loading_info=True, **arguments)[1]
    assert "model.norm.weight" in reads[0].left_to_transformers
    assert reads[0].num_bytes == 0


def test_other_threads_and_times_are_left_alone(llama):
    kind, folder = llama
    with bigload.transformers.reading_with_bigload() as reads:
        other = threading.Thread(target=kind.from_pretrained, args=(folder,))
        other.start()
        other.join()
        assert not reads
    kind.from_pretrained(folder)
    assert not reads


def test_a_plan_places_the_weights(llama, tmp_path):
    kind, _ = llama
    config = model_types.configuration(transformers, "llama")
    config.num_hidden_layers = 8
    plain = kind(config).eval()
    plain.save_pretrained(tmp_path / "deep")
    plan = bigload.plan(tmp_path / "deep", {"cpu": plain.num_parameters() * 4 * 3 // 4})
    model, said = bigload.transformers.from_pretrained(kind, tmp_path / "deep", plan=plan, output_loading_info=True)
    assert said["missing_keys"] == set()
    assert any(each.is_meta for each in model.parameters())
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_a_plan_alone_places_the_weights(llama):
    kind, folder = llama
    plan = bigload.plan(folder, {"cpu": "1GiB"})
    with pytest.raises(OptionError, match="plan= and device_map= both say where weights go"):
        bigload.transformers.from_pretrained(kind, folder, plan=plan, device_map="cpu")
