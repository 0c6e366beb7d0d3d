"""Measure what decoding reads per token when experts are loaded on demand, beside whole blocks and accelerate.

    python benchmarks/bench_experts.py [--layers 12] [--tokens 32] [--share 4]
    python benchmarks/bench_experts.py --layers 60 --tokens 8 --memory 1GiB

A model of the shape of Qwen3-MoE (128 experts a layer, 8 for a token) is made, with a router that prefers some experts
as trained ones do, and decodes the same tokens in each way. Weights are `--share` times as large as what may stay in
memory (`resident_bytes`). Files are dropped from the page cache before each token, so what the system counts as read
from the disk is what a machine without room for a cache would read. With `--memory` each way runs in a process whose
memory and page cache are limited by a control group instead, and chooses by itself what stays. Logits have to be those
of transformers' `eager`, bit for bit. Needs transformers, and accelerate to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lru_cache import lru_misses

import bigload
from bigload.planning.expert_stats import ExpertStats
from bigload.runtime.streaming.expert_cache import ExpertCache
from bigload.units import format_size, parse_size
from harness import Goal, installed_version, machine, show_status
from memory_group import run_within

COMMON = 1.0
"""The size of what all tokens have in common, as a share of what they have not."""

TRACED_TOKENS = 96
"""Tokens whose experts are recorded, and as many others whose experts are looked for in the caches."""

WAYS = ("experts on demand", "with recorded frequencies", "whole blocks", "accelerate")


@dataclass(frozen=True, slots=True)
class Decoding:
    """One way: bytes read per token, seconds per token, and whether all logits were those of `eager`."""

    read_bytes: float
    seconds: float
    is_equal: bool


def main() -> None:
    """Make the model, decode in each way and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--share", type=int, default=4, help="weights, as a multiple of what may stay")
    parser.add_argument("--folder", type=Path, help="where to write the model; on the disk to be measured")
    parser.add_argument("--memory", type=parse_size, help="run each way in a control group with this much memory")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.way is not None:
        print(json.dumps(asdict(decoded(arguments.way, arguments.folder, None, arguments.tokens))))
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    versions = (f"{name} {installed_version(name)}" for name in ("torch", "transformers", "accelerate"))
    print(", ".join(versions))
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-experts-") as folder:
        measure(Path(folder), arguments.layers, arguments.tokens, arguments.share, arguments.memory)


