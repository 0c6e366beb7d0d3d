"""Have the weights of a hooked model stream: one hook a block does what its modules' hooks would do one by one."""

from __future__ import annotations

from functools import partial

from torch import nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.call_weights import bring_before_calls
from bigload.runtime.hooks.hooks import add_hook_to_module, hooks_of
from bigload.runtime.streaming.blocks import Cut, cut
from bigload.runtime.streaming.options import StreamOptions
from bigload.runtime.streaming.run_log import RunStats
from bigload.runtime.streaming.streamed_block import Member, StreamedBlock
from bigload.runtime.streaming.streamer import Streamer


def stream(model: nn.Module, options: StreamOptions) -> None:
    """Have offloaded weights of `model`, which has its hooks, come block by block and ahead of time.

    Blocks whose modules run on several devices are left to the hooks that they have, as are weights in the packed forms
    of bitsandbytes. The model gets a method `bigload_stats`, which goes with its hook.

    Args:
        model: What `dispatch_model`, `cpu_offload` and their like have made.
        options: How much memory that takes.
    """
    streamer = Streamer(options)
    for part in cut(model):
        _stream_block(part, streamer)
    around = _hooks(model)
    if around:
        around[0].counts_for = streamer
    model.__dict__["bigload_stats"] = partial(_stats, streamer)


def _stream_block(part: Cut, streamer: Streamer) -> None:
    members = [Member(module, hook) for module in part.members for hook in _hooks(module)]
    devices = {hook.device for _, hook in members if hook.device is not None}
    if len(devices) != 1 or not (len(members) > 1 or any(hook.offload for _, hook in members)):
        return
    if any(hook.offload and hook.offloaded_weights(module) is None for module, hook in members):
        return
    own = _hooks(part.module)
    if not own:
        given = members[0].hook
        own = [AlignDevicesHook(given.execution_device, skip_keys=given.skip_keys)]
        add_hook_to_module(part.module, own[0], append=True)
    own[-1].block = StreamedBlock(
        part.name, part.module, members, device=devices.pop(), is_routed=part.is_routed, streamer=streamer
    )
    bring_before_calls(part.module)


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    return [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook)]


def _stats(streamer: Streamer) -> RunStats:
    """Return what the model did since it was dispatched: see `RunStats`."""
    return streamer.log.stats()
