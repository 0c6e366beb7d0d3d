"""Small inputs for a forward of a model, as its class and config call for them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

MAX_POSITIONS = 16
"""Of frames of sound after convolutions: a model that takes more by its config has to be told so."""

_BATCH = 2
_LENGTH = 5
_NUM_STEPS = 6
"""Of sound, each of as many samples as the convolutions of the model make one of."""


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return arguments of a forward of `model` by name, on the CPU; none if it is not known what it takes.

    Known are models that say what they take by the names of transformers: in `main_input_name` (`input_ids`,
    `pixel_values`, `input_features`, `input_values`) and in their config.
    """
    main = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    if main is None or config is None:
        return {}
    inputs = {name: make(config) for name, make in _MAKERS.items() if name == main and name in accepted}
    if main == "input_ids" and "pixel_values" in accepted and hasattr(config, "vision_config"):
        inputs["pixel_values"] = _pixels(config)
    if inputs and getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _ids(config)[: len(inputs[main])]
    return inputs


def _ids(config: object) -> Tensor:
    size = _number(config, "vocab_size", 16)
    return torch.arange(_BATCH * _LENGTH).reshape(_BATCH, _LENGTH) % max(1, size - 4) + min(3, size - 1)


def _pixels(config: object) -> Tensor:
    channels = _number(config, "num_channels", 3)
    size = _first(config, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.linspace(-1, 1, channels * height * width).reshape(1, channels, height, width)


def _mel(config: object) -> Tensor:
    bins = _number(config, "num_mel_bins", 80)
    frames = 2 * min(MAX_POSITIONS, _number(config, "max_source_positions", MAX_POSITIONS))
    return torch.linspace(-1, 1, bins * frames).reshape(1, bins, frames)


def _sound(config: object) -> Tensor:
    strides, kernels = _first(config, "conv_stride", (320,)), _first(config, "conv_kernel", (400,))
    assert isinstance(strides, (tuple, list))
    assert isinstance(kernels, (tuple, list))
    num_samples = _NUM_STEPS * prod(strides) + 2 * sum(kernels)
    return torch.linspace(0, 100, num_samples).sin().reshape(1, num_samples)


_MAKERS = {"input_ids": _ids, "pixel_values": _pixels, "input_features": _mel, "input_values": _sound}


def with_parts(config: object) -> list[object]:
    """Return `config` and the configs in it, as models of several parts have."""
    return [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]


def _first(config: object, name: str, default: object) -> object:
    """Return the value of `name` in `config`, or in the part of it that has one."""
    for part in with_parts(config):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return default


def _number(config: object, name: str, default: int) -> int:
    value = _first(config, name, default)
    return value if isinstance(value, int) else default


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in `value`, in order: itself, or those of containers and of objects like transformers'."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
