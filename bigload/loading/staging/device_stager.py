"""Stager for an accelerator: reads into pinned blocks, each copied while others are filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.checkpoint.byte_source import ByteSource
from bigload.loading.scheduling.read_jobs import Destination, ReadJob, Spread
from bigload.loading.staging.device_transfers import HostBlock, Transfers
from bigload.loading.tensors.views import Memory, spread_dtypes, torch_dtype


class DeviceStager:
    """Delivers staged jobs to one accelerator by `transfers`, which it closes at the end (`engine.Stager`)."""

    def __init__(self, memory: Sequence[Memory], transfers: Transfers) -> None:
        self._memory = memory
        self._transfers = transfers

    def deliver(self, job: ReadJob, source: ByteSource) -> None:
        """Read the bytes of `job` into a block and enqueue the copies of its destinations."""
        block = self._transfers.take()
        try:
            source.read_into([block.memory[: job.num_bytes]], job.offset)
            for destination in job.destinations:
                self._send(destination, block)
        finally:
            self._transfers.release(block)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        self._transfers.finish()

    def close(self) -> None:
        """Wait for copies that still run, and give the blocks back."""
        self._transfers.close()

    def _send(self, destination: Destination, block: HostBlock) -> None:
        memory = self._memory[destination.buffer]
        assert isinstance(memory, torch.Tensor), "a job for a device has destinations for that device"
        spread = destination.spread
        if spread is not None:
            self._send_spread(destination, spread, block, memory)
            return
        target = memory[destination.start : destination.start + destination.memory_bytes]
        stored = None
        if destination.cast is not None:
            wanted, stored = torch_dtype(destination.cast.wanted), torch_dtype(destination.cast.stored)
            assert wanted is not None, "check_dtypes() comes first"
            target = target.view(wanted)
        if destination.rows == 1:
            self._transfers.send(
                block, destination.source, destination.source + destination.row_bytes, target, dtype=stored
            )
        else:
            self._transfers.send_rows(
                block,
                destination.source,
                target,
                num_rows=destination.rows,
                row_bytes=destination.row_bytes,
                stride_bytes=destination.stride,
                dtype=stored,
            )

    def _send_spread(self, destination: Destination, spread: Spread, block: HostBlock, memory: torch.Tensor) -> None:
        stored, wanted = spread_dtypes(destination, spread)
        whole = memory[: memory.numel() // wanted.itemsize * wanted.itemsize].view(wanted)
        shape = destination.rows, destination.row_bytes // stored.itemsize
        first = whole.storage_offset() + destination.start // wanted.itemsize  # several buffers may be one allocation
        self._transfers.send_rows(
            block,
            destination.source,
            whole.as_strided(shape, (spread.row_stride, spread.step), first),
            num_rows=destination.rows,
            row_bytes=destination.row_bytes,
            stride_bytes=destination.stride,
            dtype=stored,
        )


class PassingStager(DeviceStager):
    """Delivers staged jobs by transfers that others use as well: what it sent has arrived when `mark` says so."""

    def finish(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Leave the transfers to the others."""
