"""Options of a plan beside its memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

from bigload.devices import Device
from bigload.dtypes import DType, parse_dtype
from bigload.errors import OptionError
from bigload.planning.choices import Attention, Balance, Experts, NameScheme, Order, Policy
from bigload.planning.load_dtype import CASTABLE
from bigload.planning.policy_registry import policy_named
from bigload.planning.workload import Workload
from bigload.units import GIB, format_size, parse_size

if TYPE_CHECKING:
    from bigload.checkpoint.adapter import Adapter
    from bigload.planning.expert_stats import ExpertStats

CUDA_OVERHEAD = GIB // 2
"""Bytes that a CUDA context, its kernels and the allocator's slack take on a card, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second at which streamed weights come from disk, and from RAM over the link to the accelerator.

    The defaults are those of an NVMe disk and of PCIe 4.0 x16.
    """

    disk: int = 3 * GIB
    link: int = 24 * GIB

    def __post_init__(self) -> None:
        if not 0 < self.disk <= self.link:
            raise OptionError(
                f"a disk of {format_size(self.disk)}/s and a link of {format_size(self.link)}/s make no sense",
                hint="weights from disk cross the link too, so the disk is the slower of the two",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The keywords of whoever asks for a plan; the defaults count weights and what streaming them takes.

    Attributes:
        policy: Who chooses.
        workload: Tokens and sequences to leave room for, the dtypes of weights and cache, how attention is computed.
        overhead: Bytes on every accelerator for what is neither weight nor buffer; `None` for the default of its kind.
        bandwidth: What streaming is estimated with.
        balance: How accelerators share what they hold.
        any_order: Whether accelerators may be used in another order than given.
        experts: How the blocks of a mixture of experts are placed.
        prefetch: Whether there must be room for a second streamed module; without, it is used when it is there.
        no_split: Patterns of modules to keep whole, instead of the blocks that are found.
        keep_extra_layers: Whether layers that no ordinary forward pass runs are placed too.
        names: Whose names the device map speaks.
        expert_stats: How often experts were used in a recorded run. The most used stay on the device that runs them.
        quantize: What weights are planned as that are not quantised yet, in the words of `reshard --quantize`; or
            nothing.
        lora: Adapters that are loaded beside the model, each beside the modules that it changes.
    """

    policy: str = Policy.OPTIMAL
    workload: Workload = field(default_factory=Workload)
    overhead: int | None = None
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    balance: Balance = Balance.SPREAD
    any_order: bool = False
    experts: Experts = Experts.AUTO
    prefetch: bool = False
    no_split: tuple[str, ...] = ()
    keep_extra_layers: bool = False
    names: NameScheme = NameScheme.CHECKPOINT
    expert_stats: ExpertStats | None = None
    quantize: str = ""
    lora: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        """Check what contradicts itself."""
        entry = policy_named(self.policy)
        if self.overhead is not None and self.overhead < 0:
            raise OptionError(f"an overhead of {self.overhead} bytes: it cannot be less than nothing")
        if self.experts is Experts.SPLIT and not entry.splits_experts:
            raise OptionError(
                f"the {self.policy} policy keeps experts with their block",
                hint="leave out --policy, or leave out --experts split",
            )
        if self.expert_stats is not None:
            together = {
                f"the {self.policy} policy keeps experts with their block": not entry.splits_experts,
                "--experts block keeps experts with their block": self.experts is Experts.BLOCK,
                "--names transformers plans for transformers, which loads all experts of a block": (
                    self.names is NameScheme.TRANSFORMERS
                ),
            }
            if problems := [text for text, holds in together.items() if holds]:
                raise OptionError("--expert-stats places experts one by one", details=problems, hint="leave it out")

    def overhead_of(self, device: Device) -> int:
        """Return the bytes of overhead on a device that runs something; none on cpu, which has no context."""
        if not device.is_accelerator:
            return 0
        if self.overhead is not None:
            return self.overhead
        return CUDA_OVERHEAD if device.kind == "cuda" else 0


class RankKeywords(TypedDict, total=False):
    """Options of plans of any kind, in the words of the command line, for keyword arguments."""

    context: int
    batch: int
    dtype: DType | str | None
    kv_dtype: DType | str | None
    attention: Attention | str | None
    overhead: int | str | None
    mtp: bool


class PlanKeywords(RankKeywords, total=False):
    """`PlanOptions` in the words of the command line, for keyword arguments."""

    policy: str
    disk_bandwidth: int | str
    link_bandwidth: int | str
    balance: Balance | str
    order: str
    experts: Experts | str
    prefetch: bool
    no_split: Sequence[str]
    names: NameScheme | str
    expert_stats: ExpertStats | str | Path | None
    lora: Sequence[Adapter | str | Path]


