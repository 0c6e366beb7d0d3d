"""Answers to questions about plans: as lines, as a table, and as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bigload.devices import Device
from bigload.documents import fields
from bigload.plain_text import PlainTable, printable
from bigload.planning.questions.compare import PolicyOutcome
from bigload.planning.questions.explanation import AdjacentModule, Explanation
from bigload.planning.questions.max_context import MaxContext
from bigload.planning.questions.sizing import GpuNeeds, GpuSizes, LargestUnit
from bigload.planning.workload import Workload
from bigload.units import format_size


def explanation(answer: Explanation) -> list[str]:
    """Return where a module is, then why, a line per reason."""
    texts = [*(reason.text for reason in answer.reasons), *(other.text for other in answer.alternatives)]
    return [printable(answer.headline), *(f"  {printable(text)}" for text in texts)]


def comparison(outcomes: Sequence[PolicyOutcome]) -> PlainTable:
    """Return a table with a row per policy."""
    right = ("ACCELERATORS", "RAM", "DISK", "PER TOKEN", "CHANGES", "FULLEST")
    table = PlainTable(("POLICY", *right), right=right)
    for outcome in outcomes:
        if not outcome.fits:
            table.add(outcome.policy, "does not fit", *["-"] * (len(right) - 1))
            continue
        held = (outcome.accelerator_bytes, outcome.ram_bytes, outcome.disk_bytes)
        table.add(
            outcome.policy,
            *(format_size(size) if size else "-" for size in held),
            f"{outcome.token_seconds * 1000:.1f} ms" if outcome.token_seconds else "-",
            str(outcome.num_device_changes),
            "-" if outcome.fullest_share is None else f"{outcome.fullest_share:.1%}",
        )
    return table


def least_memory(answer: GpuSizes) -> list[str]:
    """Return the least memory per GPU, and what bounds it."""
    return [str(answer), *_bounds(answer), *map(_note, answer.unknown)]


def gpu_needs(answer: GpuNeeds) -> list[str]:
    """Return how many GPUs are needed, with and without RAM, and what fewer GPUs cost."""
    lines = [str(answer)]
    for row in answer.with_ram:
        what = "experts" if row.only_experts else "weights"
        ms = row.token_seconds * 1000
        lines.append(f"with {row.num_gpus}, the {what} that a token needs from RAM arrive in {ms:.1f} ms")
    return [*lines, *_bounds(answer), *map(_note, answer.unknown)]


def longest_context(answer: MaxContext) -> list[str]:
    """Return the largest contexts and remarks."""
    return [str(answer), *map(_note, answer.remarks)]


def _bounds(answer: GpuSizes | GpuNeeds) -> list[str]:
    lines = []
    if answer.fixed_bytes:
        lines.append(f"{format_size(answer.fixed_bytes)} of each GPU are overhead and activations")
    if answer.largest is not None:
        size = format_size(answer.largest.num_bytes + answer.largest.run_bytes)
        lines.append(f"the largest module that stays whole is {printable(answer.largest.name)}, {size}")
    return lines


def _note(text: str) -> str:
    return f"note: {printable(text)}"


def of_explanation(answer: Explanation, checkpoint: str) -> dict[str, object]:
    """Return what `--json` prints; `name` and `modules` are names of the checkpoint."""
    return {
        "schema": "bigload.explain/1.0",
        "checkpoint": checkpoint,
        "name": answer.name,
        "modules": list(answer.modules),
        "homes": [
            {
                "device": str(home.device),
                "runs_on": str(home.runs_on),
                "weights_bytes": home.num_bytes,
                "kv_bytes": home.cache_bytes,
                "logits_bytes": home.logits_bytes,
            }
            for home in answer.homes
        ],
        "before": _neighbour(answer.before),
        "after": _neighbour(answer.after),
        "reasons": [asdict(reason) for reason in answer.reasons],
        "alternatives": [
            {
                "module": other.module,
                "device": str(other.device),
                "keeps_limits": other.keeps_limits,
                "lacking": _lacking(other.lacking_bytes),
                **fields(other, "more_seconds", "more_device_changes", "text"),
            }
            for other in answer.alternatives
        ],
    }


def _neighbour(near: AdjacentModule | None) -> dict[str, str] | None:
    return None if near is None else {"name": near.name, "device": str(near.device)}


def _lacking(lacking: Mapping[Device, int]) -> list[dict[str, object]]:
    return [{"device": str(device), "lacking_bytes": size} for device, size in lacking.items()]


def of_comparison(outcomes: Sequence[PolicyOutcome], checkpoint: str) -> dict[str, object]:
    """Return what `--json` prints; figures of a policy without a plan are null, of others what lacks is."""
    return {"schema": "bigload.compare/1.0", "checkpoint": checkpoint, "policies": [*map(_of_outcome, outcomes)]}


def _of_outcome(outcome: PolicyOutcome) -> dict[str, object]:
    figures = ("accelerator_bytes", "ram_bytes", "disk_bytes", "token_seconds", "num_device_changes", "fullest_share")
    return {
        **fields(outcome, "policy", "fits"),
        **fields(outcome if outcome.fits else None, *figures),
        "execution_device": str(outcome.execution_device) if outcome.fits else None,
        "lacking_bytes": None if outcome.fits else outcome.lacking_bytes,
    }


def of_least_memory(answer: GpuSizes, checkpoint: str, workload: Workload) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "schema": "bigload.fits/1.0",
        **_asked(checkpoint, workload),
        "least": [asdict(least) for least in answer.least],
        **_found(answer),
    }


def of_gpu_needs(answer: GpuNeeds, checkpoint: str, workload: Workload) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "schema": "bigload.gpus/1.0",
        **_asked(checkpoint, workload),
        **fields(answer, "gpu_bytes", "without_offload"),
        "with_ram": [asdict(row) for row in answer.with_ram],
        **_found(answer),
    }


def of_longest_context(answer: MaxContext, checkpoint: str) -> dict[str, object]:
    """Return what `--json` prints."""
    return {
        "schema": "bigload.max-context/1.0",
        "checkpoint": checkpoint,
        **asdict(answer),
        "unknown": [*answer.unknown],
    }


def _asked(checkpoint: str, workload: Workload) -> dict[str, object]:
    return {"checkpoint": checkpoint, "context": workload.context, "batch": workload.batch}


def _found(answer: GpuSizes | GpuNeeds) -> dict[str, object]:
    return {"fixed_bytes": answer.fixed_bytes, "largest": _largest(answer.largest), "unknown": [*answer.unknown]}


def _largest(largest: LargestUnit | None) -> dict[str, object] | None:
    if largest is None:
        return None
    return {"name": largest.name, "weights_bytes": largest.num_bytes, "run_bytes": largest.run_bytes}