def measure(folder: Path, num_layers: int, num_tokens: int, share: int, memory: int | None) -> None:
    """Decode in each way, print what each reads, and compare the policy of the cache with an LRU cache."""
    show_status("making the model")
    plain = made(num_layers)
    plain.save_pretrained(folder / "model", max_shard_size="200MB")
    total = sum(each.nbytes for each in plain.parameters())
    room = total // share if memory is None else memory
    expert = plain.model.layers[0].mlp.experts
    expert_bytes = sum(each[0].nbytes for each in expert.parameters())
    size = (max(num_tokens, TRACED_TOKENS),)
    warm, tokens = (torch.randint(0, plain.config.vocab_size, size, generator=seeded(each)) for each in (1, 2))
    with traced(plain) as recorded:
        list(logits(plain, warm))
    with traced(plain) as trace:
        expected = list(logits(plain, tokens))
    stats = folder / "experts.json"
    stats.write_text(ExpertStats(uses=uses_of(recorded, plain)).to_json())
    torch.save((tokens, expected), folder / "expected.pt")
    has_accelerate = installed_version("accelerate") is not None
    if has_accelerate:
        show_status("writing what accelerate reads")
        import_module("accelerate.utils").offload_state_dict(str(folder / "accelerate"), plain.state_dict())
    capacity = max((room - dense_bytes(plain)) // expert_bytes, 1)
    num_experts = plain.config.num_experts
    del plain
    os.sync()  # pages that are not yet on the disk stay in the page cache, charged to this process
    found: dict[str, Decoding] = {}
    for way in WAYS:
        show_status(way)
        if way == "accelerate" and not has_accelerate:
            continue
        if memory is None:
            found[way] = decoded(way, folder, room, num_tokens)
            continue
        arguments = ("--way", way, "--folder", str(folder), "--tokens", str(num_tokens))
        try:
            found[way] = Decoding(**json.loads(run_within([sys.executable, __file__, *arguments], memory)))
        except subprocess.CalledProcessError as error:
            print(f"  {way}: ended with {error.returncode}")
    print(
        f"{format_size(total)} of weights, {format_size(room)} may stay, {num_layers} layers of "
        f"{num_experts} experts of {format_size(expert_bytes)}, {num_tokens} tokens; "
        f"{'page cache dropped' if memory is None else 'in a control group'}"
    )
    for way, each in found.items():
        equal = "bit-equal to eager" if each.is_equal else "DIFFERS from eager"
        print(f"  {way:26}{format_size(round(each.read_bytes)):>12} a token {each.seconds:8.3f} s a token  {equal}")
    demand = found["experts on demand"]
    lru = lru_misses(trace, capacity)
    counted = frequency_misses(trace, capacity, Counter(recorded))
    print(f"  misses among {len(trace)} uses, {capacity} experts stay: LRU {lru}, with recorded frequencies {counted}")
    for way in ("whole blocks", "accelerate"):
        if way in found:
            times = found[way].read_bytes / max(demand.read_bytes, 1)
            print(Goal(text=f"bytes a token, {way} / on demand", value=times, bound=5))
    print(Goal(text="fewer misses than LRU", value=100 * (1 - counted / lru), bound=30, unit="%"))
    print(Goal(text="ways that are bit-equal", value=sum(each.is_equal for each in found.values()), bound=len(found)))


def made(num_layers: int) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the model, with a part of the router's answer that is the same for all tokens."""
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        torch.nn.init.normal_(embeddings)  # large beside what attention adds, which is alike for all tokens
        embeddings += COMMON * torch.randn(config.hidden_size).to(torch.bfloat16)
    model.set_experts_implementation("eager")
    return model


def decoded(way: str, folder: Path, room: int | None, num_tokens: int) -> Decoding:
    """Decode in one way; without `room`, with the system's page cache and what bigload chooses to keep."""
    tokens, expected = torch.load(folder / "expected.pt")
    model, files = dispatched(way, folder, room)
    for file in files:
        drop(file)
    list(logits(model, tokens[:2]))  # loads what stays
    before, began, is_equal = bytes_read(), time.perf_counter(), True
    found = logits(model, tokens[:num_tokens], () if room is None else files)
    for answer, wanted in zip(found, expected[:num_tokens], strict=True):
        is_equal &= torch.equal(answer, wanted)
    seconds = time.perf_counter() - began
    return Decoding((bytes_read() - before) / num_tokens, seconds / num_tokens, is_equal)


def dispatched(way: str, folder: Path, room: int | None) -> tuple[Any, list[Path]]:
    """Return the model with its weights on disk, and the files that they are in."""
    transformers = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    torch.set_default_dtype(torch.bfloat16)  # which leaves buffers in float32, as `to` would not
    with bigload.init_empty_weights(include_buffers=False):
        model = transformers.Qwen3MoeForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation("eager")
    if way == "accelerate":
        offloaded = folder / "accelerate"
        import_module("accelerate").disk_offload(model, str(offloaded), execution_device=torch.device("cpu"))
        return model, list(offloaded.iterdir())
    on_demand: bool | Path = folder / "experts.json" if way == "with recorded frequencies" else way != "whole blocks"
    bigload.load_checkpoint_and_dispatch(
        model, folder / "model", {"": "disk"}, resident_bytes=room, experts_on_demand=on_demand
    )
    return model, list((folder / "model").glob("*.safetensors"))


def logits(model: Any, tokens: torch.Tensor, files: Sequence[Path] = ()) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the logits after each token, each read with `files` out of the page cache."""
    cache = None
    for token in tokens:
        for file in files:
            drop(file)
        with torch.no_grad():
            answer = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        yield answer.logits


def drop(file: Path) -> None:
    """Drop `file` from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def bytes_read() -> int:
    """Return what this process has had read from disks so far."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("read_bytes:")))


def seeded(number: int) -> torch.Generator:
    """Return a generator of random numbers."""
    return torch.Generator().manual_seed(number)


class traced(list[tuple[str, int]]):  # noqa: N801 - a context
    """The experts that a model uses while the context lasts, by module and number, in order."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._model = model

    def __enter__(self) -> traced:
        self._hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: self._note(name, args[1]))
            for name, module in self._model.named_modules()
            if name.endswith(".experts")
        ]
        return self

    def _note(self, name: str, chosen: torch.Tensor) -> None:
        self.extend((name, number) for number in sorted(set(chosen.flatten().tolist())))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def uses_of(trace: Sequence[tuple[str, int]], model: Any) -> dict[str, tuple[int, ...]]:  # noqa: ANN401
    """Return the uses of each expert by module."""
    counts = Counter(trace)
    names = dict.fromkeys(name for name, _ in trace)
    return {name: tuple(counts[name, number] for number in range(model.config.num_experts)) for name in names}


def dense_bytes(model: Any) -> int:  # noqa: ANN401
    """Return the bytes of all weights but those of experts."""
    return sum(each.nbytes for name, each in model.named_parameters() if ".experts." not in name)


def frequency_misses(trace: Sequence[tuple[str, int]], capacity: int, recorded: Counter[tuple[str, int]]) -> int:
    """Return how many uses would find their expert absent from bigload's cache, with the counts of another run."""
    cache: ExpertCache[tuple[str, int]] = ExpertCache(capacity)
    for key, count in recorded.items():
        cache.set_count(key, count)
    misses = 0
    for key in trace:
        misses += key not in cache
        cache.note_use(key)
        cache.admit(key, 1, lambda _: False)
    return misses


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
