"""Hook of a module whose weights, and those of modules inside, stream as one block; a model gets it for each block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook, load_before_calls
from bigload.runtime.hooks.hooks import add_hook_to_module, eager, hooks_of, replace_hook
from bigload.runtime.hooks.wrapped_modules import end_wrapping
from bigload.runtime.streaming.blocks import BlockModules, cut_into_blocks
from bigload.runtime.streaming.fused_experts import FusedExperts, can_fetch, holds_experts
from bigload.runtime.streaming.streamed_block import HookedModule, StreamedBlock
from bigload.runtime.streaming.streamer import Streamer
from bigload.runtime.streaming.streaming_limits import StreamOptions
from bigload.runtime.streaming.weights import offloaded_weights


class StreamingHook(AlignDevicesHook):
    """An `AlignDevicesHook` whose module gets its weights from a streamer, together with those of modules inside.

    It takes over the state of `base`, the hook whose place it takes.

    Attributes:
        block: The module's block, if it is streamed.
        experts: The experts that the module holds, if they are fetched one by one.
        counts_forwards: Whether forwards of the module are those that the streamer's log is about.
    """

    def __init__(self, base: AlignDevicesHook, streamer: Streamer) -> None:
        self.__dict__.update(base.__dict__)
        self.streamer = streamer
        self.block: StreamedBlock | None = None
        self.experts: FusedExperts | None = None
        self.counts_forwards = False

    @property
    def _has_work(self) -> bool:
        return True

    @property
    def _loads_weights(self) -> bool:
        return self._offload or self.block is not None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on_demand() is not None and (args or kwargs):  # without, the caller wants to look at the weights
            self._begin_experts(args, kwargs)
        super()._begin(module, args, kwargs)
        if self.counts_forwards:
            try:
                self._note_begin()
            except BaseException:  # Ctrl-C
                super()._end()
                raise

    def _end(self) -> torch.device | None:
        if self.counts_forwards:
            self._note_end()
        try:
            return super()._end()
        finally:
            if self.experts is not None:
                self._end_experts()

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ANN401 - what a model answers
        if not self.counts_forwards:
            return super().post_forward(module, output)
        num_forwards, num_entered = self.streamer.under_way()
        try:
            output = super().post_forward(module, output)
        except BaseException:  # Ctrl-C; after another error, all has ended already
            is_own = self._streamed() is not None and not self._forwards.in_call
            self.streamer.end_since(num_forwards - 1, num_entered - is_own)
            raise
        self._note_success()
        return output

    def begin_call(self, module: nn.Module) -> bool:
        """Load the weights for a call of `module`, unless its experts come one by one."""
        return self._on_demand() is None and super().begin_call(module)

    def abort_forward(self, module: nn.Module) -> None:
        """Evict what was loaded, and forget the order of this thread's pass, which did not reach its end."""
        if self.counts_forwards:
            self.streamer.leave_inner_blocks()
        super().abort_forward(module)
        if self.block is not None:
            self.streamer.forward_aborted()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.block is not None:
            self.streamer.remove(self.block)
            self.block = None
        if self.experts is not None:
            self.experts.detach()
            self.experts = None
        return super().detach_hook(module)

    def _streamed(self) -> StreamedBlock | None:
        """Return the block, unless `align_module_device` has the module on another device for a while."""
        block = self.block
        return block if block is not None and self.device in (None, block.device) else None

    def _on_demand(self) -> FusedExperts | None:
        """Return the experts, likewise."""
        experts = self.experts
        return experts if experts is not None and self.device in (None, experts.device) else None

    def _runs_experts(self) -> bool:
        experts = self._on_demand()
        return experts is not None and experts.is_running

    @eager
    def _load(self, module: nn.Module) -> None:
        end_wrapping()
        block = self._streamed()
        if block is not None:
            self.streamer.enter(block)
        elif not self._runs_experts():
            self._load_own(module)

    @eager
    def _unload(self) -> None:
        block = self._streamed()
        if block is not None:
            self.streamer.leave(block)
        elif not self._runs_experts():
            self.release()

    @eager
    def _begin_experts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.experts is not None, "asked before"
        self.experts.begin(args, kwargs)

    @eager
    def _end_experts(self) -> None:
        assert self.experts is not None, "asked before"
        self.experts.end()

    @eager
    def _note_begin(self) -> None:
        self.streamer.begin_forward()

    @eager
    def _note_end(self) -> None:
        self.streamer.end_forward()

    @eager
    def _note_success(self) -> None:
        self.streamer.forward_succeeded()


