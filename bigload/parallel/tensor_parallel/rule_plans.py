"""Partial plans that tensor-parallel rules mean for the modules and parameters of a model.

Divisions are those of the planning layer (`LayerDivider`), by the same rules as a checkpoint is divided. Added here is
the forward of each module, and what such a forward needs: a layer of the right kind, and even parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from bigload.checkpoint.model import Span, TensorInfo
from bigload.errors import PartitionError
from bigload.loading.tensors.views import dtype_of
from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.plan import PartialPlan
from bigload.planning.model.config import ModelConfig
from bigload.planning.tensor_parallel.division import WHOLE, Division
from bigload.planning.tensor_parallel.layer_division import IndivisibleError, LayerDivider
from bigload.planning.tensor_parallel.rule_styles import RULE_STYLES, ForwardStyle, Side
from bigload.planning.tensor_parallel.ruled_layers import ModelRules, RuledLayer
from bigload.planning.tensor_parallel.rules import Rule

_OF_TABLES = ("embedding_rowwise", "local_params")
_UNEVEN = ("colwise_gather_output", "embedding_rowwise")
"""Forwards that work with parts of several lengths."""


def config_of(model: nn.Module) -> ModelConfig:
    """Return the config of `model` as it would be stored; an unknown one if it has none."""
    config = getattr(model, "config", None)
    found = config if config is None or isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    return ModelConfig(found if isinstance(found, Mapping) else None)


def own_rules(model: nn.Module) -> tuple[Rule, ...]:
    """Return the rules of the tensor-parallel plan that `model` itself has, as transformers keeps it."""
    found = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not isinstance(found, Mapping):
        found = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return tuple(Rule(str(pattern), str(style)) for pattern, style in found.items() if style in RULE_STYLES)


def rule_plans(
    model: nn.Module, rules: ModelRules, divider: LayerDivider
) -> Iterator[tuple[str, PartialPlan | PartitionError]]:
    """Yield the partial plan of each layer of `model` that has a rule, by its name, or why no such plan is possible."""
    forms = {
        name: TensorInfo(name, dtype, tuple(parameter.shape), Span("", 0, 0))
        for path, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        for name in [f"{path}.{leaf}".lstrip(".")]
        if (dtype := dtype_of(parameter.dtype)) is not None
    }
    for layer in rules.layers(forms):
        try:
            is_bare = "" in layer.tensors
            yield layer.name, _bare(model, layer, rules, divider) if is_bare else _linear(model, layer, divider)
        except IndivisibleError as error:
            yield layer.name, _indivisible(layer, divider, str(error))
        except PartitionError as error:
            yield layer.name, error


def _linear(model: nn.Module, layer: RuledLayer, divider: LayerDivider) -> PartialPlan:
    module = model.get_submodule(layer.name)
    kind, forward = layer_kind(module), layer.style.forward
    if kind is None or forward is None or (kind is LayerKind.LOOKUP) != (forward in _OF_TABLES):
        raise PartitionError(
            f"{layer.name} ({type(module).__name__}) cannot be divided {forward or 'by experts'}",
            details=["its forward is not the product with one weight, plus a bias, or the look-up that this divides"],
            hint="styles of look-up tables are embedding_rowwise and embedding_colwise; of other modules, give a style "
            "to their parameters, or none",
        )
    style = replace(layer.style, is_transposed=kind is LayerKind.TRANSPOSED)
    return _partial_plan(replace(layer, style=style), layer.name, forward, divider)


def _bare(model: nn.Module, layer: RuledLayer, rules: ModelRules, divider: LayerDivider) -> PartialPlan:
    owner = layer.name.rpartition(".")[0]
    of_owner = rules.module_style(owner)
    is_of_module = of_owner is not None and of_owner.side is None
    forward = of_owner.forward if of_owner is not None and is_of_module else None
    if (layer.style.side is Side.EXPERTS) != (forward == "moe_ep_experts"):
        raise _indivisible(layer, divider, "no forward is known for ranks that hold different experts")
    plan = _partial_plan(layer, owner, forward or "local_params", divider)
    if forward == "moe_ep_experts" and plan.styles and hasattr(model.get_submodule(owner), "num_experts"):
        (division,) = plan.divisions.values()
        return replace(plan, attributes={f"{owner}.num_experts": division.length(0)})
    return plan


def _partial_plan(layer: RuledLayer, owner: str, forward: ForwardStyle, divider: LayerDivider) -> PartialPlan:
    divisions: dict[str, Division] = {}
    for name, division in divider.divide(layer).items():
        lengths = {division.length(rank) for rank in range(divider.tp)}
        if 0 in lengths or (len(lengths) > 1 and forward not in _UNEVEN):
            total = max(stop for of_rank in division.ranges for _, stop in of_rank)
            raise _indivisible(layer, divider, f"expected a multiple of {divider.tp} elements to divide, found {total}")
        if divider.needs_heads and division.is_shared:
            raise _indivisible(layer, divider, "ranks would share heads, and no forward shows which counts change")
        # Every rank holds the same of keys that all queries read: they stay whole, also in the steps that follow.
        divisions[name] = WHOLE if len(set(division.ranges)) == 1 else division
    is_divided = any(division != WHOLE for division in divisions.values())
    return PartialPlan(divisions=divisions, styles={owner: forward} if is_divided else {})


def _indivisible(layer: RuledLayer, divider: LayerDivider, why: str) -> PartitionError:
    return PartitionError(
        f"{layer.name} does not divide among {divider.tp} ranks",
        details=[why],
        hint="choose another number of ranks, or the style replicate",
    )
