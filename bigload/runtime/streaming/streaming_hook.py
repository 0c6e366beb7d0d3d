"""Hook of a module whose weights, and those of modules inside, stream as one block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.eager_calls import eager
from bigload.runtime.hooks.wrapped_modules import end_wrapping
from bigload.runtime.streaming.streamed_block import StreamedBlock
from bigload.runtime.streaming.streamer import Streamer


class StreamingHook(AlignDevicesHook):
    """An `AlignDevicesHook` whose module gets its weights from a streamer, together with those of modules inside.

    Args:
        base: The hook whose place it takes. Its state is taken over.
        streamer: What loads and evicts the weights of the model's blocks.

    Attributes:
        block: The module's block, if it is streamed.
        counts_forwards: Whether forwards of the module are those that the streamer's log is about.
    """

    def __init__(self, base: AlignDevicesHook, streamer: Streamer) -> None:
        self.__dict__.update(base.__dict__)
        self.streamer = streamer
        self.block: StreamedBlock | None = None
        self.counts_forwards = False

    @property
    def _has_work(self) -> bool:
        return True

    @property
    def _loads_weights(self) -> bool:
        return self._offload or self.block is not None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._begin(module, args, kwargs)
        if self.counts_forwards:
            self._note_begin()

    def _end(self) -> torch.device | None:
        if self.counts_forwards:
            self._note_end()
        return super()._end()

    def abort_forward(self, module: nn.Module) -> None:
        """Evict what was loaded, and forget the order of this thread's pass, which did not reach its end."""
        super().abort_forward(module)
        if self.block is not None:
            self.streamer.forward_aborted()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take the block from the streamer, then do what `AlignDevicesHook` does."""
        if self.block is not None:
            self.streamer.remove(self.block)
            self.block = None
        return super().detach_hook(module)

    def _streamed(self) -> StreamedBlock | None:
        """Return the block, unless `align_module_device` has the module on another device for a while."""
        block = self.block
        return block if block is not None and self._device in (None, block.device) else None

    @eager
    def _load(self, module: nn.Module) -> None:
        end_wrapping()
        block = self._streamed()
        if block is None:
            self._load_own(module)
        else:
            self.streamer.enter(block)

    @eager
    def _unload(self) -> None:
        block = self._streamed()
        if block is None:
            self.release()
        else:
            self.streamer.leave(block)

    @eager
    def _note_begin(self) -> None:
        self.streamer.log.forward_began()

    @eager
    def _note_end(self) -> None:
        self.streamer.log.forward_ended()


StreamingHook.__name__ = "AlignDevicesHook"  # by which PEFT finds in accelerate the class of hooks for trained copies
