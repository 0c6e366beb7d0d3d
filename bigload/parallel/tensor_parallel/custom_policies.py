"""What a caller says about how a model is divided: words by patterns, or policies as parallelformers has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from bigload.errors import PartitionError
from bigload.planning.tensor_parallel.rules import Rule

_COLUMNS, _ROWS = ("attn_qkv", "mlp_in"), ("attn_out", "mlp_out")
_FUSED = {1: "colwise", 2: "packed_colwise", 3: "packed_qkv"}
_HOW = (
    'give a mapping such as {"attention.query": "colwise", "attention.output": "rowwise"}, or classes with the methods '
    "of parallelformers' Policy"
)


def read_policies(model: nn.Module, policies: object, size: int) -> tuple[dict[str, str], dict[str, int]]:
    """Return what `policies` say about `model`: words by patterns of names, and numbers that are local, by name.

    A mapping has words by patterns. Anything else is a policy or a sequence of policies, classes or objects, that have
    `original_layer_class()`, lists of layers from `attn_qkv()`, `attn_out()`, `mlp_in()` and `mlp_out()`, each with the
    name of a `weight` inside of such a module and how many parts are fused in it (`n_fused`), and numbers from
    `replace_arguments(config, size)`. What those say of how modules are replaced is not asked for: layers are known by
    what they do.

    Raises:
        PartitionError: they are of no such kind, or speak of nothing that is in `model`.
    """
    if policies is None:
        return {}, {}
    if isinstance(policies, Mapping):
        return _checked(model, policies), {}
    words: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for policy in policies if isinstance(policies, (list, tuple)) else (policies,):
        if not callable(getattr(policy, "original_layer_class", None)):
            raise PartitionError(f"{policy!r:.200} is no policy", hint=_HOW)
        kind = policy.original_layer_class()
        places = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if not places:
            raise PartitionError(
                f"{_name(policy)} is for {kind.__name__}, and {type(model).__name__} has none", hint=_HOW
            )
        named = dict(_words(policy))
        arguments = policy.replace_arguments(getattr(model, "config", None), size)
        for place in places:
            modules = dict(model.get_submodule(place).named_modules())
            words |= {f"{place}.{path}": word for path, word in named.items() if path in modules}
            numbers |= {f"{place}.{path}": value for path, value in arguments.items() if type(value) is int}
    return words, numbers


def _checked(model: nn.Module, policies: Mapping[Any, Any]) -> dict[str, str]:
    wrong = [f"{key!r:.100}: {value!r:.100}" for key, value in policies.items() if not _is_text(key, value)]
    if wrong:
        raise PartitionError("policies are words by patterns of names", details=wrong, hint=_HOW)
    names = [name.split(".") for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    rules = [Rule(pattern, word) for pattern, word in policies.items()]
    unused = [rule.pattern for rule in rules if not any(map(rule.matches, names))]
    if unused:
        raise PartitionError(
            f"policies without a match in {type(model).__name__}",
            details=unused,
            hint="a pattern is the end of a name of a module or parameter, with * for one part of it",
        )
    return dict(policies)


def _is_text(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, str) and all(part.count("*") < 2 for part in key.split("."))


def _words(policy: object) -> Iterator[tuple[str, str]]:
    """Yield the layers that `policy` names, and a word for each."""
    for method in (*_COLUMNS, *_ROWS):
        for layer in getattr(policy, method)() or ():
            path = layer.weight.rpartition(".")[0]
            parts = getattr(layer, "n_fused", None) or 1
            if parts not in _FUSED:
                raise PartitionError(f"{_name(policy)} has {parts} parts fused in {path}", hint="at most 3 are known")
            yield path, _FUSED[parts] if method in _COLUMNS else "rowwise"


def _name(policy: object) -> str:
    return getattr(policy, "__name__", type(policy).__name__)
