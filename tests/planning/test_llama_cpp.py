"""Arguments of llama.cpp place every tensor where the plan has it, read as llama.cpp reads them."""

import re
import shlex

import pytest

import bigload
from bigload.errors import OptionError
from bigload.planning.llama_cpp import llama_cpp_arguments
from builders import make_checkpoint, write_sharded
from gguf_files import write_gguf

F32 = 0


def _made(folder, *, experts=0):
    tensors = {
        "token_embd.weight": (F32, (32, 64)),
        "output_norm.weight": (F32, (64,)),
        "output.weight": (F32, (32, 64)),
    }
    for block in range(12):
        tensors |= {f"blk.{block}.attn_{each}.weight": (F32, (64, 64)) for each in ("q", "k", "v", "output")}
        tensors |= {f"blk.{block}.{each}_norm.weight": (F32, (64,)) for each in ("attn", "ffn")}
        if experts:
            tensors[f"blk.{block}.ffn_gate_inp.weight"] = F32, (experts, 64)
        for each in ("gate", "up", "down"):
            name = f"blk.{block}.ffn_{each}_exps.weight" if experts else f"blk.{block}.ffn_{each}.weight"
            tensors[name] = (F32, (experts, 64, 64)) if experts else (F32, (64, 64))
    metadata = {"general.architecture": "llama", "llama.block_count": 12, "llama.attention.head_count": 4}
    metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2} if experts else {}
    return write_gguf(folder / "m.gguf", tensors, metadata), [*tensors]


def _placed(arguments, names):
    """Return the buffer of each name, as the first `-ot` says whose expression is found in it."""
    words = shlex.split(arguments)
    assert words[::2] == ["-ngl", *["-ot"] * (len(words) // 2 - 1)]
    rules = [word.rpartition("=")[::2] for word in words[3::2]]
    return {name: next((buffer for rule, buffer in rules if re.search(rule, name)), None) for name in names}


@pytest.mark.parametrize("limits", [{"cuda:0": "400KiB", "cpu": "1GiB"}, {0: "300KiB", 1: "500KiB", "disk": "1GiB"}])
def test_each_tensor_goes_where_the_plan_has_it(tmp_path, limits):
    source, names = _made(tmp_path)
    plan = bigload.plan(source, limits, overhead=0)
    opened = bigload.open_checkpoint(source)
    arguments = llama_cpp_arguments(plan, opened)
    assert arguments.startswith("-ngl 13 ")
    buffers = {"cpu": "CPU", "disk": "CPU", "cuda:0": "CUDA0", "cuda:1": "CUDA1"}
    expected = [buffers[str(plan.device_of(name))] for name in opened.tensors]
    found = _placed(arguments, names)
    assert found.pop("token_embd.weight") is None  # llama.cpp keeps it in RAM
    assert [*found.values()] == expected[1:]
    assert len(set(expected)) > 1


def test_experts_of_one_tensor_stay_together(tmp_path):
    source, names = _made(tmp_path, experts=8)
    plan = bigload.plan(source, {"cuda:0": "4MiB", "cpu": "1GiB"}, overhead=0, experts="split")
    found = _placed(llama_cpp_arguments(plan, bigload.open_checkpoint(source)), names)
    kept = {name for name, buffer in found.items() if buffer == "CUDA0"}
    opened = bigload.open_checkpoint(source)
    for name in opened.tensors:
        if ".experts." in name and not plan.device_of(name).is_accelerator:
            block, part = name.split(".")[2], {"w1": "gate", "w2": "down", "w3": "up"}[name.split(".")[-2]]
            assert f"blk.{block}.ffn_{part}_exps.weight" not in kept
    assert any("attn_q" in name for name in kept)


def test_nothing_on_an_accelerator_is_one_argument(tmp_path):
    source, _ = _made(tmp_path)
    assert llama_cpp_arguments(bigload.plan(source, {"cpu": "1GiB"}), bigload.open_checkpoint(source)) == "-ngl 0"


def test_safetensors_of_the_model_do_as_well(tmp_path):
    source = make_checkpoint(tmp_path / "m", blocks=2)
    plan = bigload.plan(source, {"cuda:0": "1GiB", "cpu": "1GiB"}, overhead=0)
    arguments = llama_cpp_arguments(plan, bigload.open_checkpoint(source))
    assert _placed(arguments, ["blk.1.ffn_down.weight"]) == {"blk.1.ffn_down.weight": "CUDA0"}


def test_other_models_and_devices_are_refused(tmp_path):
    source = write_sharded(
        tmp_path / "m", {"model.safetensors": {"a.weight": ("F32", [4])}}, config={"model_type": "bert"}
    )
    with pytest.raises(OptionError, match="'bert' has none"):
        llama_cpp_arguments(bigload.plan(source, {"cuda:0": "1GiB"}), bigload.open_checkpoint(source))
    source, _ = _made(tmp_path)
    with pytest.raises(OptionError, match="buffers"):
        llama_cpp_arguments(bigload.plan(source, {"npu:0": "1GiB"}), bigload.open_checkpoint(source))