def options_of(**keywords: Unpack[PlanKeywords]) -> PlanOptions:
    """Return the options that words describe: sizes as `units.parse_size` reads them, dtypes as `dtypes.parse_dtype`.

    Raises:
        TypeError: a keyword that is not one of `PlanKeywords`.
    """
    unknown = keywords.keys() - PlanKeywords.__annotations__.keys()
    if unknown:
        raise TypeError(f"no option {', '.join(sorted(unknown))}; known are {', '.join(PlanKeywords.__annotations__)}")
    default = PlanOptions()
    order = _word("order", keywords.get("order", "keep"), Order)
    overhead, attention = keywords.get("overhead"), keywords.get("attention")
    dtype = keywords.get("dtype")
    quantize = _scheme(dtype)
    return PlanOptions(
        policy=_policy(keywords.get("policy", default.policy)),
        workload=Workload(
            context=keywords.get("context", 0),
            batch=keywords.get("batch", 1),
            kv_dtype=_dtype("kv_dtype", keywords.get("kv_dtype")),
            load_dtype=None if quantize else _load_dtype(dtype),
            attention=None if attention is None else _word("attention", attention, Attention),
        ),
        overhead=None if overhead is None else _size("overhead", overhead),
        bandwidth=Bandwidth(
            disk=_size("disk_bandwidth", keywords.get("disk_bandwidth", default.bandwidth.disk)),
            link=_size("link_bandwidth", keywords.get("link_bandwidth", default.bandwidth.link)),
        ),
        balance=_word("balance", keywords.get("balance", default.balance), Balance),
        any_order=order is Order.ANY,
        experts=_word("experts", keywords.get("experts", default.experts), Experts),
        prefetch=_flag("prefetch", keywords.get("prefetch", False)),
        no_split=_patterns("no_split", keywords.get("no_split", ())),
        keep_extra_layers=_flag("mtp", keywords.get("mtp", False)),
        names=_word("names", keywords.get("names", default.names), NameScheme),
        expert_stats=_stats(keywords.get("expert_stats")),
        quantize=quantize,
        lora=_adapters(keywords.get("lora", ())),
    )


def rank_keywords(options: PlanOptions) -> dict[str, object]:
    """Return what plans of both kinds answer, in the words of the command line, but for `mtp`."""
    load, cache, attention = options.workload.load_dtype, options.workload.kv_dtype, options.workload.attention
    return {
        "context": options.workload.context,
        "batch": options.workload.batch,
        "dtype": options.quantize or (None if load is None else load.name),
        "kv_dtype": None if cache is None else cache.name,
        "attention": None if attention is None else str(attention),
        "overhead": options.overhead,
    }


def plan_keywords(options: PlanOptions) -> dict[str, object]:
    """Return the options that a plan file keeps, in the words of the command line."""
    return {
        **rank_keywords(options),
        "disk_bandwidth": options.bandwidth.disk,
        "link_bandwidth": options.bandwidth.link,
        "balance": str(options.balance),
        "order": "any" if options.any_order else "keep",
        "experts": str(options.experts),
        "prefetch": options.prefetch,
        "no_split": list(options.no_split),
        "mtp": options.keep_extra_layers,
        "names": str(options.names),
    }


def _scheme(dtype: DType | str | None) -> str:
    """Return `dtype` if it names what weights can be quantised to; nothing for a dtype of elements."""
    if not isinstance(dtype, str):
        return ""
    with suppress(ValueError):
        if parse_dtype(dtype).name in CASTABLE:
            return ""
    from bigload.conversion.quantised_tensors import SCHEMES  # few plans need it

    return dtype if dtype in SCHEMES else ""


def _adapters(value: object) -> tuple[Adapter, ...]:
    if isinstance(value, str | Path) or not isinstance(value, Sequence):
        raise OptionError(f"lora has to be a list of folders, not {value!r:.60}")
    if not value:
        return ()
    from bigload.checkpoint.adapter import Adapter, open_adapter  # few plans need it

    return tuple(each if isinstance(each, Adapter) else open_adapter(each) for each in value)


def _stats(value: ExpertStats | str | Path | None) -> ExpertStats | None:
    if value is None:
        return None
    from bigload.planning.expert_stats import ExpertStats  # few plans need it

    return value if isinstance(value, ExpertStats) else ExpertStats.read(Path(value))


def _policy(name: str) -> str:
    """Return the member of `Policy` for the policies that are built in, the name of a registered one as it is."""
    return Policy(name) if name in Policy.__members__.values() else name


_Words = TypeVar("_Words", bound=StrEnum)


def _word(name: str, value: str, words: type[_Words]) -> _Words:
    try:
        return words(value)
    except ValueError:
        raise OptionError(f"no {name} {value!r}", hint=f"known are {', '.join(words)}") from None


def _dtype(name: str, value: DType | str | None) -> DType | None:
    if value is None or isinstance(value, DType):
        return value
    try:
        return parse_dtype(value)
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None


def _load_dtype(value: DType | str | None) -> DType | None:
    """Return the dtype that weights are cast to, if it is one."""
    try:
        found = _dtype("dtype", value)
        Workload(load_dtype=found)
    except OptionError as error:
        from bigload.conversion.quantised_tensors import SCHEMES

        raise OptionError(error.message, hint=f"for what quantised weights would take: {', '.join(SCHEMES)}") from None
    return found


def _size(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise OptionError(
            f"{name}: {value!r:.60} is no size", hint="a size is a whole number of bytes, or such as 2GiB"
        )
    try:
        return parse_size(value)
    except ValueError as error:
        raise OptionError(f"{name}: {error}") from None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} has to be true or false, not {value!r:.60}")
    return value


def _patterns(name: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"{name} has to be a list of patterns, not {value!r:.60}")
    return tuple(map(str, patterns))
