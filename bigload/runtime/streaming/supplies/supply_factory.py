"""Choice of supplies: mapped, host buffer, device buffer or torch; one copy for blocks that share a weight."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch

from bigload.runtime.offload.stored_weights import FileWeight, MappedFiles
from bigload.runtime.streaming.supplies.device_supplies import DeviceBufferSupply, DeviceCopyStream, TorchSupply
from bigload.runtime.streaming.supplies.host_buffers import HostBuffers, HostBufferSupply
from bigload.runtime.streaming.supplies.mapped_weights import MappedSupply, is_in_place
from bigload.runtime.streaming.supplies.supply import SharedCopy, SharedSupply, Supply
from bigload.runtime.streaming.supplies.weight_reads import can_be_read
from bigload.runtime.streaming.weights import Weight


class SupplyFactory:
    """Factory of the supplies of one model's blocks, with the memory, maps and streams that they share."""

    def __init__(self) -> None:
        self._host_buffers = HostBuffers()
        self._copy_streams: dict[torch.device, DeviceCopyStream] = {}
        self._files = MappedFiles()  # its own: pages that others have written to are not dropped here
        self._shared: dict[tuple[int, torch.device], tuple[Weight, SharedCopy]] = {}

    def supplies_for(
        self, weights: Sequence[Weight], device: torch.device, *, tied: Container[int]
    ) -> tuple[Supply, ...]:
        """Return supplies of the `weights` of one block for `device`; one for each placeholder whose id is in `tied`.

        Blocks of one device that hold the same placeholder share a copy while they are both there.
        """
        if device.type != "cpu":
            device = torch.empty(0, device=device).device  # "cuda" has no index, its tensors have
        in_place, alone = [], []
        shared: dict[int, list[Weight]] = {}
        for weight in weights:
            if is_in_place(weight, device):
                if isinstance(weight.source, FileWeight):
                    weight.source = weight.source._replace(files=self._files)
                in_place.append(weight)
            elif id(weight.placeholder) in tied:
                shared.setdefault(id(weight.placeholder), []).append(weight)
            else:
                alone.append(weight)
        supplies: list[Supply] = [MappedSupply(in_place)] if in_place else []
        supplies += self._copies(alone, device)
        supplies += [SharedSupply(each, self._shared_copy(each[0], device)) for each in shared.values()]
        return tuple(supplies)

    def close(self) -> None:
        """Release memory that no block uses."""
        for copy_stream in self._copy_streams.values():
            copy_stream.close()
        self._shared.clear()
        self._host_buffers.pool.clear()
        self._files = MappedFiles()

    def _copies(self, weights: Sequence[Weight], device: torch.device) -> Iterator[Supply]:
        readable = [weight for weight in weights if can_be_read(weight)]
        others = [weight for weight in weights if not can_be_read(weight)]
        copy_stream = self._copy_streams.get(device) or self._copy_streams.setdefault(device, DeviceCopyStream(device))
        if readable and device.type == "cpu":
            yield HostBufferSupply(readable, self._host_buffers)
        elif readable:
            yield DeviceBufferSupply(readable, copy_stream)
        if others:
            yield TorchSupply(others, copy_stream)

    def _shared_copy(self, weight: Weight, device: torch.device) -> SharedCopy:
        key = id(weight.placeholder), device  # good as long as the entry, which holds the placeholder
        known = self._shared.get(key)
        if known is None:
            (supply,) = self._copies([weight], device)
            known = self._shared[key] = weight, SharedCopy(supply)
        return known[1]
