"""A plan as text: the table that the command line prints and that `print(plan)` shows, every device an equation."""

from __future__ import annotations

from bigload.devices import CPU, DISK, Device
from bigload.plain_text import PlainTable, Styled, printable, stacked_bar
from bigload.planning.plan import DeviceUse, Plan, summarize
from bigload.units import counted, format_size

_BAR_WIDTH = 16
_SHORTEST = 0.001
"""Seconds; less is not told apart."""
_PLACES = {CPU: "in RAM", DISK: "on disk"}


def text_of(plan: Plan) -> str:
    """Return the whole of it: headline, table and the lines below."""
    below = closing(plan)
    table = devices(plan, blocks=True).as_text()
    return "\n".join([headline(plan), "", table, *below] if below else [headline(plan), "", table.rstrip("\n")])


def headline(plan: Plan) -> str:
    """Return where the weights are, in one line, and how the figures below read, in another."""
    unit, _ = plan.table_unit
    return f"{printable(plan.name)} fits: {whereabouts(plan)}\n{subject(plan)}, figures in {unit}"


def whereabouts(plan: Plan) -> str:
    """Return the shares of the weights by where they are: `41% on GPUs, 59% in RAM`."""
    shares: dict[str, int] = {}
    for use in plan.devices:
        place = _PLACES.get(use.device, f"on {_accelerator_word(plan)}")
        shares[place] = shares.get(place, 0) + use.weights_bytes
    total = plan.weights_bytes or 1
    return ", ".join(f"{size / total:.0%} {place}" for place, size in shares.items() if size) or "it is empty"


def subject(plan: Plan) -> str:
    """Return what was planned: how large, for what, by which policy."""
    return f"{_weights(plan)}{_workload(plan)}, {plan.policy} policy"


def _weights(plan: Plan) -> str:
    dtype = plan.options.workload.load_dtype
    if dtype is not None:
        return f"{format_size(plan.weights_bytes)} as {dtype}"
    return f"{format_size(plan.total_bytes)} as stored"


def _workload(plan: Plan) -> str:
    workload = plan.options.workload
    if not workload.context:
        return ""
    batch = f"{counted(workload.batch, 'sequence')} of " if workload.batch > 1 else ""
    return f", {batch}{counted(workload.context, 'token')}"


_HEADINGS = {"weights": "WEIGHTS", "kv": "KV", "run": "RUN", "workspace": "WORKSPACE"}


def devices(plan: Plan, *, blocks: bool) -> PlainTable:
    """Return the table: budget = weights + caches + run + workspace + free, for every device."""
    terms = [_HEADINGS[term] for term in plan.table_terms]
    right = ("BUDGET =", *(f"{term} +" for term in terms), "FREE")
    table = PlainTable(("DEVICE", *right, "USE", "HOLDS"), right=right, folding="HOLDS", droppable="USE")
    for use in plan.used_devices:
        table.add(
            str(use.device),
            *plan.table_figures(use),
            Styled(_bar(use, blocks=blocks), "cyan"),
            summarize(use.modules),
        )
    return table


def closing(plan: Plan) -> list[str]:
    """Return the lines below the table: what running and streaming take, how good the plan is, and notes."""
    lines = [*_run(plan), *streaming(plan), _quality(plan)]
    lines += [f"note: {printable(note.text)}" for note in plan.notes]
    return lines


def _run(plan: Plan) -> list[str]:
    """Return what RUN is made of, devices of one sum in one line."""
    sums: dict[str, list[str]] = {}
    for use in plan.devices:
        terms = {"overhead": use.overhead_bytes, "activations": use.activation_bytes, "logits": use.logits_bytes}
        words = " + ".join(f"{format_size(size)} {term}" for term, size in terms.items() if size)
        if words:
            sums.setdefault(words, []).append(str(use.device))
    return [f"RUN is {words} on {', '.join(devices)}." for words, devices in sums.items()]


def streaming(plan: Plan) -> list[str]:
    """Return sentences on what a token brings from RAM and disk; none when every module runs where it is."""
    streamed = plan.streamed_bytes
    if not streamed:
        return []
    needed = {device: plan.token_bytes.get(device, 0) for device in streamed}
    is_sparse = sum(needed.values()) < sum(streamed.values())
    shown = needed if is_sparse else streamed
    total = format_size(sum(shown.values()))
    if is_sparse:
        total = f"{total} of {format_size(sum(streamed.values()))}"
    sources = [f"{format_size(size)} {_origin(device)}" for device, size in shown.items()]
    if len(shown) > 1:
        brought = f"{total} to {plan.execution_device}: {', '.join(sources)}"
    else:
        brought = f"{total} {_origin(next(iter(shown)))} to {plan.execution_device}"
    speeds = {CPU: plan.options.bandwidth.link, DISK: plan.options.bandwidth.disk}
    words = " and ".join(f"{format_size(speeds[device])}/s {_origin(device)}" for device in shown)
    lines = [
        f"Each {'token' if is_sparse else 'forward pass'} brings {brought}.",
        f"At {words} that is {_at_least(plan.token_seconds)}.",
    ]
    if any(use.workspace_bytes for use in plan.devices):
        ahead = all(note.code != "no-prefetch" for note in plan.notes)
        held = "two streamed modules: one computes, the next arrives" if ahead else "the largest streamed module"
        lines.append(f"Workspace holds {held}.")
    return lines


def _quality(plan: Plan) -> str:
    """Return how often the device changes, where there are several, and how good the plan is."""
    proven = str(plan.certificate)
    if sum(bool(use.modules) for use in plan.devices if use.device.is_accelerator) < 2:
        return f"{proven[0].upper()}{proven[1:]}."
    return f"{counted(plan.num_device_changes, 'device change')} per forward pass; {proven}."


def _at_least(seconds: float) -> str:
    """Return a lower bound as words; below a millisecond it bounds nothing that anyone waits for."""
    return f"at least {duration(seconds)}" if seconds >= _SHORTEST else duration(seconds)


def duration(seconds: float) -> str:
    """Return a time as a word: `13.7 s`, `180 ms`."""
    return (
        f"{seconds * 1000:.0f} ms" if _SHORTEST <= seconds < 1 else f"{seconds:.1f} s" if seconds >= 1 else "under 1 ms"
    )


def _accelerator_word(plan: Plan) -> str:
    kinds = {use.device.kind for use in plan.devices if use.device.is_accelerator}
    number = sum(use.device.is_accelerator for use in plan.devices)
    noun = "GPU" if kinds <= {"cuda", "xpu", "mps"} else "accelerator"
    return f"the {noun}" if number == 1 else f"{noun}s"


def _origin(device: Device) -> str:
    return "from RAM" if device == CPU else "from disk"


def _bar(use: DeviceUse, *, blocks: bool) -> str:
    if not use.budget_bytes:
        return ""
    full, half, rest = ("█", "▒", "·") if blocks else ("#", "+", ".")
    weights = use.weights_bytes / use.budget_bytes
    beside = (use.used_bytes - use.weights_bytes) / use.budget_bytes
    return stacked_bar([(weights, full), (beside, half), (1 - weights - beside, rest)], width=_BAR_WIDTH)
