"""Rows of running a model: weights streamed from disk, all weights resident, hooks, ranks that load their parts."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from bench_run import RunBench, bench_run
from bigload.bench.runner import Contender
from bigload.checkpoint.model import Checkpoint
from bigload.generation.planned_model import PlannedModel
from bigload.planning.planner import plan as make_plan
from bigload.runtime.hooks.attach_hooks import attach_align_device_hook_on_blocks
from bigload.units import MIB
from rows import CannotMeasureError, Measurement, Row, RowGoal, Setting, files_of, measured_rounds, per_round
from run_contenders import BIGLOAD, PLAIN
from straight_read import straight_read

_WINDOW_BLOCKS = 3
_WARM_RUNS = 4
"""Rounds of warm forwards for each round of other rows: they are short, and vary more than they differ."""
_RANKS = Path(__file__).with_name("bench_ranks.py")
_RANKS_SECONDS = 240
_OURS, _READER = "load_sharded", "dcp reader"
_HOOKED_LAYERS, _HOOKED_FORWARDS = 200, 20


def streaming(
    setting: Setting, *, tokens: int, is_cold: bool = False, resident_bytes: int | None = None
) -> Measurement:
    """Time forwards whose weights are on disk, beside the model in memory, raw reads and other programs."""
    checkpoint = setting.model
    planned = PlannedModel.open(
        checkpoint,
        None,
        asked_by="bench.py",
        prefetch_bytes=_WINDOW_BLOCKS * block_bytes(checkpoint),
        resident_bytes=resident_bytes,
    )
    return _forwards(setting, planned, tokens=tokens, is_cold=is_cold, has_peers=resident_bytes is None)


def resident(setting: Setting) -> Measurement:
    """Time forwards of a model that the plan keeps in RAM."""
    budget = {"cpu": 4 * setting.model.total_bytes}
    planned = PlannedModel.open(setting.model, make_plan(setting.model, budget, disk=False), asked_by="bench.py")
    return _forwards(setting, planned, tokens=1, has_peers=False)


def _forwards(
    setting: Setting, planned: PlannedModel, *, tokens: int, is_cold: bool = False, has_peers: bool = True
) -> Measurement:
    reads = [
        Contender(
            name="read: straight pread, 8 threads",
            run=partial(straight_read, files_of(setting.model), threads=8, block_bytes=4 * MIB),
        )
    ]
    rounds = setting.rounds * (1 if is_cold else _WARM_RUNS)
    bench = bench_run(
        planned,
        tokens=tokens,
        rounds=rounds + 1,
        cold=is_cold,
        peers=setting.with_peers and has_peers,
        more=reads if is_cold else (),
    )
    return _figures(bench)


def _figures(bench: RunBench) -> Measurement:
    names = {PLAIN: PLAIN, BIGLOAD: BIGLOAD, **{name: f"read: {name}" for name in bench.raw_names}}
    seconds = {
        names.get(name, name if name.startswith("read: ") else f"peer: {name}"): each.seconds[1:]
        for name, each in bench.measured.items()
    }
    cached = [share for found in bench.measured.values() for share in found.cached]
    differing = [
        f"the output of {name} differs by up to {output.max_difference}"
        for name, output in bench.outputs.items()
        if not output.is_within_rounding
    ]
    problems = {f"peer: {name}": reason for name, reason in bench.problems.items()}
    private = {names.get(name, name): (each.peak_private_bytes / MIB,) for name, each in bench.measured.items()}
    return Measurement(
        seconds=seconds,
        memory=private,
        problems=problems,
        cached=(min(cached), max(cached)),
        remarks=tuple(differing),
    )


def block_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the largest of the numbered layers of `checkpoint`."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        parts = tensor.name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            block = ".".join(parts[: number + 1])
            sizes[block] = sizes.get(block, 0) + tensor.num_bytes
    return max(sizes.values())


def hooks(setting: Setting) -> Measurement:
    """Time what hooks add to the forward of a deep small model that is in place already."""
    half = _HOOKED_LAYERS // 2
    plain = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(half))) for _ in range(2)))
    models, problems = {PLAIN: plain, BIGLOAD: copy.deepcopy(plain)}, {}
    attach_align_device_hook_on_blocks(models[BIGLOAD], dict.fromkeys("01", "cpu"))
    try:
        if not setting.with_peers:
            raise ImportError("left out (--no-peers)")
        accelerate = import_module("accelerate.hooks")
    except ImportError as error:
        problems["peer: accelerate"] = str(error)
    else:
        models["peer: accelerate"] = copy.deepcopy(plain)
        accelerate.attach_align_device_hook_on_blocks(models["peer: accelerate"], dict.fromkeys("01", "cpu"))
    x = torch.randn(1, 8)
    with torch.inference_mode():
        contenders = [
            Contender(name=name, run=partial(model, x), warm_ups=1, repeats=_HOOKED_FORWARDS)
            for name, model in models.items()
        ]
        found = measured_rounds(setting, contenders, problems=problems)
    added = {
        f"{name}, added": tuple(own - bare for own, bare in zip(seconds, found.seconds[PLAIN], strict=True))
        for name, seconds in found.seconds.items()
        if name != PLAIN
    }
    return Measurement(seconds={**found.seconds, **added}, problems=found.problems)


def ranks(setting: Setting, *, state: str) -> Measurement:
    """Time four ranks of FSDP that load their rows, beside torch's reader; three times a round if files are warm."""
    repeats = 1 if state == "cold" else 3
    with TemporaryDirectory(dir=setting.folder) as scratch:
        out = Path(scratch) / "ranks.json"
        words = ["--folder", str(setting.model.root), "--ways", "rows", "--states", state]
        words += ["--rounds", str(repeats * setting.rounds), "--json", str(out)]
        words += ["--without", "torch broadcast", *(f"load_sharded, {way}" for way in ("read", "direct", "sent"))]
        _run([sys.executable, str(_RANKS), *words])
        found = json.loads(out.read_text(encoding="utf-8"))
    seconds = {name: per_round(each, setting.rounds) for name, each in found[f"rows, {state}"].items()}
    return Measurement(seconds=seconds, remarks=tuple(found["remarks"]))


