"""Data of a page that places a model anew under another budget and workload: numbers, no tensors.

`what_if.js` has the formulas of `planning/model/run_memory.py`, and the search of the optimal policy for one
accelerator, RAM and disk. Its answers are those of the planner, to the byte and the module. What it does not answer,
the page says, beside the command that does.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from bigload.devices import CPU, DISK, Device
from bigload.dtypes import DTYPES, DType
from bigload.machine.profiles.machine_profile import LAUNCHED_MATRICES
from bigload.plain_text import printable
from bigload.planning.choices import Attention, Balance, Policy
from bigload.planning.load_dtype import CASTABLE
from bigload.planning.options import PlanOptions, plan_keywords
from bigload.planning.timing.predict import cold_load_rate, matching_seconds, matrix_rate_for, rate_for
from bigload.planning.timing.schedule import schedule_of
from bigload.planning.workload import Workload
from bigload_cli.views.plan_page.plan_runs import label_of, short
from bigload_cli.views.text import argument

if TYPE_CHECKING:
    from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile
    from bigload.planning.model.activations import BlockActivations
    from bigload.planning.model.kv_cache import BlockCache
    from bigload.planning.model.run_memory import MemoryModel
    from bigload.planning.model.structure import ModelStructure
    from bigload.planning.model.units import Unit
    from bigload.planning.planner import PlanDetails
    from bigload.planning.timing.predict import Prediction
    from bigload.planning.timing.schedule import BlockSchedule

MAX_UNITS = 2_000
MAX_FORMS = 40
"""Units, and unlike ones among them. With more, the search would take longer than a slider may."""

_LONGEST_NAME = 100
_TOO_MANY = "This model has too many unlike modules to be placed in a page."

_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}
_LOADED = ("BF16", "F16", "F32")
_CACHED = ("F8_E4M3", "BF16", "F32")

_VARIED = ("context", "batch", "dtype", "kv_dtype")
"""Options that the page varies."""

Document = dict[str, Any]


def what_if(
    details: PlanDetails, prediction: Prediction | None = None, profile: MachineProfile | None = None
) -> Document:
    """Return what the page's script places anew, what it started from, and the times predicted of that.

    `profile` is the machine that was predicted for, with the RAM that was counted with: the script predicts for it too.
    """
    options, memory, workload = details.options, details.structure.memory, details.options.workload
    refused = _refusal(details)
    scenarios: list[Document] = []
    dtypes, known = [], {}
    for dtype in _choices(_LOADED, workload.load_dtype):
        word, bits = _choice(dtype)
        if bits not in known:  # bytes are those of any dtype of as many bits
            scenario = {} if refused else _scenario(_loaded_as(details.structure, dtype))
            if scenario not in scenarios:
                scenarios.append(scenario)
            known[bits] = scenarios.index(scenario)
        dtypes.append([word, bits, known[bits]])
    if any(len(scenario.get("forms", ())) > MAX_FORMS for scenario in scenarios):
        refused, scenarios = _TOO_MANY, []
    attention = workload.attention or memory.attention
    return {
        "refused": refused,
        "devices": list(_devices(details)),
        "context": workload.context,
        "batch": workload.batch,
        "dtype": _choice(workload.load_dtype)[0],
        "kvDtype": _choice(workload.kv_dtype)[0],
        "dtypes": dtypes,
        "kvDtypes": [_choice(dtype) for dtype in _choices(_CACHED, workload.kv_dtype)],
        "isEager": attention is Attention.EAGER,
        "isSpread": options.balance is Balance.SPREAD,
        "experts": options.experts,
        "numInFlight": 2 if options.prefetch else 1,
        "link": options.bandwidth.link,
        "disk": options.bandwidth.disk,
        "command": f"bigload plan {argument(details.plan.checkpoint_path)}",
        "wishes": list(_wishes(options)),
        "scenarios": scenarios,
        "prediction": None if prediction is None else {"told": str(prediction), "steps": prediction.steps},
        "timing": None if refused or profile is None else _timing(details, profile),
    }


def as_json(document: Document) -> str:
    """Return a document that can stand inside of a script element."""
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _refusal(details: PlanDetails) -> str | None:
    """Return why the page places nothing; `None` where it may."""
    if len(details.budget.accelerators) > 1:
        return "The page places models on one accelerator, RAM and disk; this plan has several accelerators."
    if details.options.policy != Policy.OPTIMAL:
        return f"The page places by the optimal policy, and this plan is of the {details.options.policy} policy."
    if details.options.quantize:
        return "The page places stored weights, and those of this plan are not written yet."
    if details.options.expert_stats is not None:
        return "The page does not place experts one by one, by their recorded uses."
    if details.options.lora:
        return "The page does not count adapters."
    return None if 0 < len(details.solution.problem.units) <= MAX_UNITS else _TOO_MANY


def _devices(details: PlanDetails) -> Iterator[Document]:
    """Yield the devices that can have a limit, those with none in this plan among them."""
    limits = dict(details.budget.limits)
    accelerators = details.budget.accelerators or (Device("cuda", 0),)
    for device in (*accelerators, CPU, DISK):
        limit = limits.get(device, 0)
        yield {"name": str(device), "limit": limit, "overhead": details.options.overhead_of(device)}


def _timing(details: PlanDetails, profile: MachineProfile) -> Document | None:
    """Return the machine and the passes of the model; `None` where what_if_time.js lacks what the model does."""
    structure, schedule = details.structure, schedule_of(details.plan, details.structure)
    if structure.experts or schedule.is_encoder_decoder or schedule.stored_share != 1:
        return None
    accelerator = next(iter(details.budget.accelerators), Device("cuda", 0))
    return {
        "name": "measured here" if profile.source == "measured" else f"profile {profile.name}",
        "disk": profile.disk_rate,
        "mapped": profile.mapped_rate,
        "load": profile.load_rate,
        "ram": profile.ram_bytes,
        "devices": [_rates(profile.device(device), schedule) for device in (accelerator, CPU)],
        "elementsPerByte": 8 / schedule.dtype.bits,
        "width": schedule.attention_width,
        "layers": [block.num_layers for block in schedule.blocks],
        "matrixRows": [block.dense_rows for block in schedule.blocks],
        "launches": [block.num_matrices / LAUNCHED_MATRICES for block in schedule.blocks],
        "matching": matching_seconds(profile, structure),
        "fresh": profile.fresh_memory_rate,
        "coldLoad": cold_load_rate(profile),
        "visits": schedule.visits,
    }


def _rates(device: DeviceProfile | None, schedule: BlockSchedule) -> Document | None:
    if device is None:
        return None
    matrices, flops = matrix_rate_for(schedule.dtype, device), rate_for(schedule.dtype, device.flops)
    if matrices is None or flops is None:
        return None
    return {
        "weightRate": matrices.byte_rate,
        "rowSeconds": matrices.row_seconds,
        "flops": flops,
        "launch": device.launch_seconds,
        "link": device.link_in,
    }


def _loaded_as(structure: ModelStructure, dtype: DType | None) -> ModelStructure:
    stored = {tensor.dtype for tensor in structure.checkpoint.tensors.values()}
    if dtype is not None and all(each.bits == dtype.bits for each in stored if each.name in CASTABLE):
        dtype = None  # the same bytes
    return structure.loaded_as(dtype)


def _scenario(structure: ModelStructure) -> Document:
    """Return the units of a model and what they need to run, as the weights are loaded."""
    memory, sparse, (caches, head) = structure.memory, structure.experts, structure.needs_by_unit()
    forms: dict[tuple[int, ...], int] = {}
    names: dict[tuple[str, ...], int] = {}
    kept: dict[tuple[int | None, ...], int] = {}

    def written(unit: Unit) -> list[int]:
        family, *_ = label_of(unit, sparse)
        form = unit.num_bytes, unit.held_bytes, unit.token_bytes, unit.stream_bytes
        return [_number(names, tuple(printable(short(word))[:_LONGEST_NAME] for word in family)), _number(forms, form)]

    apart: list[list[Unit]] = []
    for unit in structure.units(Workload(), split_experts=True):
        if unit.is_routed:
            apart[-1].append(unit)
        else:
            apart.append([unit])
    units = []
    for index, (unit, pieces) in enumerate(zip(structure.units(Workload()), apart, strict=True)):
        _, number, kind = label_of(unit, sparse)
        own = [_number(kept, cache_form(cache)) for cache in caches[index]]
        split = [written(piece) for piece in pieces] if len(pieces) > 1 else []
        units.append([number, kind.name.lower(), written(unit), own, index == head, split])
    return {
        **run_memory(memory),
        "caches": list(kept),
        "names": list(names),
        "forms": list(forms),
        "units": units,
        "hasExperts": bool(sparse),
    }


def cache_form(cache: BlockCache) -> tuple[int | None, ...]:
    """Return what the cache of a block is counted by; that of many blocks is the same."""
    elements = cache.per_token, cache.max_tokens, cache.per_source_token, cache.state, cache.wide_state
    return (*elements, cache.dtype.bits)


def run_memory(memory: MemoryModel) -> Document:
    """Return what logits and activations are counted by."""
    return {
        "source": memory.source_tokens,
        "words": memory.num_words,
        "ofAllTokens": memory.has_logits_of_all_tokens,
        "bits": memory.dtype.bits,
        "activations": sorted(map(_activations, memory.activations), key=json.dumps),
    }


def _activations(block: BlockActivations) -> Document:
    attentions, scans = ([layer._asdict() for layer in layers] for layers in (block.attentions, block.scans))
    return {**block._asdict(), "attentions": attentions, "scans": scans}


_Key = TypeVar("_Key", bound=Hashable)


def _number(known: dict[_Key, int], value: _Key) -> int:
    """Return the place of a value in a table, at the end of it where it is new."""
    return known.setdefault(value, len(known))


def _choices(names: Iterable[str], asked: DType | None) -> list[DType | None]:
    return list(dict.fromkeys((None, *(DTYPES[name] for name in names), asked)))


def _choice(dtype: DType | None) -> tuple[str, int | None]:
    """Return the word of the command line for a dtype, and its bits."""
    return ("", None) if dtype is None else (_NAMES.get(dtype.name, dtype.name), dtype.bits)


def _wishes(options: PlanOptions) -> Iterator[str]:
    """Yield the words of the command line for all options that the page does not vary."""
    usual = {**plan_keywords(PlanOptions()), "policy": Policy.OPTIMAL}
    for name, value in {**plan_keywords(options), "policy": options.policy}.items():
        option = f"--{name.replace('_', '-')}"
        if name in _VARIED or value == usual[name]:
            continue
        if isinstance(value, list):
            yield from (f"{option} {argument(each)}" for each in value)
        else:
            yield option if value is True else f"{option} {argument(str(value))}"
    if options.expert_stats is not None:
        yield "--expert-stats FILE"
    yield from (f"--lora {argument(adapter.path)}" for adapter in options.lora)
