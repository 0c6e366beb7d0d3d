"""Rows of resharding: whole processes, beside cp, raw writes and other programs. A run ends when fsync has returned."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import bigload
import reshard_contenders
from bigload.bench.page_cache_state import CacheState
from bigload.checkpoint.model import Checkpoint
from bigload.dtypes import DTYPES
from bigload.planning.plan_file import write_plan
from bigload.units import MIB
from harness import installed_version
from make import load_recipe, make
from program_contender import ProgramContender, run_process
from rows import Measurement, Row, RowGoal, Setting, files_of, measured_rounds

_PROGRAM = (sys.executable, "-c", "from bigload_cli.app import main; main()")
_MAX_MEBIBYTES, _MAX_CAST_MEBIBYTES = 128, 512
"""What a reshard may hold above an interpreter, whatever the size: without torch, and where it casts."""

_COPY, _RAW, _BACK = "limit: cp -r, sync", "limit: raw write", "limit: raw write and read back"
_BACK_TWICE = f"{_BACK} of twice the bytes"
_NONE, _FULL = "bigload, none", "bigload, full"
_CASTS = (("fp16", "full", _BACK), ("fp32", "full", _BACK_TWICE), ("fp32", "none", _RAW))
"""By dtype and verification: the limit that writes as many bytes."""

_PEERS: Mapping[str, tuple[str, str]] = {
    "safetensors": ("safetensors", "load_file, save_file"),
    "safetensors_by_shard": ("safetensors", "a file at a time"),
    "huggingface_hub": ("huggingface_hub", "save_torch_state_dict"),
}


def shards(setting: Setting) -> Measurement:
    """Half as many shards, without and with verification, beside cp and the disk's own rate."""
    source, out = setting.model, setting.folder / "out"
    return _measured(
        setting, [_copy(source, out), *_raw(_RAW, source, out), *_raw(_BACK, source, out), *_ours(source, out)]
    )


