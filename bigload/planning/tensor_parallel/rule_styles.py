"""Vocabulary of tensor-parallel rules: the styles that a rule can give to a module or tensor.

The names are those of transformers' `base_model_tp_plan`. Names of bigload's own describe what transformers leaves to
the model's code: queries, keys and values that are stored as one matrix, and the matrices of GPT-2, which are stored
inputs first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal


class Side(Enum):
    """Divided side of a layer: its output features, its input features, or its experts."""

    OUT = "out"
    IN = "in"
    EXPERTS = "experts"


class Packing(Enum):
    """Matrices that are stored as one along the divided dimension.

    `HALVES`: gate, then up. `QKV`: all queries, then all keys, then all values. `GROUPS`: for each key/value head its
    queries, its key and its value.
    """

    HALVES = "halves"
    QKV = "qkv"
    GROUPS = "groups"


ForwardStyle = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "local_params",
    "moe_tp_experts",
    "moe_ep_experts",
]
"""Forward of a divided module: its product and collective (`bigload.parallel.tensor_parallel.forwards`)."""


@dataclass(frozen=True, slots=True)
class RuleStyle:
    """Meaning of a style.

    Attributes:
        side: The divided side of the layer; `None` if the style divides nothing by itself.
        packing: Matrices that are stored as one, each of which is divided.
        is_transposed: Whether weights are stored inputs x outputs.
        forward: The forward of a module that has this style; `None` if no forward of such a rank is known. Without a
            `side`, of a module whose own parameters have rules.
    """

    side: Side | None = None
    packing: Packing | None = None
    is_transposed: bool = False
    forward: ForwardStyle | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether ranks exchange all features, so that a cut need not respect heads or packed matrices."""
        return self.forward in ("colwise_gather_output", "rowwise_split_input")


_OUT = RuleStyle(Side.OUT, forward="colwise")
_IN = RuleStyle(Side.IN, forward="rowwise")
_HALVES = RuleStyle(Side.OUT, Packing.HALVES, forward="colwise")
_HALVES_IN = RuleStyle(Side.IN, Packing.HALVES, forward="local_params")
_GATHERED = RuleStyle(Side.OUT, forward="colwise_gather_output")
_SPLIT = RuleStyle(Side.IN, forward="rowwise_split_input")
_SUMMED = RuleStyle(forward="moe_tp_experts")
_WHOLE = RuleStyle()

RULE_STYLES: Mapping[str, RuleStyle] = MappingProxyType(
    {
        "colwise": _OUT,
        "local_colwise": _OUT,
        "colwise_gather_output": _GATHERED,
        "colwise_rep": _GATHERED,
        "embedding_rowwise": RuleStyle(Side.OUT, forward="embedding_rowwise"),
        "rowwise": _IN,
        "local_rowwise": _IN,
        "rowwise_split_input": _SPLIT,
        "rowwise_rep": _SPLIT,
        # The table of T5's relative positions has a column for each head.
        "embedding_colwise": RuleStyle(Side.IN, forward="local_params"),
        "packed_colwise": _HALVES,
        "local_packed_colwise": _HALVES,
        "packed_rowwise": _HALVES_IN,
        "local_packed_rowwise": _HALVES_IN,
        # Ranks have other experts: a forward is known where the module around them has the style moe_ep_experts.
        "grouped_gemm": RuleStyle(Side.EXPERTS),
        "moe_ep_experts": RuleStyle(forward="moe_ep_experts"),
        "packed_qkv": RuleStyle(Side.OUT, Packing.QKV, forward="colwise"),
        "grouped_qkv": RuleStyle(Side.OUT, Packing.GROUPS, forward="colwise"),
        "conv1d_colwise": RuleStyle(Side.OUT, is_transposed=True, forward="colwise"),
        "conv1d_rowwise": RuleStyle(Side.IN, is_transposed=True, forward="rowwise"),
        "conv1d_packed_qkv": RuleStyle(Side.OUT, Packing.QKV, is_transposed=True, forward="colwise"),
        "moe_tp_experts": _SUMMED,
        "all_reduce": _SUMMED,
        "local_params": RuleStyle(forward="local_params"),
        "replicate": _WHOLE,
        "replicated_with_grad_allreduce": _WHOLE,
        "sequence_parallel": _WHOLE,
        "mla_kv_a_proj": _WHOLE,
        "moe_identity_expert": _WHOLE,
        "ep_dispatch_experts": _WHOLE,
        "gather": _WHOLE,
    }
)
"""By name. `packed_qkv`, `grouped_qkv`, `moe_ep_experts` and those with `conv1d_` are bigload's own."""