def _run(command: Sequence[str]) -> None:
    """Run a script that starts ranks; if it does not end, or Ctrl-C comes, end it and its ranks."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as done:
        try:
            _, errors = done.communicate(timeout=_RANKS_SECONDS)
        except BaseException as error:
            os.killpg(done.pid, signal.SIGTERM)  # torchrun passes it on to the ranks
            done.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotMeasureError(f"the ranks did not end within {_RANKS_SECONDS} s") from None
            raise
    if done.returncode:
        raise CannotMeasureError(f"the ranks failed: {(errors.strip().splitlines() or ['no message'])[-1]}")


def _within(text: str, bound: float, *limits: str) -> RowGoal:
    return RowGoal(text=text, contender=BIGLOAD, limits=limits, bound=bound)


def _ranks_goal(bound: float) -> RowGoal:
    return RowGoal(text="rate, of torch's reader", contender=_OURS, limits=(_READER,), bound=bound, is_least=True)


_PRIVATE = RowGoal(
    text="private memory of a forward, four blocks of 101 MiB and 64 MiB",
    contender=BIGLOAD,
    bound=(_WINDOW_BLOCKS + 1) * 101 + 64,
    is_memory=True,
)
_FROM_MEMORY = (_within("time, of the model in memory", 1.1, PLAIN), _PRIVATE)
_FROM_DISK = (_within("time, of max(compute, fastest read)", 1.05, PLAIN, "read: "), _PRIVATE)

ROWS = (
    *(
        Row(
            name=f"stream-{state}-{tokens}",
            is_quick=tokens == 1,
            title=f"streaming, {state}, {tokens} {'token' if tokens == 1 else 'tokens'}",
            measure=partial(streaming, tokens=tokens, is_cold=state == "cold"),
            goals=_FROM_DISK if state == "cold" else _FROM_MEMORY,
            packages=("transformers",),
            disk=2,
            memory=3,
        )
        for tokens, state in ((1, "warm"), (1, "cold"), (128, "warm"))
    ),
    Row(
        name="stream-bounded",
        title="streaming, warm, 1 token, no block may stay (resident_bytes=0)",
        measure=partial(streaming, tokens=1, resident_bytes=0),
        goals=_FROM_MEMORY,
        packages=("transformers",),
        memory=3,
    ),
    Row(
        name="resident",
        is_quick=True,
        title="everything resident, 1 token",
        measure=resident,
        goals=(_within("time, of the model in memory", 1.02, PLAIN),),
        packages=("transformers",),
        memory=4,
    ),
    Row(
        name="hooks",
        title=f"hooks of {_HOOKED_LAYERS} modules in place",
        measure=hooks,
        goals=(
            RowGoal(
                text="time added to a forward, of accelerate's",
                contender=f"{BIGLOAD}, added",
                limits=("peer: accelerate, added",),
                bound=0.333,
            ),
        ),
        packages=("accelerate",),
        disk=0,
    ),
    *(
        Row(
            name=f"ranks-{state}",
            is_quick=state == "warm",
            title=f"ranks (FSDP, 4), {state}",
            measure=partial(ranks, state=state),
            goals=(_ranks_goal(bound),),
            memory=3,
        )
        for state, bound in (("warm", 1.3), ("cold", 1.2))
    ),
)
