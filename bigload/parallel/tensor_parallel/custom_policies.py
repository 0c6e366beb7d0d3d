"""Policies of the caller: styles by patterns of names, or policies as parallelformers has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from bigload.errors import PartitionError
from bigload.planning.tensor_parallel.rules import Rule, override_rules

_COLUMNS, _ROWS = ("attn_qkv", "mlp_in"), ("attn_out", "mlp_out")
_FUSED = {1: "colwise", 2: "packed_colwise", 3: "packed_qkv"}
_HOW = (
    'give a mapping such as {"attention.query": "colwise", "attention.output": "rowwise"}, or classes with the methods '
    "of parallelformers' Policy"
)


def read_policies(model: nn.Module, policies: object, size: int) -> tuple[tuple[Rule, ...], dict[str, int]]:
    """Return what `policies` mean for `model`: rules, and the local values of attributes by their qualified names.

    A mapping has styles by patterns. Anything else is a policy or a sequence of policies, classes or objects, that have
    `original_layer_class()`, lists of layers from `attn_qkv()`, `attn_out()`, `mlp_in()` and `mlp_out()`, each with the
    name of a `weight` inside of such a module and how many parts are fused in it (`n_fused`), and numbers from
    `replace_arguments(config, size)`. Their classes of replaced modules are not used: layers are known by what they do.
    """
    if policies is None:
        return (), {}
    if isinstance(policies, Mapping):
        return _checked(model, policies), {}
    styles: dict[str, str] = {}
    attributes: dict[str, int] = {}
    for policy in policies if isinstance(policies, (list, tuple)) else (policies,):
        if not callable(getattr(policy, "original_layer_class", None)):
            raise PartitionError(f"{policy!r:.200} is no policy", hint=_HOW)
        kind = policy.original_layer_class()
        places = [name for name, module in model.named_modules() if isinstance(module, kind)]
        if not places:
            raise PartitionError(
                f"{_name(policy)} is for {kind.__name__}, and {type(model).__name__} has none", hint=_HOW
            )
        named = dict(_styles(policy))
        arguments = policy.replace_arguments(getattr(model, "config", None), size)
        for place in places:
            modules = dict(model.get_submodule(place).named_modules())
            styles |= {f"{place}.{path}": style for path, style in named.items() if path in modules}
            attributes |= {f"{place}.{path}": value for path, value in arguments.items() if type(value) is int}
    return override_rules(styles), attributes


def _checked(model: nn.Module, policies: Mapping[Any, Any]) -> tuple[Rule, ...]:
    wrong = [
        f"{key!r:.100}: {value!r:.100}"
        for key, value in policies.items()
        if not (isinstance(key, str) and isinstance(value, str))
    ]
    if wrong:
        raise PartitionError("policies are styles by patterns of names", details=wrong, hint=_HOW)
    rules = override_rules(policies)
    names = [name.split(".") for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    unused = [rule.pattern for rule in rules if not any(map(rule.matches, names))]
    if unused:
        raise PartitionError(
            f"policies without a match in {type(model).__name__}",
            details=unused,
            hint="a pattern is the end of a name of a module or parameter, with * for one part of it",
        )
    return rules


def _styles(policy: object) -> Iterator[tuple[str, str]]:
    """Yield the layers that `policy` names, and a style for each."""
    for method in (*_COLUMNS, *_ROWS):
        for layer in getattr(policy, method)() or ():
            path = layer.weight.rpartition(".")[0]
            parts = getattr(layer, "n_fused", None) or 1
            if parts not in _FUSED:
                raise PartitionError(f"{_name(policy)} has {parts} parts fused in {path}", hint="at most 3 are known")
            yield path, _FUSED[parts] if method in _COLUMNS else "rowwise"


def _name(policy: object) -> str:
    return getattr(policy, "__name__", type(policy).__name__)