StreamingHook.__name__ = "AlignDevicesHook"  # by which PEFT finds in accelerate the class of hooks for trained copies


def stream(model: nn.Module, options: StreamOptions) -> None:
    """Have offloaded weights of `model`, which has its hooks, come block by block and ahead of time.

    Blocks whose modules run on several devices are left to the hooks that they have, as are weights in the packed forms
    of bitsandbytes. The model gets a method `bigload_stats`, which goes with its hook.

    Args:
        model: What `dispatch_model`, `cpu_offload` and their like have made.
        options: How much memory that takes.
    """
    fused = _fused(model, options)
    parts = [part for part in cut_into_blocks(model, fused) if part.is_fused or _can_stream(part)]
    streamer = Streamer(options, tuple(_whole_experts(model, fused)) if options.experts_on_demand else ())
    root = _own_hook(model)
    if root is not None:
        _streaming(model, root, streamer).counts_forwards = True
    # All hooks are replaced before the first block refers to some: a module may be in one block and have another.
    hooks = [_block_hook(part, streamer) for part in parts]
    are_arguments_in_place = _runs_on_cpu_alone(model)
    for part, hook in zip(parts, hooks, strict=True):
        members = _members(part)
        (device,) = _devices(members)
        if part.is_fused:
            hook.experts = FusedExperts(part.name, part.module, hook, device, streamer)
        else:
            hook.block = StreamedBlock(
                part.name,
                part.module,
                members,
                device=device,
                is_routed=part.is_routed,
                streamer=streamer,
                bypassable=hook if are_arguments_in_place and not hook.counts_forwards else None,
            )
            load_before_calls(part.module)
    experts = [hook.experts for hook in hooks if hook.experts is not None]
    for each, following in zip(experts, [*experts[1:], *experts[:1]], strict=True):
        each.following = following
        each.attach()
    streamer.load_resident_experts()
    model.__dict__["bigload_stats"] = streamer.stats


def _fused(model: nn.Module, options: StreamOptions) -> list[nn.Module]:
    """Return the modules whose experts are to be fetched one by one."""
    if not options.experts_on_demand:
        return []
    own = ((module, _own_hook(module)) for module in model.modules())
    return [module for module, hook in own if hook is not None and hook.device is not None and can_fetch(module, hook)]


def _whole_experts(model: nn.Module, fused: Collection[nn.Module]) -> Iterator[str]:
    """Yield the names of modules that hold offloaded experts, and are not among `fused`."""
    for name, module in model.named_modules():
        hook = _own_hook(module)
        if hook is not None and hook.offload and module not in fused and holds_experts(module):
            yield name


def _can_stream(part: BlockModules) -> bool:
    members = _members(part)
    if len(_devices(members)) != 1 or not (len(members) > 1 or any(hook.offload for _, hook in members)):
        return False
    return all(offloaded_weights(module, hook) is not None for module, hook in members)


def _block_hook(part: BlockModules, streamer: Streamer) -> StreamingHook:
    """Return the hook of the block's module, made if it has none: it may own no tensors itself."""
    own = _own_hook(part.module)
    if own is None:
        given = _members(part)[0].hook
        own = AlignDevicesHook(given.execution_device, skip_keys=given.skip_keys)
        add_hook_to_module(part.module, own, append=True)
    return _streaming(part.module, own, streamer)


def _streaming(module: nn.Module, hook: AlignDevicesHook, streamer: Streamer) -> StreamingHook:
    """Return `hook` of `module` as one that streams."""
    if isinstance(hook, StreamingHook) and hook.streamer is streamer:
        return hook
    streaming = StreamingHook(hook, streamer)
    replace_hook(module, hook, streaming)
    return streaming


def _members(part: BlockModules) -> list[HookedModule]:
    return [
        HookedModule(module, hook)
        for module in part.members
        for hook in hooks_of(module)
        if isinstance(hook, AlignDevicesHook)
    ]


def _devices(members: Sequence[HookedModule]) -> set[torch.device]:
    return {hook.device for _, hook in members if hook.device is not None}


def _runs_on_cpu_alone(model: nn.Module) -> bool:
    """Return whether all hooks of `model` run their modules on the CPU, so that none has arguments to move."""
    hooks = [hook for module in model.modules() for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook)]
    return {hook.device.type for hook in hooks if hook.device is not None} == {"cpu"}


def _own_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that dispatching has given `module`; classes derived by others are not replaced."""
    own = [hook for hook in hooks_of(module) if type(hook) in (AlignDevicesHook, StreamingHook)]
    return own[-1] if own else None  # type: ignore[return-value]
