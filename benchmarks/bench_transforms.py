"""Measure reshards that change tensors beside what a user would take today, and print time and peak memory.

    python benchmarks/bench_transforms.py [--gib 2] [--rounds 3] [--folder FOLDER] [--only lora] [--only gguf]

`lora`: an adapter merged into a Llama in bfloat16, beside PEFT's `merge_and_unload` with `save_pretrained`. `gguf`: a
file in Q4_K written as bfloat16, beside gguf-py's `dequantize`, tensor by tensor, with `save_file`; `--gib` is the size
of the result. `lora-plain` is a reshard of the same bytes that changes nothing. `gptq` and `mxfp4`: packed weights
written as bfloat16, beside a reshard of as many bytes that changes nothing. `fp8-block`, `fp8-channel`, `int8` and
`int4-g128`: weights in bfloat16 quantised, beside a reshard of them that changes nothing. Each run is a process of its
own, start and imports included, in rotating order; sources are in the page cache, the first round is not counted.
Needs transformers, peft and gguf. Nothing here decides a test.
"""

# ruff: noqa: PLC0415 - what is imported in a contender's function is a part of its time
from __future__ import annotations

import argparse
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.bench.fresh_memory import renew
from bigload.units import GIB, MIB, format_size
from harness import Goal, in_rounds

if TYPE_CHECKING:
    import torch

WIDTH, INNER, VOCABULARY = 2048, 5632, 4096
QUANTISED = ("fp8-block", "fp8-channel", "int8", "int4-g128")
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)


