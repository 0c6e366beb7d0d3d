"""Load weights for a whole call of a module, its forward pre-hooks and hooks included.

torch runs forward pre-hooks before `forward`, where weights are otherwise brought in. Hooks that compute with weights,
as those of `torch.nn.utils.weight_norm` and `spectral_norm` do, need them earlier.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.nn.modules import module as torch_module

from bigload.runtime.hooks.hooks import hooks_of


@runtime_checkable
class LoadsWeights(Protocol):
    """A hook that loads weights for a forward."""

    def begin_call(self, module: nn.Module) -> bool:
        """Load the weights; return whether `end_call` has to follow."""

    def end_call(self) -> None:
        """Offload them again."""


def load_before_calls(module: nn.Module) -> None:
    """Have hooks of `module` load weights around each call, where it has forward hooks of its own."""
    module.__dict__["_call_impl"] = partial(_call, module)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    call = type(module)._call_impl
    if not (
        module._forward_pre_hooks
        or module._forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
    ):
        return call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    with ExitStack() as ends:
        for hook in hooks_of(module):
            if isinstance(hook, LoadsWeights) and hook.begin_call(module):
                ends.callback(hook.end_call)
        return call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
