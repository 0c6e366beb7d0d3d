"""Copies to one accelerator for all blocks that run there: pinned memory, a stream and its events."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bigload.loading.staging.device_blocks import PassingStager
from bigload.loading.staging.device_transfers import Transfers
from bigload.machine.activities import NO_RECORDER
from bigload.runtime.streaming.weight_reads import BLOCK_BYTES, WeightReads

_NUM_BLOCKS = 16
"""Two for each thread that reads: one is filled while the other one is copied from."""


class DeviceCopyStream:
    """Stream of copies to `device`. May be used from several threads.

    Nobody waits for a copy to end but who needs memory to read into: the rest is said by events, to streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._has_streams = hasattr(self._module, "Stream")
        self._lock = threading.Lock()
        self._transfers: Transfers | None = None
        self._end: weakref.finalize[..., DeviceCopyStream] | None = None

    def current_stream(self) -> Any | None:  # noqa: ANN401  a stream of any vendor
        """Return the stream that the calling thread computes on; `None` if the device has no streams."""
        return self._module.current_stream(self.device) if self._has_streams else None

    def copy(self, reads: WeightReads, memory: Sequence[torch.Tensor], *, after: Any | None) -> Any | None:  # noqa: ANN401
        """Have all of `reads` read, and copied to `memory` once the event `after` has passed.

        Returns the event that says when the copies have arrived; `None` if they have. They read what they need of host
        memory whatever the caller does then. After an error, `mark` gives the event for those that were under way.

        Raises:
            ReadError: a file does not give its bytes.
        """
        transfers = self._opened_transfers()
        if after is not None:
            transfers.wait_for(after)
        for value, buffer, wanted in reads.pinned():
            target = memory[buffer].view(wanted)
            transfers.send_pinned(value.view(-1).view(torch.uint8), target, dtype=value.dtype)
        reads.carry_out(memory, {str(self.device): PassingStager(memory, transfers)})
        return transfers.mark()

    def mark(self) -> Any | None:  # noqa: ANN401
        """Return the event for the arrival of everything that has been sent."""
        return None if self._transfers is None else self._transfers.mark()

    def close(self) -> None:
        """Wait until everything has arrived, and free the pinned memory. It is taken again when it is needed."""
        with self._lock:
            self._transfers = None
            if self._end is not None:
                self._end()

    def _opened_transfers(self) -> Transfers:
        with self._lock:
            if self._transfers is None:
                self._transfers = Transfers(
                    self.device, block_bytes=BLOCK_BYTES, num_blocks=_NUM_BLOCKS, recorder=NO_RECORDER
                )
                self._end = weakref.finalize(self, self._transfers.close)
                self._end.atexit = False
            return self._transfers
