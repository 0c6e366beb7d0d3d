"""Model that runs without its weights, to show which of its layers feed which.

Layers that have a matrix do not multiply by it: they answer with noise that is always the same. So a forward costs
neither the memory nor the time of the weights, whatever the size of the model; each layer's input is a function of the
outputs of those right before it and of nothing further back; and what is not a layer (views, heads, activations,
softmax) runs as the model's own code has it. Parameters and buffers are stand-ins of the same shape, so a model on the
meta device is as good as one that has values.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bigload.parallel.tensor_parallel.example_inputs import MAX_POSITIONS, with_parts
from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind

MAX_STAND_IN = 1 << 22
"""Larger parameters that no layer owns share one number instead of having random ones."""

_NOISE = 1 << 16


OnCall = Callable[[str, int, Tensor, Callable[[], Tensor]], Tensor]
"""Returns the output of a layer: of its name, its number of calls before, its inputs, and what makes its noise."""


class WeightlessModel:
    """A copy of `model` on the CPU, `module`, in which layers make noise.

    `layers` says how each layer that was found uses its weight, by its name.
    """

    def __init__(self, model: nn.Module, *, is_short: bool = False) -> None:
        """Copy `model`; if it `is_short`, for no more than `MAX_POSITIONS` frames of sound."""
        kinds = {name: layer_kind(module) for name, module in model.named_modules(remove_duplicate=False)}
        self.layers: Mapping[str, LayerKind] = {name: kind for name, kind in kinds.items() if kind is not None}
        self.module = copy.deepcopy(model, _stand_ins(model, self.layers)).eval()
        _settle(self.module)
        if is_short:
            _shorten(self.module)
        self._noise = torch.randn(2 * _NOISE, generator=torch.Generator().manual_seed(0))
        self._calls: Counter[str] = Counter()
        self._on_call: OnCall | None = None
        for name, layer in self.module.named_modules():  # one that has several names answers by the first
            if name in self.layers:
                layer.forward = partial(self._answer, name, layer)

    def run(self, example: Mapping[str, object], on_call: OnCall) -> object:
        """Return the output of a forward with the arguments `example`; `on_call` makes the outputs of layers."""
        self._calls.clear()
        self._on_call = on_call
        try:
            with _CheapProducts():
                return self.module(**{name: _copied(value) for name, value in example.items()})
        finally:
            self._on_call = None

    def _answer(self, name: str, layer: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        inputs = args[0] if args else next(iter(kwargs.values()))
        number = self._calls[name]
        self._calls[name] += 1
        kind = self.layers[name]
        leading = inputs.shape if kind is LayerKind.LOOKUP else inputs.shape[:-1]
        weight = layer._parameters["weight"]
        assert weight is not None
        assert self._on_call is not None
        shape = (*leading, weight.shape[kind.out_dim])
        return self._on_call(name, number, inputs, partial(self._made, name, number, shape))

    def _made(self, name: str, number: int, shape: tuple[int, ...]) -> Tensor:
        """Return noise in which every channel is positive for half of the tokens, so that no activation kills it."""
        *leading, width = shape
        num_tokens = torch.Size(leading).numel()
        half = (num_tokens + 1) // 2 * width
        start = crc32(f"{name}:{number}".encode()) % _NOISE
        noise = self._noise[start:].repeat(half // _NOISE + 1)[:half].view(-1, width)
        return torch.cat((noise, noise.flip(0) * -0.75))[:num_tokens].reshape(shape)


@contextmanager
def replaced(module: nn.Module, parameters: Mapping[str, Tensor], attributes: Mapping[str, int]) -> Iterator[None]:
    """Give `module` other `parameters` and `attributes`, by their qualified names, within the context."""
    places: list[tuple[dict[str, Any], str, object]] = []
    for name, value in (*parameters.items(), *attributes.items()):
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner._parameters if name in parameters else vars(owner), last, value))
    old = [(place, name, place[name]) for place, name, _ in places]
    try:
        for place, name, value in places:
            place[name] = value
        yield
    finally:
        for place, name, value in old:
            place[name] = value


_PRODUCTS = (functional.linear, torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


class _CheapProducts(TorchFunctionMode):
    """Products with hollow weights, as experts have them that are stored in one: the mean of the inputs, each time."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _PRODUCTS and len(args) > 1 and is_hollow(args[1]):
            inputs, weight = args[:2]
            shape = weight.shape[:1] if func is functional.linear else (*weight.shape[:-2], 1, weight.shape[-1])
            return inputs.mean(-1, keepdim=True) + inputs.new_zeros(shape)
        return func(*args, **(kwargs or {}))


def is_hollow(tensor: Tensor) -> bool:
    """Return whether `tensor` is one number in memory, or a part of such a one."""
    return tensor.untyped_storage().nbytes() == tensor.element_size() and tensor.numel() > 1


def hollow(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter of `shape` whose numbers are one number in memory."""
    return nn.Parameter(torch.full((1,), 0.01).to(dtype).expand(shape), requires_grad=False)


def _stand_ins(model: nn.Module, layers: Mapping[str, LayerKind]) -> dict[int, Any]:
    """Return what a copy has in the place of each tensor of `model`, by the tensor's id."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in (value for name in layers for value in model.get_submodule(name).parameters(recurse=False)):
        memo[id(parameter)] = hollow(tuple(parameter.shape))
    for parameter in model.parameters():
        memo.setdefault(id(parameter), _like_parameter(parameter, generator))
    of_attributes = (value for module in model.modules() for value in vars(module).values())
    for value in (*model.buffers(), *of_attributes):
        if isinstance(value, Tensor):
            memo.setdefault(id(value), _like_buffer(value, generator))
    return memo


def _like_parameter(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    if not parameter.is_floating_point() or parameter.numel() > MAX_STAND_IN:
        dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
        return hollow(tuple(parameter.shape), dtype)
    numbers = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim < 2:
        return nn.Parameter(1 + numbers / 8)
    return nn.Parameter(numbers / (parameter.numel() / parameter.shape[0]) ** 0.5)


def _like_buffer(buffer: Tensor, generator: torch.Generator) -> Tensor:
    if not buffer.is_meta:
        kept = buffer.detach().cpu().clone()
        return kept.float() if kept.is_floating_point() else kept
    if buffer.is_floating_point():
        return torch.rand(buffer.shape, generator=generator)
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _settle(module: nn.Module) -> None:
    """Let the model keep no cache, and pick code that runs anywhere."""
    for config in _configs(module):
        for each in with_parts(config):
            for name, value in (("use_cache", False), ("_experts_implementation", "eager")):
                if hasattr(each, name):
                    setattr(each, name, value)


def _configs(module: nn.Module) -> list[Any]:
    return list({id(part.config): part.config for part in module.modules() if hasattr(part, "config")}.values())


def _shorten(module: nn.Module) -> None:
    """Let the model take fewer frames, where it insists on as many as its config says (Whisper)."""
    for config in _configs(module):
        length = getattr(config, "max_source_positions", 0)
        if isinstance(length, int) and length > MAX_POSITIONS:
            config.__dict__["max_source_positions"] = MAX_POSITIONS
            for table in module.modules():
                if isinstance(table, nn.Embedding) and table.num_embeddings == length:
                    table.num_embeddings = MAX_POSITIONS
                    table._parameters["weight"] = hollow((MAX_POSITIONS, table.embedding_dim))


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.ones_like(value, device="cpu") if value.is_meta else value.detach().cpu().clone()
    return copy.copy(value)