def layouts(setting: Setting) -> Measurement:
    """The other layouts, verified, beside the disk's own rate."""
    source, out = setting.model, setting.folder / "out"
    budget = dict.fromkeys(("cuda:0", "cuda:1", "cpu"), source.total_bytes // 2)
    plan = setting.folder / "plan.json"
    write_plan(bigload.plan(source, budget, overhead=0), plan)
    keywords: Mapping[str, dict[str, object]] = {
        "devices": {"source": str(plan)},
        "offload": {"source": str(source.root)},
        "ranks": {"source": str(source.root), "tp": 2},
    }
    ours = [
        _way(f"bigload, {layout}", "bigload", out, layout=layout, verify="full", **more)
        for layout, more in keywords.items()
    ]
    return _measured(setting, [*_raw(_BACK, source, out), *ours])


def peers(setting: Setting) -> Measurement:
    """Other programs that write the same shards."""
    source, out = setting.model, setting.folder / "out"
    found, problems = [], {}
    for way, (package, what) in _PEERS.items():
        version = installed_version(package) if setting.with_peers else None
        if version is None:
            problems[f"peer: {package}"] = "not installed" if setting.with_peers else "left out (--no-peers)"
            continue
        name = f"peer: {package} {version}, {what}"
        peer = _way(name, way, out, source=str(source.root), max_shard_bytes=_shard_bytes(source))
        found.append(replace(peer, may_fail=True))
    return _measured(setting, [*_ours(source, out), *found], problems)


def cast(setting: Setting) -> Measurement:
    """Another dtype on the way, as many bytes and twice as many, beside writes of as many bytes."""
    source, out = setting.model, setting.folder / "out"
    ours = [
        _way(
            f"bigload, {dtype}, {verify}",
            "bigload",
            out,
            source=str(source.root),
            layout="shards",
            verify=verify,
            dtype=dtype,
        )
        for dtype, verify, _ in _CASTS
    ]
    limits = [*_raw(_BACK, source, out), *_raw(_BACK_TWICE, source, out, copies=2), *_raw(_RAW, source, out, copies=2)]
    return _measured(setting, [*limits, *ours])


def huge(setting: Setting) -> Measurement:
    """More than 1 TB of holes: memory must not grow with the checkpoint."""
    recipe, wide = load_recipe("deepseek-v3"), DTYPES["BF16"]
    tensors = tuple(replace(each, dtype=wide) if each.dtype.name == "F8_E4M3" else each for each in recipe.tensors)
    root = make(replace(recipe, tensors=tensors), setting.folder / "huge", data="sparse").root
    out = setting.folder / "out"
    words = (*_PROGRAM, "reshard", str(root), str(out), "--layout", "shards", "--max-shard-size", "20GB", "--dry-run")
    ours = _way(
        "bigload, none", "bigload", out, source=str(root), layout="shards", verify="none", max_shard_bytes=20 * 10**9
    )
    contenders = [ProgramContender(name="bigload, dry run", words=words, out=out), ours]
    return _programs(replace(setting, rounds=1), contenders)


def _measured(
    setting: Setting, contenders: Sequence[ProgramContender], problems: Mapping[str, str] | None = None
) -> Measurement:
    return _programs(setting, contenders, setting.model, problems)


def _programs(
    setting: Setting,
    contenders: Sequence[ProgramContender],
    source: Checkpoint | None = None,
    problems: Mapping[str, str] | None = None,
) -> Measurement:
    """Run programs, with the files of `source` in the page cache; memory is above that of an idle interpreter."""
    idle = run_process(_script("idle")).resident_bytes
    found = measured_rounds(
        setting,
        contenders,
        files=() if source is None else files_of(source),
        cache=CacheState.AS_IS if source is None else CacheState.WARM,
        renewed_bytes=0 if source is None else source.total_bytes,
        problems=problems,
    )
    runs = {each.name: each.runs[1:] for each in contenders if each.name in found.seconds}
    return replace(
        found,
        seconds={name: [run.seconds for run in each] for name, each in runs.items()},
        memory={name: [(run.resident_bytes - idle) / MIB for run in each] for name, each in runs.items()},
    )


def _copy(source: Checkpoint, out: Path) -> ProgramContender:
    words = ("sh", "-c", 'cp -r "$0" "$1" && exec sync -f "$1"', str(source.root), str(out))
    return ProgramContender(name=_COPY, words=words, out=out)


def _raw(name: str, source: Checkpoint, out: Path, *, copies: int = 1) -> list[ProgramContender]:
    """Return raw writes in several ways: a disk needs more requests in flight than there are cores."""
    reads_back = name.startswith(_BACK)
    return [
        _way(
            f"{name}, {threads} threads, blocks of {block} MiB",
            "raw_write",
            out,
            source=str(source.root),
            threads=threads,
            block_bytes=block * MIB,
            copies=copies,
            reads_back=reads_back,
        )
        for threads, block in (((8, 4),) if reads_back else ((4, 8), (8, 4)))
    ]


def _ours(source: Checkpoint, out: Path) -> list[ProgramContender]:
    options = {"source": str(source.root), "layout": "shards", "max_shard_bytes": _shard_bytes(source)}
    return [_way(f"bigload, {verify}", "bigload", out, verify=verify, **options) for verify in ("none", "full")]


def _shard_bytes(source: Checkpoint) -> int:
    return source.total_bytes // 2 + MIB


def _way(name: str, way: str, out: Path, **keywords: object) -> ProgramContender:
    return ProgramContender(name=name, words=_script(way, out=str(out), **keywords), out=out)


def _script(way: str, **keywords: object) -> tuple[str, ...]:
    return (sys.executable, reshard_contenders.__file__, way, json.dumps(keywords))


def _rate(contender: str, limit: str, bound: float) -> RowGoal:
    text = f"{contender}: rate, of {limit.partition(': ')[2].rstrip(',') or 'the best peer'}"
    return RowGoal(text=text, contender=contender, limits=(limit,), bound=bound, is_least=True)


def _memory(contender: str, bound: float = _MAX_MEBIBYTES) -> RowGoal:
    text = f"{contender}: memory above an interpreter"
    return RowGoal(text=text, contender=contender, bound=bound, is_memory=True)


ROWS = (
    Row(
        name="reshard",
        is_quick=True,
        title="reshard into two shards",
        measure=shards,
        goals=(
            _rate(_NONE, f"{_RAW},", 0.97),
            _rate(_NONE, _COPY, 1.0),
            _rate(_FULL, f"{_BACK},", 0.97),
            _memory(_NONE),
            _memory(_FULL),
        ),
        disk=2,
        memory=2,
    ),
    Row(
        name="reshard-layouts",
        title="reshard into other layouts, verified",
        measure=layouts,
        goals=tuple(
            goal
            for layout in ("devices", "offload", "ranks")
            for goal in (_rate(f"bigload, {layout}", f"{_BACK},", 0.97), _memory(f"bigload, {layout}"))
        ),
        disk=2,
        memory=2,
    ),
    Row(
        name="reshard-peers",
        title="reshard beside other programs",
        measure=peers,
        goals=(_rate(_NONE, "peer: ", 2.0), _rate(_FULL, "peer: ", 1.0)),
        disk=2,
        memory=3,
    ),
    Row(
        name="reshard-cast",
        title="reshard to another dtype, verified",
        measure=cast,
        goals=(
            *(_rate(f"bigload, {dtype}, {verify}", f"{limit},", 1 / 1.3) for dtype, verify, limit in _CASTS),
            *(_memory(f"bigload, {dtype}, full", _MAX_CAST_MEBIBYTES) for dtype in ("fp16", "fp32")),
        ),
        disk=3,
        memory=2,
    ),
    Row(
        name="reshard-huge",
        title="reshard of more than 1 TB of holes",
        measure=huge,
        goals=(_memory("bigload, dry run"), _memory(_NONE)),
        disk=0,
    ),
)