def main() -> None:
    """Print the figures of all contenders, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=list(KINDS), action="append")
    parser.add_argument("--child", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        CONTENDERS[arguments.child](arguments.folder, arguments.folder / "out")
        return
    for kind in arguments.only or KINDS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            make, names, goals = KINDS[kind]
            make(Path(folder), max(round(arguments.gib * GIB) // LAYER_BYTES, 1))
            runs = in_rounds({name: partial(child, name, Path(folder)) for name in names}, rounds=arguments.rounds)
            print(f"{kind}: {format_size(sum(f.stat().st_size for f in (Path(folder) / 'out').rglob('*')))} written")
            show(runs, *goals)


def child(name: str, folder: Path) -> dict[str, float]:
    """Run one contender in a process of its own, and return its seconds and the most memory it had."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    for file in folder.rglob("*"):
        if file.is_file():
            file.read_bytes()  # into the page cache
    renew(5 * GIB)  # what PEFT needs most
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    subprocess.run(
        [sys.executable, "-c", _PEAK, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    return {"seconds": time.perf_counter() - began, "peak": float((folder / "peak").read_text())}


_PEAK = """
import pathlib, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
pathlib.Path(sys.argv[-1], "peak").write_text(str(peak))
"""


def show(runs: dict[str, list[dict[str, float]]], faster: float, memory: float) -> None:
    """Print medians, and the ratios of the first contender, bigload, to the second; `memory` above 1 is in MiB."""
    for name, found in runs.items():
        seconds, peak = (statistics.median(run[key] for run in found) for key in ("seconds", "peak"))
        print(f"  {name:<14} {seconds:7.2f} s  peak {peak / MIB:7.0f} MiB")
    ours, theirs = list(runs.values())[:2]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]
    print(Goal(text=f"faster ({min(ratios):.2f} to {max(ratios):.2f})", value=statistics.median(ratios), bound=faster))
    if memory > 1:
        peak = max(run["peak"] for run in ours) / MIB
        print(Goal(text="MiB at most", value=peak, bound=memory, is_least=False))
        return
    part = max(run["peak"] for run in ours) / min(run["peak"] for run in theirs)
    print(Goal(text="its part of their memory", value=part, bound=memory, is_least=False))


def make_lora(folder: Path, layers: int) -> None:
    """Write a Llama in bfloat16, and an adapter of rank 16 for all of its linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    model.save_pretrained(folder / "base", max_shard_size="1GB")
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")


def make_gguf(folder: Path, layers: int) -> None:
    """Write a file in Q4_K, of random bits with scales that are numbers."""
    import numpy

    from gguf_files import gguf_bytes

    tensors = {}
    for layer in range(layers):
        tensors |= {f"blk.{layer}.attn_{each}.weight": (12, (WIDTH, WIDTH)) for each in ("q", "k", "v", "output")}
        tensors |= {f"blk.{layer}.ffn_{each}.weight": (12, (INNER, WIDTH)) for each in ("gate", "up")}
        tensors[f"blk.{layer}.ffn_down.weight"] = 12, (WIDTH, INNER)
    metadata = {"general.architecture": "llama", "llama.block_count": layers, "llama.attention.head_count": 16}
    whole = gguf_bytes(tensors, metadata)
    count = sum(rows * columns for _, (rows, columns) in tensors.values()) // 256
    blocks = numpy.random.default_rng(0).integers(0, 256, (count, 144), dtype=numpy.uint8)
    blocks[:, :4] = numpy.frombuffer(struct.pack("<2e", 0.01, 0.02), dtype=numpy.uint8)
    (folder / "model.gguf").write_bytes(whole[: len(whole) - blocks.nbytes] + blocks.tobytes())


def make_gptq(folder: Path, layers: int) -> None:
    """Write the layers of a Llama in GPTQ, 4 bits in groups of 128, and as many bytes in bfloat16."""
    import torch

    packed, plain = {}, {}
    for layer in range(layers):
        sizes = dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)) | dict.fromkeys(("up", "gate"), (INNER, WIDTH))
        for name, (outputs, inputs) in (sizes | {"down": (WIDTH, INNER)}).items():
            module = f"model.layers.{layer}.{name}_proj"
            for part, shape in {"qweight": (inputs // 8, outputs), "qzeros": (inputs // 128, outputs // 8)}.items():
                packed[f"{module}.{part}"] = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
            packed[f"{module}.scales"] = torch.rand(inputs // 128, outputs).half()
            plain[f"{module}.weight"] = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    _save(folder, packed, plain, {"quant_method": "gptq", "bits": 4, "group_size": 128})


def make_mxfp4(folder: Path, layers: int) -> None:
    """Write experts in MXFP4, of the size of gpt-oss, and as many bytes in bfloat16."""
    import torch

    packed, plain = {}, {}
    outputs, groups = 2880, 90
    for number in range(max(layers * LAYER_BYTES // (8 * outputs * groups * 64), 1)):
        module = f"model.layers.{number}.mlp.experts.down_proj"
        packed[f"{module}_blocks"] = torch.randint(0, 256, (8, outputs, groups, 16), dtype=torch.uint8)
        packed[f"{module}_scales"] = torch.randint(110, 130, (8, outputs, groups), dtype=torch.uint8)
        plain[module] = torch.randn(8, groups * 32, outputs, dtype=torch.bfloat16)
    _save(folder, packed, plain, {"quant_method": "mxfp4"})


def _save(folder: Path, packed: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], method: object) -> None:
    from safetensors.torch import save_file

    for name, tensors in {"packed": packed, "base": plain}.items():
        (folder / name).mkdir()
        save_file(tensors, folder / name / "model.safetensors")
        settings = {"quantization_config": method} if tensors is packed else {}
        (folder / name / "config.json").write_text(json.dumps({"model_type": "llama"} | settings))


def make_plain(folder: Path, layers: int) -> None:
    """Write the layers of a Llama in bfloat16."""
    import torch
    from safetensors.torch import save_file

    (folder / "base").mkdir()
    sizes = dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH)) | dict.fromkeys(("up", "gate"), (INNER, WIDTH))
    tensors = {
        f"model.layers.{layer}.{name}_proj.weight": torch.randn(shape, dtype=torch.bfloat16)
        for layer in range(layers)
        for name, shape in (sizes | {"down": (WIDTH, INNER)}).items()
    }
    save_file(tensors, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": "llama"}))


def quantize_by_bigload(scheme: str, folder: Path, out: Path) -> None:
    """Quantise while resharding."""
    import bigload

    bigload.reshard(folder / "base", out, transforms=[bigload.Quantize(scheme)])


def dequantize_by_bigload(folder: Path, out: Path) -> None:
    """Unpack while resharding."""
    import bigload

    bigload.reshard(folder / "packed", out, layout="shards", transforms=[bigload.Dequantize()])


def merge_by_bigload(folder: Path, out: Path) -> None:
    """Merge while resharding."""
    import bigload

    bigload.reshard(folder / "base", out, transforms=[bigload.MergeLora(folder / "adapter")])


def merge_by_peft(folder: Path, out: Path) -> None:
    """Load, merge and save the model, in its own dtype."""
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload().save_pretrained(out)


def copy_by_bigload(folder: Path, out: Path) -> None:
    """Reshard what changes nothing."""
    import bigload

    bigload.reshard(folder / "base", out, layout="shards")


def decode_by_bigload(folder: Path, out: Path) -> None:
    """Decode while resharding."""
    import bigload

    bigload.reshard(folder / "model.gguf", out, dtype="bf16")


def decode_by_gguf(folder: Path, out: Path) -> None:
    """Decode tensor by tensor, and save files of about 1 GiB."""
    import gguf
    import torch
    from safetensors.torch import save_file

    out.mkdir()
    held: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(folder / "model.gguf").tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        held[tensor.name] = values.to(torch.bfloat16)
        if sum(each.nbytes for each in held.values()) > GIB:
            save_file(held, out / f"{tensor.name}.safetensors")
            held = {}
    save_file(held, out / "last.safetensors")


CONTENDERS = {
    "lora-bigload": merge_by_bigload,
    "lora-peft": merge_by_peft,
    "lora-plain": copy_by_bigload,
    "gguf-bigload": decode_by_bigload,
    "gguf-gguf-py": decode_by_gguf,
    "unpack-bigload": dequantize_by_bigload,
    "unpack-plain": copy_by_bigload,
    "quantise-plain": copy_by_bigload,
    **{scheme: partial(quantize_by_bigload, scheme) for scheme in QUANTISED},
}
KINDS = {
    "lora": (make_lora, ["lora-bigload", "lora-peft", "lora-plain"], (3, 0.1)),
    "gguf": (make_gguf, ["gguf-bigload", "gguf-gguf-py"], (1, 1)),
    "gptq": (make_gptq, ["unpack-bigload", "unpack-plain"], (0.5, 512)),
    "mxfp4": (make_mxfp4, ["unpack-bigload", "unpack-plain"], (0.5, 512)),
    **{scheme: (make_plain, [scheme, "quantise-plain"], (0.5, 512)) for scheme in QUANTISED},
}
"""What to write first, who runs, and how much faster and with which part of the memory bigload should be."""

if __name__ == "__main__":
    main()
