"""Layers whose weights are stored in one dtype, and in another while they compute.

Names and signatures are those of `accelerate` 1.15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import nn

from bigload.runtime.hooks.hooks import ModelHook, add_hook_to_module, within

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers that are large and compute with their weights alone."""


class LayerwiseCastingHook(ModelHook):
    """Casts the floating-point weights of a module for each forward, and back after it, also if it raises.

    Args:
        storage_dtype: What they are between forwards.
        compute_dtype: What they are during one.
        non_blocking: Do not wait for casts that can go on by themselves.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._store(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._cast_to_compute(module)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._store(module)
        if isinstance(output, GeneratorType):
            return within(output, lambda: self._cast_to_compute(module), lambda: self._store(module), lambda item: item)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        self._store(module)

    def _cast_to_compute(self, module: nn.Module) -> None:
        try:
            module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        except BaseException:
            self._store(module)
            raise

    def _store(self, module: nn.Module) -> None:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Let every linear layer and convolution in `module` store its weights in `storage_dtype`.

    Args:
        module: The model, or one layer.
        storage_dtype: What weights are kept in, such as `torch.float8_e4m3fn`.
        compute_dtype: What they are cast to for each forward.
        skip_modules_pattern: Regular expressions. Where one is found in the name of a module, that and all in it stay
            as they are.
        skip_modules_classes: Classes of modules to which the same applies.
        non_blocking: Do not wait for casts that can go on by themselves.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    layers = _layers(module, "", tuple(map(re.compile, patterns)), skip_modules_classes or ())
    for layer in layers:
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers(
    module: nn.Module, name: str, patterns: tuple[re.Pattern[str], ...], classes: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    if isinstance(module, classes) or any(pattern.search(name) for pattern in patterns):
        return []
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        return [module]
    return [
        layer
        for key, child in module.named_children()
        for layer in _layers(child, f"{name}.{key}" if name else key, patterns, classes)
    ]
