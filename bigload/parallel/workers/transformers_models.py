"""Models of transformers in workers: hidden states and attention weights on request, and where generation stops.

transformers records outputs by hooks, for models in a registry that constructors fill, which unpickling skips. And a
rank has the attention weights of its own heads only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MODULE = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"
_KEYS = "attentions"
_NUM_HEADS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads"),
    *("encoder_attention_heads", "decoder_attention_heads", "num_decoder_heads"),
)


_OF_TOKENS_ALONE = {"MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria"}
"""Stopping criteria that are the same in all workers."""


def register_outputs(model: nn.Module) -> None:
    """Register the modules of `model` with transformers, by what they record."""
    registry = getattr(sys.modules.get(_MODULE), "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        for module in model.modules():
            if (recorded := getattr(module, "_can_record_outputs", None)) is not None:
                registry[module] = recorded


def without_recorders(state: dict[str, Any]) -> dict[str, Any]:
    """Return the `state` of a module without recording hooks, which cannot be pickled, and without their flag.

    transformers makes new ones where they are needed.
    """
    hooks = state.get("_forward_hooks", {})
    if all(getattr(hook, "__module__", None) != _MODULE for hook in hooks.values()) and _INSTALLED not in state:
        return state
    others = {key: hook for key, hook in hooks.items() if getattr(hook, "__module__", None) != _MODULE}
    return {name: value for name, value in state.items() if name != _INSTALLED} | {
        "_forward_hooks": type(hooks)(others)
    }


def with_all_heads(value: object, model: nn.Module, *, are_asked: bool) -> object:
    """Return `value`, the output of `model`, with weights of attention of all ranks' heads, which they all ask for.

    Those are found by their names, or in a tuple without names if they `are_asked` for: tensors of four dimensions, of
    which the second are heads. Whether a rank has some or all of them is told by how many the config has. Where that
    tells nothing, ranks that have the same have all.
    """
    if isinstance(value, MutableMapping):
        found: object = {key: item for key, item in value.items() if str(key).endswith(_KEYS)}
    else:
        found = value if are_asked and isinstance(value, tuple) else ()
    tensors = list(_heads_in(found))
    if not tensors or dist.get_world_size() == 1:
        return value
    whole = iter(_gathered(tensors, _totals(model)))
    if not isinstance(value, MutableMapping):
        return _replaced(value, whole)
    assert isinstance(found, dict)
    for key, item in found.items():
        value[key] = _replaced(item, whole)
    return value


def _totals(model: nn.Module) -> set[int]:
    """Return how many heads there are, in the config of `model` and those in it."""
    config = getattr(model, "config", None)
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))] if config else []
    return {number for part in parts for name in _NUM_HEADS if isinstance(number := getattr(part, name, None), int)}


def _heads_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dim() == 4:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _heads_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _heads_in(item)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:  # noqa: ANN401 - nested tuples
    """Return `value` with `tensors` in the order of `_heads_in`."""
    if isinstance(value, Tensor):
        return next(tensors) if value.dim() == 4 else value
    return tuple(_replaced(item, tensors) for item in value) if isinstance(value, (tuple, list)) else value


def _gathered(tensors: list[Tensor], totals: set[int]) -> list[Tensor]:
    """Return `tensors` with the heads of all ranks; ranks differ in nothing but how many heads each has."""
    num_heads = torch.tensor([tensor.shape[1] for tensor in tensors], device=tensors[0].device)
    of_ranks = [torch.empty_like(num_heads) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, num_heads)
    found = []
    for tensor, counts in zip(tensors, torch.stack(of_ranks, 1).tolist(), strict=True):
        parts = tuple(_broadcast(tensor, rank, count) for rank, count in enumerate(counts))
        found.append(tensor if _is_whole(parts, totals) else torch.cat(parts, 1))
    return found


def _broadcast(tensor: Tensor, rank: int, num_heads: int) -> Tensor:
    """Return the `tensor` of `rank`: a tensor and not an object, which torch would pickle and unpickle."""
    if rank == dist.get_rank():
        part = tensor.detach().contiguous()
    else:
        part = tensor.new_empty((tensor.shape[0], num_heads, *tensor.shape[2:]))
    dist.broadcast(part, rank)
    return part


def _is_whole(parts: tuple[Tensor, ...], totals: set[int]) -> bool:
    sizes = [part.shape[1] for part in parts]
    could_be_parts, could_be_whole = sum(sizes) in totals, set(sizes) <= totals
    if could_be_parts != could_be_whole:
        return could_be_whole
    return all(torch.equal(part, parts[0]) for part in parts)


def synchronize_stopping(model: nn.Module) -> None:
    """Make `model.generate` stop at the same token in all workers, even by the clock: where it stops in rank 0.

    A worker that stopped before the others would leave them waiting in a collective. The method by which transformers
    collects its criteria is private; a model without it stops as it does.
    """
    collect = getattr(model, "_get_stopping_criteria", None)
    if collect is None:
        return

    @wraps(collect)
    def collect_agreed(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - a list of transformers
        criteria = collect(*args, **kwargs)
        return criteria if all(type(each).__name__ in _OF_TOKENS_ALONE for each in criteria) else _agreed(criteria)

    model._get_stopping_criteria = collect_agreed  # type: ignore[assignment]


def _agreed(criteria: Any) -> Any:  # noqa: ANN401 - a list of transformers
    kind: Any = type(criteria)

    class Agreed(kind):  # type: ignore[misc, unused-ignore]
        """Criteria whose result is that of rank 0."""

        def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
            is_done: torch.Tensor = super().__call__(*args, **kwargs).to(torch.uint8).contiguous()
            dist.broadcast(is_done, 0)
            return is_done.bool()

    return Agreed(criteria)
