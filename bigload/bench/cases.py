"""Cases of `bench-load`, and their calls of `load`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.bench.loaded_memory import MemoryKind
from bigload.checkpoint.model import Checkpoint
from bigload.loading.load import load
from bigload.loading.settings import Method
from bigload.units import counted

if TYPE_CHECKING:
    from bigload.loading.load import LoadedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCase:
    """Threads, I/O method, device and dtype of a load."""

    threads: int
    method: Method = Method.AUTO
    device: str = "cpu"
    dtype: str | None = None
    max_inflight: int | None = None

    @property
    def name(self) -> str:
        """Return a short name; unique among the cases of one bench, whose devices and dtypes are the same."""
        return f"{self.method}, {counted(self.threads, 'thread')}"

    @property
    def memory(self) -> MemoryKind:
        """Return the memory that the tensors end in; cast or copied tensors cannot stay in the file's pages."""
        if not self.device.startswith("cpu"):
            return MemoryKind.DEVICE
        return MemoryKind.FILE if self.method is Method.MMAP and self.dtype is None else MemoryKind.PRIVATE

    def load(
        self, checkpoint: Checkpoint, *, only: Collection[str] | None = None, trace: bool = False
    ) -> LoadedTensors:
        """Load `checkpoint`, or the tensors in `only`; with `trace`, the report has all activities."""
        return load(
            checkpoint,
            only=only,
            dtype=self.dtype,
            device=self.device,
            method=self.method,
            threads=self.threads,
            max_inflight=self.max_inflight,
            trace=trace,
        )


def all_cases(
    threads: Sequence[int],
    methods: Sequence[Method],
    *,
    device: str = "cpu",
    dtype: str | None = None,
    max_inflight: int | None = None,
) -> tuple[LoadCase, ...]:
    """Return every method with every thread count; what is named twice is there once.

    Raises:
        ValueError: no thread count or no method, or a count below 1.
    """
    if not threads or not methods or min(threads) < 1:
        raise ValueError("at least one thread count of 1 or more and one method")
    return tuple(
        LoadCase(threads=count, method=Method(method), device=device, dtype=dtype, max_inflight=max_inflight)
        for method in dict.fromkeys(methods)
        for count in dict.fromkeys(threads)
    )
