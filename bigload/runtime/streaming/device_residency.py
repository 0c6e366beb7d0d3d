"""Residency of weights on an accelerator: their memory, and the stream events that guard it.

Memory belongs to the stream that it was taken under. Work of that stream needs no care; between it and others there are
events: the copies wait for what ran before in the same memory, who computes waits for the copies, and before the memory
goes back its stream waits for all who were elsewhere. So whoever gets it next may use it at once, blocks of equal size
go round in the same memory, and the host waits for none of this.
"""

from __future__ import annotations

from typing import Any

import torch


class DeviceResidency:
    """Tensors in memory that was taken under the stream `home`; without streams, `None`, nothing has to be done.

    Attributes:
        memory: What the tensors are made of, until the stay ends.
        tensors: They.
        is_free: The event for the end of all who had the memory before.
        arrived: The event for the arrival of the last copy, if that is not of the home stream.
    """

    def __init__(self, memory: list[torch.Tensor], home: Any | None) -> None:  # noqa: ANN401  a stream of any vendor
        self.memory = memory
        self.tensors: list[torch.Tensor] = []
        self.is_free: Any | None = None if home is None else home.record_event()
        self.arrived: Any | None = None
        self._home = home
        self._departed: dict[Any, Any] = {}

    def arrive(self, stream: Any | None) -> list[torch.Tensor]:  # noqa: ANN401
        """Return the tensors, good for what `stream` does from now on."""
        if stream is not None:
            if self.arrived is not None:
                stream.wait_event(self.arrived)
            if stream != self._home and torch.is_grad_enabled():
                for memory in self.memory:  # a graph of autograd may keep it, and use it there, when the stay has ended
                    memory.record_stream(stream)
        return self.tensors

    def depart(self, stream: Any | None) -> None:  # noqa: ANN401
        """Note how far `stream` has come."""
        if stream is not None and stream != self._home:
            self._departed[stream] = stream.record_event()

    def end(self) -> None:
        """Have the home stream wait for all others, and let go of the memory: an error may hold the stay for long."""
        for event in (self.arrived, *self._departed.values()):
            if event is not None and self._home is not None:
                self._home.wait_event(event)
        self.memory, self.tensors = [], []
