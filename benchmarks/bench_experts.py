"""Measure what decoding reads per token when experts are loaded on demand, beside whole blocks and accelerate.

    python benchmarks/bench_experts.py [--layers 12] [--tokens 32] [--share 4]

A model of the shape of Qwen3-MoE (128 experts a layer, 8 for a token) is made, with a router that prefers some experts
as trained ones do, and decodes the same tokens in each way. Weights are `--share` times as large as what may stay in
memory (`resident_bytes`). Files are dropped from the page cache before each token, so what the system counts as read
from the disk is what a machine without room for a cache would read. Logits have to be those of transformers' `eager`,
bit for bit. Needs transformers, and accelerate to compare with.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import bigload
from bigload.planning.expert_stats import ExpertStats
from bigload.runtime.streaming.expert_cache import ExpertCache
from bigload.units import format_size
from harness import Goal, installed_version, machine, show_status

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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    versions = (f"{name} {installed_version(name)}" for name in ("torch", "transformers", "accelerate"))
    print(", ".join(versions))
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-experts-") as folder:
        measure(Path(folder), arguments.layers, arguments.tokens, arguments.share)


def measure(folder: Path, num_layers: int, num_tokens: int, share: int) -> None:
    """Decode in each way, print what each reads, and compare the policy of the cache with an LRU cache."""
    show_status("making the model")
    plain = made(num_layers)
    plain.save_pretrained(folder / "model", max_shard_size="200MB")
    total = sum(each.nbytes for each in plain.parameters())
    room = total // share
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
    found: dict[str, Decoding] = {}
    for way in WAYS:
        show_status(way)
        if way == "accelerate" and installed_version(way) is None:
            continue
        model, files = dispatched(way, plain, folder, room, stats)
        found[way] = decode(model, files, tokens[:num_tokens], expected[:num_tokens])
        del model
    print(
        f"{format_size(total)} of weights, {format_size(room)} may stay, {num_layers} layers of "
        f"{plain.config.num_experts} experts of {format_size(expert_bytes)}, {num_tokens} tokens; page cache dropped"
    )
    for way, each in found.items():
        equal = "bit-equal to eager" if each.is_equal else "DIFFERS from eager"
        print(f"  {way:26}{format_size(round(each.read_bytes)):>12} a token {each.seconds:8.3f} s a token  {equal}")
    demand, capacity = found["experts on demand"], max((room - dense_bytes(plain)) // expert_bytes, 1)
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


def dispatched(way: str, plain: Any, folder: Path, room: int, stats: Path) -> tuple[Any, list[Path]]:  # noqa: ANN401
    """Return the model with its weights on disk, and the files that they are in."""
    torch.set_default_dtype(torch.bfloat16)  # which leaves buffers in float32, as `to` would not
    with bigload.init_empty_weights(include_buffers=False):
        model = type(plain)(plain.config).eval()
    torch.set_default_dtype(torch.float32)
    if way == "accelerate":
        model.load_state_dict(plain.state_dict(), assign=True)
        model.tie_weights()
        offloaded = folder / "accelerate"
        import_module("accelerate").disk_offload(model, str(offloaded), execution_device=torch.device("cpu"))
        return model, list(offloaded.iterdir())
    on_demand = {"whole blocks": False, "with recorded frequencies": stats}.get(way, True)
    bigload.load_checkpoint_and_dispatch(
        model, folder / "model", {"": "disk"}, resident_bytes=room, experts_on_demand=on_demand
    )
    return model, list((folder / "model").glob("*.safetensors"))


def decode(model: Any, files: Sequence[Path], tokens: torch.Tensor, expected: Sequence[torch.Tensor]) -> Decoding:  # noqa: ANN401
    """Decode `tokens`, and measure it, after a few that load what stays."""
    list(logits(model, tokens[:2]))
    before, began, is_equal = bytes_read(), time.perf_counter(), True
    for found, wanted in zip(logits(model, tokens, files), expected, strict=True):
        is_equal &= torch.equal(found, wanted)
    seconds = time.perf_counter() - began
    return Decoding((bytes_read() - before) / len(tokens), seconds / len(tokens), is_equal)


def logits(model: Any, tokens: torch.Tensor, files: Sequence[Path] = ()) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the logits after each token, each read with `files` out of the page cache."""
    cache = None
    for token in tokens:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        with torch.no_grad():
            answer = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        yield answer.logits


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


def lru_misses(trace: Sequence[tuple[str, int]], capacity: int) -> int:
    """Return how many uses would find their expert absent from an LRU cache."""
    cache: OrderedDict[tuple[str, int], None] = OrderedDict()
    misses = 0
    for key in trace:
        misses += key not in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return misses


def frequency_misses(trace: Sequence[tuple[str, int]], capacity: int, recorded: Counter[tuple[str, int]]) -> int:
    """Return the same of bigload's cache, which begins with the counts of another run."""
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
