"""Hooks around the forward of a module, with its arguments by name, and a way back when it raises.

A hooked module has its hook as `_hf_hook` and what its forward was as `_old_forward`; names and signatures are those of
`accelerate.hooks` 1.15. Beyond them there is `abort_forward`: what a hook did for a forward is undone also if that ends
in an error or an interrupt. Copies of a hooked module, deep or pickled, are hooked themselves; only torch.fx makes
copies of its graphs that have no hook of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial, update_wrapper, wraps
from typing import Any

import torch
from torch import fx, nn

MOVING_METHODS = ("to", "cpu", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Methods of a dispatched model that refuse to move it."""

CASTING_METHODS = ("half", "bfloat16", "float", "double", "type")
"""Methods of a dispatched model that refuse to cast it; so does `to`."""

OWN_METHODS = (*MOVING_METHODS, *CASTING_METHODS, "_load_from_state_dict", "_call_impl", "bigload_stats")
"""Methods, besides `forward`, that a hooked module may replace. They are removed with the hook."""


class ModelHook:
    """Calls around the forward of a module. This one does nothing; derive from it.

    Calls come in this order: `init_hook` once; `pre_forward` and then either `post_forward` or, if forward raised,
    `abort_forward`, for each forward; `detach_hook` once. A `pre_forward` or `post_forward` that raises has to leave
    the module as it would be after a forward: nothing else of the hook is called then.

    Attributes:
        no_grad: Whether forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare `module`, which gets this hook, and return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that forward is called with."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what the caller gets for `output`."""
        return output

    def abort_forward(self, module: nn.Module) -> None:
        """Undo what `pre_forward` did: forward raised, and no `post_forward` follows."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook`, as far as it can be, and return `module`, which loses this hook."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one; each method calls that of all `hooks`, in the order given."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the arguments are after the last hook. Those before one that raises are aborted."""
        for number, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _abort(self.hooks[:number], module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what `output` is after the last hook. Those behind one that raises are aborted."""
        for number, hook in enumerate(self.hooks, start=1):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                _abort(self.hooks[number:], module)
                raise
        return output

    def abort_forward(self, module: nn.Module) -> None:
        _abort(self.hooks, module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _abort(hooks: tuple[ModelHook, ...], module: nn.Module) -> None:
    """Abort the last hook first. One that fails does not keep the others from it."""
    if hooks:
        *before, last = hooks
        try:
            abort = getattr(last, "abort_forward", None)  # hooks that know accelerate only have none
            if abort is not None:
                abort(module)
        finally:
            _abort(tuple(before), module)


def hooks_of(module: nn.Module) -> Iterator[ModelHook]:
    """Yield the hooks of `module`, those within others one by one, in the order in which they are called."""
    yield from _each(module.__dict__.get("_hf_hook"))


def _each(hook: ModelHook | None) -> Iterator[ModelHook]:
    inner = getattr(hook, "hooks", None)
    if inner is not None:
        for each in inner:
            yield from _each(each)
    elif hook is not None:
        yield hook


def calls_hook(forward: object) -> bool:
    """Return whether `forward`, of a module, is what `add_hook_to_module` has put there."""
    return isinstance(forward, partial) and forward.func is _forward


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put `hook` around the forward of `module`, and return the module.

    A hook that is there already is detached and replaced; with `append` it stays, and comes before the new one. Forward
    keeps its name, docstring and signature. If the hook's `init_hook` raises, the module has the hook it had.
    """
    old = getattr(module, "_hf_hook", None)
    if old is not None and not append:
        old.detach_hook(module)
    try:
        module = hook.init_hook(module)
    except BaseException:
        if old is not None and not append:
            old.init_hook(module)
        raise
    if "_old_forward" not in module.__dict__:
        forward = module.forward
        is_graph = isinstance(module, fx.GraphModule)
        module._old_forward = partial(_forward_of_class, module) if is_graph else forward  # type: ignore[assignment]
        module.forward = update_wrapper(partial(_forward, module), forward)
    module._hf_hook = hook if old is None or not append else SequentialHook(old, hook)  # type: ignore[assignment]
    return module


def replace_hook(module: nn.Module, old: ModelHook, new: ModelHook) -> None:
    """Put `new`, which has taken over the state of `old`, in its place, without `detach_hook` and `init_hook`."""

    def replaced(hook: ModelHook) -> ModelHook:
        if isinstance(hook, SequentialHook):
            hook.hooks = tuple(map(replaced, hook.hooks))
        return new if hook is old else hook

    module._hf_hook = replaced(module._hf_hook)  # type: ignore[assignment,arg-type]


def _forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a hooked module. A function of its own, bound late, so that copies call their own hooks."""
    hook: ModelHook = module._hf_hook  # type: ignore[assignment]
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    forward: Callable[..., Any] = module._old_forward  # type: ignore[assignment]
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        _abort((hook,), module)
        raise
    return hook.post_forward(module, output)


def _forward_of_class(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward that a graph has now: its class gets another one whenever it is recompiled."""
    return type(module).forward(module, *args, **kwargs)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Detach the hook of `module`, if it has one, and return the module as it was before; `recurse` does all below too.

    Methods that warn of moving a dispatched model go as well.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
    own = module.__dict__
    own.pop("_hf_hook", None)
    old_forward = own.pop("_old_forward", None)
    if old_forward is not None:
        own.pop("forward", None)
        if not isinstance(module, fx.GraphModule) and old_forward != module.forward:
            module.forward = old_forward  # it had been replaced before the hook came
    for name in OWN_METHODS:
        own.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Detach the hooks of `module` and of all modules below."""
    remove_hook_from_module(module, recurse=True)


def within(
    outputs: Generator[Any, Any, Any],
    begin: Callable[[], None],
    end: Callable[[], None],
    deliver: Callable[[Any], Any],
) -> Generator[Any, Any, Any]:
    """Yield `deliver(output)` for all outputs of a forward that is a generator: it runs between `begin` and `end`.

    Its body has not begun when forward returns, so what holds for a forward has to hold here, while it is iterated.
    """
    begin()
    try:
        answer = None
        while True:
            try:
                output = outputs.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield deliver(output)
    finally:
        try:
            outputs.close()
        finally:
            end()


def eager(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one that torch.compile calls as it is, and does not look into.

    `torch.compiler.disable` imports the compiler, which takes seconds, so it is called only once that is imported.
    """

    @wraps(function)
    def run(*args: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args)

    disabled: list[Callable[..., None]] = []
    return run
