"""Folders of `reshard --names` hold what `from_pretrained` makes, load as the original does, and go back to it."""

import json

import model_types
import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload.conversion.conversion import as_stored
from bigload.conversion.with_transformers.models import conversion_for
from bigload.layouts.resharding.names import CONVERSION_FILE
from bigload.layouts.resharding.reshard import reshard

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

KINDS = {
    "mixtral": "experts that become one tensor",
    "deepseek_v3": "the same, behind dense layers",
    "jamba": "the same, in some layers",
    "inkling2_text": "rows of one tensor in turn",
    "qwen3_vl_moe": "tensors that are turned",
    "nomic_bert": "tensors that are divided",
    "clip_text_model": "a base model",
    "dinov3_vit": "renamed layers and a tensor without elements",
    "bart": "tied weights",
}


DROPS_PADDING = model_types.release(transformers) >= (5, 24)
if DROPS_PADDING:
    del KINDS["inkling2_text"]


@pytest.fixture(scope="module", params=KINDS)
def original(request, tmp_path_factory):
    """Return a folder in the original form, the model's class, and the weights that from_pretrained makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *saved(request.param, folder)


def saved(model_type, folder, kind=None):
    kind = kind or model_types.class_of(transformers, model_type)
    torch.manual_seed(0)
    kind(model_types.configuration(transformers, model_type)).save_pretrained(folder)
    return kind, kind.from_pretrained(folder).state_dict()


def stored(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def differing(found, expected):
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def test_the_form_in_memory_and_the_way_back(original, tmp_path):
    folder, kind, expected = original
    reshard(folder, tmp_path / "fused", names="transformers", max_shard_bytes=50_000)
    bigload.verify(tmp_path / "fused").check()
    assert [name for name, value in stored(tmp_path / "fused").items() if not torch.equal(value, expected[name])] == []
    model, loading = kind.from_pretrained(tmp_path / "fused", output_loading_info=True)
    assert differing(model.state_dict(), expected) == []
    assert loading["unexpected_keys"] == set()
    with bigload.init_empty_weights(include_buffers=False):
        empty = kind(kind.config_class.from_pretrained(folder))
    checkpoint = bigload.open_checkpoint(tmp_path / "fused")
    for name, tensor in conversion_for(empty, checkpoint.tensors).tensors.items():
        assert tensor == as_stored(checkpoint.tensors[name])  # nothing is assembled any more
    bigload.load(tmp_path / "fused", into=empty, strict=False)
    weights = {name: value for name, value in empty.state_dict().items() if name in checkpoint.tensors}
    assert differing(weights, {name: expected[name] for name in weights}) == []
    reshard(tmp_path / "fused", tmp_path / "back", names="checkpoint", layout="shards")
    assert stored(tmp_path / "back").keys() == stored(folder).keys()
    assert differing(stored(tmp_path / "back"), stored(folder)) == []


def test_transformers_knows_the_way_back_from_what_it_saved(original, tmp_path):
    folder, kind, _ = original
    kind.from_pretrained(folder).save_pretrained(tmp_path / "fused", save_original_format=False)
    reshard(tmp_path / "fused", tmp_path / "back", names="checkpoint", layout="shards")
    assert not (tmp_path / "back" / CONVERSION_FILE).exists()
    assert stored(tmp_path / "back").keys() == stored(folder).keys()
    assert differing(stored(tmp_path / "back"), stored(folder)) == []


@pytest.mark.skipif(not DROPS_PADDING, reason="rows of padding stay in the model before transformers 5.24")
def test_a_model_that_drops_rows_of_padding_is_not_written_without_them(tmp_path):
    saved("inkling2_text", tmp_path / "model")
    with pytest.raises(bigload.NamesUnknownError, match=r"uses parts of 1 tensor only: the rest is lost"):
        reshard(tmp_path / "model", tmp_path / "out", names="transformers")
    assert not (tmp_path / "out").exists()


def test_names_of_earlier_versions_become_those_in_memory(tmp_path):
    kind, expected = saved("qwen2_vl", tmp_path / "new", transformers.Qwen2VLForConditionalGeneration)
    old = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in stored(tmp_path / "new").items()
    }
    assert "model.layers.0.input_layernorm.weight" in old
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    (tmp_path / "old" / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    reshard(tmp_path / "old", tmp_path / "out", names="transformers")
    assert differing(expected, stored(tmp_path / "out")) == []
    assert differing(kind.from_pretrained(tmp_path / "out").state_dict(), expected) == []
    reshard(tmp_path / "out", tmp_path / "back", names="checkpoint")
    assert stored(tmp_path / "back").keys() == old.keys()
    assert differing(stored(tmp_path / "back"), old) == []


def test_tensors_that_no_module_holds_are_kept(tmp_path):
    _, expected = saved("mixtral", tmp_path / "model")
    weights = stored(tmp_path / "model")
    extra = {"model.layers.9.self_attn.q_proj.weight": torch.ones(3), "model.rotary_emb.inv_freq": torch.ones(2)}
    save_file(weights | extra, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    report = reshard(tmp_path / "model", tmp_path / "out", names="transformers")
    assert "2 tensors that no module holds, written as stored" in report.output.notes[1]
    assert differing(stored(tmp_path / "out"), extra) == []
    written = stored(tmp_path / "out")
    assert differing(expected, {name: each for name, each in written.items() if name in expected}) == []
    reshard(tmp_path / "out", tmp_path / "back", names="checkpoint")
    assert differing(stored(tmp_path / "back"), weights | extra) == []


def test_an_architecture_that_transformers_does_not_have_is_refused(tmp_path):
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["OthersForCausalLM"]}))
    with pytest.raises(bigload.NamesUnknownError, match=r"it has no class OthersForCausalLM"):
        reshard(tmp_path, tmp_path / "out", names="transformers")
