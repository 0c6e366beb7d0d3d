"""Options of a reshard as one value, parsed and validated where they come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from bigload.checkpoint.model import Checkpoint
from bigload.errors import OptionError
from bigload.layouts.choices import VLLM_VERSION, OffloadFormat, Verify
from bigload.layouts.dtype_rules import DTypeRule
from bigload.layouts.transforms.transform import Transform
from bigload.loading.settings import MAX_THREADS
from bigload.machine.threads.thread_pool import usable_cores
from bigload.planning.choices import NameScheme
from bigload.units import KIB, MIB, format_size, parse_size

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
DEFAULT_THREADS = 8
"""Threads wait for the disk most of the time: more than cores, and enough to keep it busy."""

LEAST_VERIFYING_THREADS = 4
"""Threads that read back and compare need cores: 2 for each, but no fewer than this and no more than the above."""

REMOTE_THREADS = 16
"""Connections to a service: one seldom fills a line, and each waits for two round trips before its first byte."""

DEFAULT_MAX_INFLIGHT = 96 * MIB
LEAST_BYTES_PER_THREAD = 768 * KIB

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """Options of `bigload.reshard`, which describes them; `dtypes` is its `dtype` and `keep_fp32`.

    `stages` are the modules of each of `pp` stages, as a plan for ranks has them.
    """

    layout: str | None = None
    checkpoint: Checkpoint | str | Path | None = None
    max_shard_bytes: int | None = DEFAULT_MAX_SHARD_BYTES
    dtypes: DTypeRule = field(default_factory=DTypeRule)
    tp: int | None = None
    tp_rules: Mapping[str, str] | str | Path | None = None
    pp: int | None = None
    stages: tuple[tuple[str, ...], ...] | None = None
    vllm_version: str = VLLM_VERSION
    any_expert_size: bool = False
    names: NameScheme | None = None
    transforms: tuple[Transform, ...] = ()
    base: Path | str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    offload_format: OffloadFormat = OffloadFormat.SAFETENSORS
    verify: Verify = Verify.FULL
    resume: bool = False
    force: bool = False
    threads: int | None = None
    max_inflight: int = DEFAULT_MAX_INFLIGHT
    layout_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least, expected in (
            ("tp", 1, "1 rank or more"),
            ("pp", 1, "1 stage or more"),
            ("max_shard_bytes", 1, "1 byte or more, or none for one file"),
            ("threads", 1, "1 or more"),
            ("max_inflight", LEAST_BYTES_PER_THREAD, f"{format_size(LEAST_BYTES_PER_THREAD)} or more"),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError.of(name, value, expected)

    @property
    def num_threads(self) -> int:
        """Threads that get enough memory of `max_inflight`."""
        wanted = self.threads or DEFAULT_THREADS
        is_cast = self.dtypes.dtype is not None  # which leaves the disk with fewer requests of each thread
        if self.threads is None and self.verify is Verify.FULL and not is_cast:
            wanted = min(max(2 * usable_cores(), LEAST_VERIFYING_THREADS), DEFAULT_THREADS)
        return min(wanted, self.max_inflight // LEAST_BYTES_PER_THREAD, MAX_THREADS)

    def value(self, name: str) -> object:
        """Return the option `name`, also one of `layout_options`; `None` where it is not given."""
        return self.layout_options.get(name, getattr(self, name, None))

    def is_default(self, name: str) -> bool:
        """Return whether the option `name` has its default value."""
        return self.value(name) == DEFAULTS.value(name)


DEFAULTS = ReshardOptions()


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Return the bytes that the option `name` stands for, which may be text such as "2GB"."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise OptionError.of(name, value, f"bytes, or text such as 2GB ({error})") from None


def parse_choice(name: str, value: str, choices: type[ChoiceT]) -> ChoiceT:
    """Return the member of `choices` that the option `name` names."""
    try:
        return choices(value)
    except ValueError:
        raise OptionError.of(name, str(value), f"one of {', '.join(choices)}") from None
