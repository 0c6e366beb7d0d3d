"""Conversions hold what transformers' own loader makes of a checkpoint."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import model_types
import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload.conversion.with_transformers.checkpoints import conversion_by_transformers
from bigload.conversion.with_transformers.models import conversion_for
from bigload.conversion.without_transformers.checkpoint_conversion import conversion_of_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def empty(kind, folder):
    with bigload.init_empty_weights(include_buffers=False):
        return kind(kind.config_class.from_pretrained(folder)).eval()


def saved(model_type, folder, **arguments):
    """Save a tiny random model in the original form; return its class."""
    kind = model_types.class_of(transformers, model_type)
    config = model_types.configuration(transformers, model_type)
    for name, value in arguments.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return kind


@pytest.fixture
def mixtral(tmp_path):
    return saved("mixtral", tmp_path), tmp_path


def edited(folder, edit):
    """Write the one file of `folder` again, with the tensors that `edit` makes of those in it."""
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "model_type", ["mixtral", "llama", "qwen2_vl", "deepseek_v3", "jamba", "olmoe", "inkling2_text"]
)
def test_tensors_are_those_of_from_pretrained(model_type, tmp_path):
    kind = saved(model_type, tmp_path)
    expected = kind.from_pretrained(tmp_path).state_dict()
    model = empty(kind, tmp_path)
    bigload.load(tmp_path, into=model)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_threads_build_models_by_turns_and_leave_torch_as_it_was(mixtral, monkeypatch):
    kind, folder = mixtral
    build, now, most = kind.__init__, [], []

    def slowly(model, config):
        now.append(model)
        most.append(len(now))
        time.sleep(0.3)
        build(model, config)
        now.remove(model)

    monkeypatch.setattr(kind, "__init__", slowly)
    before = (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_, torch.linspace)
    checkpoint = bigload.open_checkpoint(folder)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(conversion_by_transformers, [checkpoint] * 2)
    assert first == second
    assert most == [1, 1]
    assert (torch.nn.init.normal_, torch.nn.init.kaiming_uniform_, torch.linspace) == before


def test_the_model_stays_as_it_is(mixtral):
    kind, folder = mixtral
    model = empty(kind, folder)
    before = dict(model.named_parameters())
    conversion_for(model, bigload.open_checkpoint(folder).tensors)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_missing_experts_are_all_named(mixtral):
    kind, folder = mixtral
    edited(
        folder,
        lambda tensors: {name: each for name, each in tensors.items() if not re.search(r"experts\.[12]\.w1", name)},
    )
    with pytest.raises(
        bigload.StateDictMismatchError, match=r"layers.0.block_sparse_moe.experts has no w1.weight for 2 experts: 1, 2"
    ):
        bigload.load(folder, into=empty(kind, folder))


def test_a_missing_last_expert_is_another_shape(mixtral):
    kind, folder = mixtral
    edited(folder, lambda tensors: {name: each for name, each in tensors.items() if "experts.3." not in name})
    with pytest.raises(
        bigload.StateDictMismatchError, match=r"gate_up_proj: the model expects \[4, .* make \[3, .*: 3 of 4 experts"
    ):
        bigload.load(folder, into=empty(kind, folder))


def test_experts_of_unequal_shapes_are_refused(mixtral):
    kind, folder = mixtral
    edited(
        folder,
        lambda tensors: {name: each[:-1].clone() if "experts.2.w1" in name else each for name, each in tensors.items()},
    )
    with pytest.raises(
        bigload.StateDictMismatchError, match=r"experts.2.w1.weight is \[63, 32\], and \[64, 32\] of other experts"
    ):
        bigload.load(folder, into=empty(kind, folder))


def test_a_tensor_that_two_sources_claim_is_refused(mixtral):
    kind, folder = mixtral
    fused = kind.from_pretrained(folder).state_dict()
    edited(
        folder,
        lambda tensors: {
            **tensors,
            **{name: fused[name].clone() for name in fused if name.endswith("0.mlp.experts.down_proj")},
        },
    )
    with pytest.raises(
        bigload.StateDictMismatchError, match=r"both become .*experts\.down_proj: names of two versions"
    ):
        bigload.load(folder, into=empty(kind, folder))


def test_a_fused_file_needs_no_conversion(mixtral):
    kind, folder = mixtral
    model = kind.from_pretrained(folder)
    edited(folder, lambda _: {name: each.clone() for name, each in model.state_dict().items()})
    again = empty(kind, folder)
    bigload.load(folder, into=again)
    assert all(torch.equal(each, again.state_dict()[name]) for name, each in model.state_dict().items())


def test_a_base_model_into_one_with_a_head_and_back(tmp_path):
    config = model_types.configuration(transformers, "llama")
    torch.manual_seed(0)
    headed = transformers.LlamaForCausalLM(config)
    headed.save_pretrained(tmp_path / "headed")
    headed.model.save_pretrained(tmp_path / "base")
    with bigload.init_empty_weights(include_buffers=False):
        base, again = transformers.LlamaModel(config), transformers.LlamaForCausalLM(config)
    bigload.load(tmp_path / "headed", into=base, strict=False)
    bigload.load(tmp_path / "base", into=again, strict=False)
    assert torch.equal(base.norm.weight, headed.model.norm.weight)
    assert torch.equal(again.model.embed_tokens.weight, headed.model.embed_tokens.weight)


def test_an_operation_that_computes_is_refused_by_name(mixtral, monkeypatch):
    from transformers.core_model_loading import Concatenate

    kind, folder = mixtral
    plain = Concatenate.convert
    monkeypatch.setattr(
        Concatenate, "convert", lambda *args, **kwargs: {key: each * 2 for key, each in plain(*args, **kwargs).items()}
    )
    with pytest.raises(bigload.StateDictMismatchError, match=r"aten\.mul.* computes new values"):
        bigload.load(folder, into=empty(kind, folder))


def test_old_torch_files_are_converted_too(mixtral):
    kind, folder = mixtral
    torch.save(
        load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    expected = kind.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    model = empty(kind, folder)
    bigload.load(folder, into=model)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in expected.items())


@pytest.mark.skipif(model_types.release(transformers) < (5, 24), reason="dory came with transformers 5.24")
def test_layers_that_are_stored_in_two_are_named_as_transformers_names_them(tmp_path):
    """`save_pretrained` does not write this form, so that it is made here."""
    kind = saved("dory", tmp_path)
    expected = kind.from_pretrained(tmp_path).state_dict()
    stored = {
        "self_attn": (0, "mixer"),
        "mlp": (1, "mixer"),
        "lambda_1": (0, "attn_alpha"),
        "lambda_2": (1, "mlp_alpha"),
    }

    def in_two(found):
        second, name = stored[found[2]]
        return f"layers.{2 * int(found[1]) + second}.{name}"

    pattern = rf"layers\.(\d+)\.({'|'.join(stored)})"
    edited(tmp_path, lambda tensors: {re.sub(pattern, in_two, name): tensor for name, tensor in tensors.items()})
    checkpoint = bigload.open_checkpoint(tmp_path)
    assert {each.rpartition("layers.")[2].split(".")[0] for each in checkpoint.tensors if "layers." in each} == {
        *"0123"
    }
    by_transformers = conversion_for(empty(kind, tmp_path), checkpoint.tensors)
    assert by_transformers.tensors.keys() == expected.keys()
    assert by_transformers.problems == ()
    assert conversion_of_checkpoint(checkpoint) == by_transformers
