"""Answers to questions about plans for ranks: as lines, as a table, and as plain JSON values."""

from __future__ import annotations

from dataclasses import asdict

from bigload.documents import fields
from bigload.plain_text import printable
from bigload.planning.model_parallel.parallel_questions import GridMemory, LeastGpuMemory, RankExplanation
from bigload.planning.workload import Workload
from bigload.units import common_unit, format_rounded_up


def least_memory(answer: LeastGpuMemory) -> list[str]:
    """Return the least memory of each GPU, and a line for each other way to divide as many GPUs."""
    lines = [str(answer)]
    others = [each for each in answer.grids if each is not answer.asked]
    sizes = [each.gpu_bytes for each in answer.grids if each.gpu_bytes is not None]
    unit, _ = common_unit(sizes)
    for each in others:
        if each.gpu_bytes is None:
            text = f"does not divide: {each.reason}"
        else:
            text = f"{format_rounded_up(each.gpu_bytes, unit)} {unit}, {_traffic(each)}"
        lines.append(f"  TP {each.grid.tp} x PP {each.grid.pp}: {printable(text)}")
    if answer.asked.token_seconds:
        lines.insert(1, f"  {_traffic(answer.asked)}")
    return lines


def _traffic(memory: GridMemory) -> str:
    if not memory.token_seconds:
        return "nothing is sent"
    return f"{memory.token_seconds * 10**6:.1f} µs for what a token sends, without latencies"


def explanation(answer: RankExplanation) -> list[str]:
    """Return where a module is, then why, a line per reason."""
    return [printable(answer.headline), *(f"  {printable(reason.text)}" for reason in answer.reasons)]


def of_least_memory(answer: LeastGpuMemory, checkpoint: str, workload: Workload) -> dict[str, object]:
    """Return what `--json` prints; the first row is what was asked for."""
    rows = [answer.asked, *(each for each in answer.grids if each is not answer.asked)]
    return {
        "schema": "bigload.parallel-fits/1.0",
        "checkpoint": checkpoint,
        **fields(workload, "context", "batch"),
        "least": [
            {
                **fields(row.grid, "tp", "pp", "hosts"),
                **fields(row, "gpu_bytes", "token_seconds"),
                "reason": row.reason or None,
            }
            for row in rows
        ],
    }


def of_explanation(answer: RankExplanation, checkpoint: str) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "schema": "bigload.parallel-explain/1.0",
        "checkpoint": checkpoint,
        **asdict(answer),
        "stages": list(answer.stages),
        "ranks": list(answer.ranks),
        "reasons": [asdict(reason) for reason in answer.reasons],
    }
