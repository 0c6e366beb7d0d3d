"""Layers that tensor-parallel rules divide: the tensors of each, stored or in memory, with the style of their rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from bigload.dtypes import DType
from bigload.errors import PartitionError
from bigload.planning.model.config import ModelConfig
from bigload.planning.tensor_parallel.families import family_rules
from bigload.planning.tensor_parallel.rule_styles import RULE_STYLES, RuleStyle, Side
from bigload.planning.tensor_parallel.rules import Rule, RuleSet

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

OUT_IN = (-2, -1)
LINEAR_TENSORS: Mapping[str, tuple[int | None, int | None]] = {
    "weight": OUT_IN,
    "bias": (-1, None),
    "weight_scale": OUT_IN,
    "weight_scale_inv": OUT_IN,
    "SCB": (-1, None),
    "qweight": (1, 0),
    "qzeros": (1, 0),
    "scales": (1, 0),
    "g_idx": (None, 0),
}
"""For each tensor of a linear layer, the dimensions of its output and its input features; `None` where it has none.

`qweight` and its neighbours are GPTQ's and AWQ's (inputs x outputs, 32-bit words hold several), `SCB` is LLM.int8's.
"""

SCALARS = {
    "input_scale",
    "output_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "weight_format",
}

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj"}  # whatever the module above is called
_TOWERS = (("vision", "vision_config"), ("visual", "vision_config"), ("audio", "audio_config"))


class TensorForm(Protocol):
    """Name, element type and shape of a tensor: a stored one (`TensorInfo`), or a parameter."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledLayer:
    """A linear layer, or a bare parameter, that a rule divides; `config` is the section that describes it.

    `tensors` are the layer's, by the ends of their names; that of a bare parameter is empty.
    """

    name: str
    style: RuleStyle
    tensors: Mapping[str, TensorForm]
    config: ModelConfig

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def is_attention(self) -> bool:
        """Whether the layer works on heads. Linear attention has layouts of its own, which no style describes."""
        parts = [part.lower() for part in self.parts]
        is_named = any("attn" in part or "attention" in part for part in parts) or parts[-1] in _PROJECTIONS
        return is_named and "linear_attn" not in parts

    @property
    def is_quantized(self) -> bool:
        return not self.tensors.keys() <= {"weight", "bias", ""} or not all(
            tensor.dtype.name[0] in "FB" and tensor.dtype.bits >= 16 for tensor in self.tensors.values()
        )


class ModelRules:
    """Rules of a model, by which its layers are found: overrides first, then those of its family.

    Towers that see or hear have the rules of their own section of the config, if those are known. `used` are the rules
    that matched a layer, `whole` the names of layers that a rule keeps whole.
    """

    def __init__(self, config: ModelConfig, overrides: tuple[Rule, ...] = (), *, has_family: bool = True) -> None:
        self.used: set[Rule] = set()
        self.whole: set[str] = set()
        self._config = config
        self._towers = {key: config.section(key) for _, key in _TOWERS}
        sections: dict[str | None, ModelConfig] = dict(self._towers.items())
        sections[None] = config
        families = {key: (family_rules(section) if has_family else None) for key, section in sections.items()}
        self.is_known = bool(overrides) or any(families.values())
        self._rules = {key: RuleSet((*overrides, *(rules or ()))) for key, rules in families.items()}

    def layers(self, tensors: Mapping[str, TensorForm]) -> Iterator[RuledLayer]:
        """Yield the layers of `tensors` that a rule divides."""
        for layer, names in layers_by_name(tensors).items():
            yield from self.layers_of(layer, {leaf: tensors[name] for leaf, name in names.items()})

    def module_style(self, name: str) -> RuleStyle | None:
        """Return the style of the module `name`, `None` if it has no rule."""
        rule = self._section(name)[1].find(name)
        return None if rule is None else RULE_STYLES[rule.style]

    def _section(self, name: str) -> tuple[ModelConfig, RuleSet]:
        """Return the config and the rules of the tower that `name` is in, or of the model."""
        tower = next((key for word, key in _TOWERS if any(word in part for part in name.lower().split("."))), None)
        if tower is not None and self._towers[tower].is_known:
            return self._towers[tower], self._rules[tower]
        return self._config, self._rules[None]

    def layers_of(self, name: str, tensors: Mapping[str, TensorForm]) -> Iterator[RuledLayer]:
        """Yield the layer `name` if a rule divides it; `tensors` are its own, by the ends of their names."""
        config, rules = self._section(name)
        above, _, last = name.rpartition(".")
        by_rule: dict[Rule | None, dict[str, TensorForm]] = {}
        for leaf, tensor in tensors.items():
            rule = rules.find(tensor.name, above if leaf == "" else name)
            if leaf == "" and rule is not None and _is_of_forward(RULE_STYLES[rule.style]):
                self.used.add(rule)
                rule = rules.find(tensor.name)
            by_rule.setdefault(rule, {})[leaf] = tensor
        for rule, ruled in by_rule.items():
            if rule is None:
                continue
            self.used.add(rule)
            style = RULE_STYLES[rule.style]
            if style.side is None:
                self.whole.add(name)
                continue
            if len(by_rule) > 1:
                styles = {leaf: None if r is None else r.style for r, group in by_rule.items() for leaf in group}
                raise PartitionError(
                    f"the tensors of {name} have different rules",
                    details=[f"{leaf}: {found or 'none'}" for leaf, found in styles.items()],
                    hint="give one rule to the module",
                )
            if "" in ruled and style.side is not Side.EXPERTS and not rule.matches(name.split(".")):
                # A tensor of a layer with a rule, of none of the kinds that linear layers are known to have.
                yield RuledLayer(name=above, style=style, tensors={last: ruled[""]}, config=config)
            else:
                yield RuledLayer(name=name, style=style, tensors=ruled, config=config)


def _is_of_forward(style: RuleStyle) -> bool:
    """Return whether `style` only describes the forward of a module whose parameters have rules of their own."""
    return style.side is None and style.forward is not None


def layers_by_name(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the `names` of tensors by that of their layer and the end of their own.

    A bare parameter is a layer by itself, and the end of its name is empty.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        layer, leaf = _layer_of(name)
        groups.setdefault(layer, {})[leaf] = name
    return groups


def _layer_of(name: str) -> tuple[str, str]:
    layer, mark, rest = name.rpartition(".weight.")  # bitsandbytes stores weight.absmax and others
    if mark:
        return layer, f"weight.{rest}"
    layer, _, leaf = name.rpartition(".")
    is_linear = leaf in LINEAR_TENSORS or leaf in SCALARS or leaf.startswith(("weight_", "lora_"))
    return (layer, leaf) if is_linear else (name, "")


def generic_name(name: str) -> str:
    """Return `name` with a star for each number in it that stands between dots.

    >>> generic_name("h.11.mlp.experts.3.w1")
    'h.*.mlp.experts.*.w1'
    """
    return _NUMBER.sub("*", name)
