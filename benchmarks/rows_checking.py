"""Rows of checks: a written folder beside its manifest, a plan beside a checkpoint that has changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import bigload
import reshard_contenders
from bigload.bench.page_cache_state import CacheState
from bigload.bench.raw_limit import can_read_direct
from bigload.bench.runner import Contender
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import StalePlanError
from bigload.planning.plan_file import check_plan
from bigload.units import KIB, MIB
from make import load_recipe, make
from program_contender import ProcessRun, run_process
from rows import Measurement, Row, RowGoal, Setting, files_of, measured_rounds
from straight_read import straight_read

_BIGLOAD = "bigload"


def verification(setting: Setting) -> Measurement:
    """Time `bigload verify` as a whole process, beside reads of the same files past the page cache, into one memory."""
    out = bigload.reshard(setting.model, setting.folder / "out", layout="shards").out
    files = sorted(out.glob("*.safetensors"))
    words = (sys.executable, "-c", "from bigload_cli.app import main; main()", "verify", str(out))
    runs: list[ProcessRun] = []
    is_direct = can_read_direct(files)
    reads = [
        Contender(
            name=f"limit: straight {'direct' if is_direct else 'pread'}, {threads} threads, blocks of {block} MiB",
            run=partial(
                straight_read, files, threads=threads, block_bytes=block * MIB, is_direct=is_direct, is_kept=False
            ),
        )
        for threads, block in ((2, 8), (8, 1))
    ]
    ours = Contender(name=_BIGLOAD, run=lambda: runs.append(run_process(words)))
    idle = run_process((sys.executable, reshard_contenders.__file__, "idle", "{}")).resident_bytes
    found = measured_rounds(setting, [ours, *reads], files=files, cache=CacheState.COLD)
    return replace(found, memory={_BIGLOAD: [(run.resident_bytes - idle) / MIB for run in runs[1:]]})


def difference(setting: Setting, *, cache: CacheState) -> Measurement:
    """Time a diff of two equal checkpoints, beside reads of both into the same memory, and `cmp` file by file."""
    first = setting.model
    second = open_checkpoint(shutil.copytree(first.root, setting.folder / "other"))
    pairs = list(zip(files_of(first), files_of(second), strict=True))
    files = [file for pair in pairs for file in pair]
    is_direct = cache is CacheState.COLD and can_read_direct(files)

    def diff() -> None:
        assert bigload.diff(first, second, trust_digests=False).is_equal

    def cmp() -> None:
        for pair in pairs:
            subprocess.run(["cmp", *pair], check=True)

    reads = [
        Contender(
            name=f"limit: {'direct' if is_direct else 'pread'}, {threads} threads, blocks of {block // KIB} KiB",
            run=partial(straight_read, files, threads=threads, block_bytes=block, is_direct=is_direct, is_kept=False),
        )
        for threads, block in ((2, 256 * KIB), (2, 4 * MIB), (8, MIB))
    ]
    contenders = [Contender(name=_BIGLOAD, run=diff), *reads, Contender(name="peer: cmp", run=cmp)]
    return measured_rounds(setting, contenders, files=files, cache=cache)


def staleness(setting: Setting) -> Measurement:
    """Time the refusal of a plan for 70B whose checkpoint lacks a tensor since; headers are read anew."""
    recipe = load_recipe("llama-70b")
    plan = bigload.plan(setting.sparse("llama-70b"), {"cuda:0": "80GiB", "cuda:1": "80GiB"})
    root = make(replace(recipe, tensors=recipe.tensors[:-1]), setting.folder / "changed", data="sparse").root

    def refuse() -> None:
        try:
            check_plan(plan, open_checkpoint(root))
        except StalePlanError:
            return
        raise AssertionError("the plan was taken for one of the changed checkpoint")

    return measured_rounds(setting, [Contender(name=_BIGLOAD, run=refuse)])


ROWS = (
    Row(
        name="verify",
        title="verify, cold",
        measure=verification,
        goals=(
            RowGoal(text="rate, of raw reads", contender=_BIGLOAD, limits=("limit: ",), bound=0.8, is_least=True),
            RowGoal(text="memory above an interpreter", contender=_BIGLOAD, bound=128, is_memory=True),
        ),
        disk=2,
        memory=1,
    ),
    *(
        Row(
            name=f"diff-{cache}",
            title=f"diff of equal checkpoints, {cache}",
            measure=partial(difference, cache=cache),
            goals=(
                RowGoal(text="rate, of raw reads", contender=_BIGLOAD, limits=("limit: ",), bound=0.9, is_least=True),
            ),
            disk=2,
            memory=0.1 if cache is CacheState.COLD else 2,
        )
        for cache in (CacheState.WARM, CacheState.COLD)
    ),
    Row(
        name="stale-plan",
        title="refusal of a stale plan, 70B in 30 shards",
        measure=staleness,
        goals=(RowGoal(text="seconds, with opening", contender=_BIGLOAD, bound=0.1),),
        disk=0,
        is_quick=True,
    ),
)
