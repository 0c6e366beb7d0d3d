"""Settings of the calling process that a call applies in workers: autocast, generation, and some of the config.

Otherwise the model of a worker is as it was at its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

_OF_CONFIG = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
_ATTENTION = "_attn_implementation"
_GENERATION = "generation_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Settings of one call.

    Attributes:
        autocast: By type of device: the dtype of `torch.autocast`, for those where it is on.
        config: Values of the config of the model that a forward reads, by name.
        generation: The model's settings for generation, as an object of transformers, if it has some.
    """

    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    generation: object = None


def current_settings(model: nn.Module) -> CallSettings:
    """Return the settings of this thread and of `model` as they are now."""
    config = getattr(model, "config", None)
    values: dict[str, object] = {}
    implementation = getattr(config, _ATTENTION, None)
    if isinstance(implementation, str) and callable(getattr(model, "set_attn_implementation", None)):
        values[_ATTENTION] = implementation  # before whether weights of attention are returned, which it decides on
    values |= {name: value for name in _OF_CONFIG if isinstance(value := getattr(config, name, None), bool)}
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return CallSettings(
        autocast={kind: torch.get_autocast_dtype(kind) for kind in kinds},
        config=values,
        generation=vars(model).get(_GENERATION),
    )


@contextmanager
def apply_settings(settings: CallSettings, model: nn.Module) -> Iterator[None]:
    """Apply `settings` to `model` of a worker: those of the config for good, the others during the block."""
    config = getattr(model, "config", None)
    for name, value in settings.config.items():
        if getattr(config, name, None) == value:
            continue
        if name == _ATTENTION:
            model.set_attn_implementation(value)  # type: ignore[operator]
        else:
            setattr(config, name, value)
    if settings.generation is not None:
        vars(model)[_GENERATION] = settings.generation
    with ExitStack() as stack:
        for kind, dtype in settings.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
