"""The routed experts of a block, apart from the rest of it.

A router picks `top_k` of a block's experts for every token, so most of the bytes of such a block are read seldom, while
its attention, router and shared experts are read always. Experts are found by the name that nearly all families give
to the module around them, `experts`; the few that have none (granite's `block_sparse_moe.input_linear`) are told by
tensors with one slice per expert beside a router.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import ModuleNode

_ROUTERS = ("router", "gate")


class RoutedExperts(NamedTuple):
    """The routed experts of one block, as they are stored.

    Attributes:
        modules: The modules that hold them, and nothing else.
        num_experts: How many a router chooses from; `None` when neither names nor shapes nor the config tell.
        top_k: How many of them run for a token; `None` when the config does not say.
        are_separate: Whether each is a module of its own. Otherwise all of them are slices of the same tensors.
        largest_expert_bytes: All of `num_bytes` when `num_experts` is unknown.
    """

    modules: tuple[str, ...]
    num_bytes: int
    num_experts: int | None
    top_k: int | None
    are_separate: bool
    largest_expert_bytes: int

    @property
    def active_bytes(self) -> int:
        """Bytes that one token reads: `top_k` experts of average size; all bytes when `top_k` is unknown.

        Example: 8 of 256 experts that weigh 256 MiB together are 8 MiB.
        """
        if self.num_experts is None or self.top_k is None:
            return self.num_bytes
        return -(-self.num_bytes * self.top_k // self.num_experts)


def routed_experts(block: ModuleNode, config: ModelConfig) -> RoutedExperts | None:
    """Return the routed experts of `block`; `None` for a dense one. Shared experts are no part of them.

    What the file says is believed before the config: pruned models still give the number of experts they once had.
    """
    modules = list(_called_experts(block)) or list(_beside_a_router(block, config))
    if not modules:
        return None
    told = config.count("num_experts")
    single = [_separate(module) for module in modules]
    counts = {len(own) if own else _num_slices(module, told) for module, own in zip(modules, single, strict=True)}
    num_experts = counts.pop() if len(counts) == 1 else None
    top_k = config.experts_per_token
    num_bytes = sum(module.num_bytes for module in modules)
    are_separate = all(single)
    largest = num_bytes if num_experts is None else -(-num_bytes // num_experts)
    if are_separate:
        largest = sum(max(expert.num_bytes for expert in own) for own in single)
    return RoutedExperts(
        modules=tuple(module.name for module in modules),
        num_bytes=num_bytes,
        num_experts=num_experts,
        top_k=None if top_k is None or num_experts is None else min(top_k, num_experts),
        are_separate=are_separate,
        largest_expert_bytes=largest,
    )


def dense_parts(block: ModuleNode, experts: RoutedExperts) -> tuple[ModuleNode | TensorInfo, ...]:
    """Return the modules and single tensors of `block` without its routed experts, in the order of the tree.

    Together with `experts.modules` they hold every tensor of the block exactly once. Modules stay as large as they can
    be: `self_attn` whole, but `mlp.gate` and `mlp.shared_experts` instead of `mlp`, which holds the experts.
    """
    names = [name.split(".") for name in experts.modules]
    around = frozenset(".".join(parts[:depth]) for parts in names for depth in range(1, len(parts)))
    return tuple(_without(block, frozenset(experts.modules), around))


def _without(node: ModuleNode, left_out: frozenset[str], around: frozenset[str]) -> Iterator[ModuleNode | TensorInfo]:
    yield from node.tensors
    for child in node.children.values():
        if child.name in around:
            yield from _without(child, left_out, around)
        elif child.name not in left_out:
            yield child


def _called_experts(node: ModuleNode) -> Iterator[ModuleNode]:
    for key, child in node.children.items():
        if key == "experts":
            yield child
        elif not key.startswith("shared"):
            yield from _called_experts(child)


def _beside_a_router(node: ModuleNode, config: ModelConfig) -> Iterator[ModuleNode]:
    has_router = any(key in node.children for key in _ROUTERS)
    num_experts = config.count("num_experts") if has_router else None
    for key, child in node.children.items():
        if key in _ROUTERS or key.startswith("shared"):
            continue
        if has_router and num_experts is not None and _is_sliced(child, num_experts):
            yield child
        else:
            yield from _beside_a_router(child, config)


def _is_sliced(module: ModuleNode, num_experts: int) -> bool:
    """Return whether the module's tensors have one slice per expert, above all a stack of matrices."""
    shapes = [tensor.shape for tensor in module.tensors]
    slices = all(shape[:1] == (num_experts,) for shape in shapes)
    return num_experts > 1 and not module.children and slices and any(len(shape) == 3 for shape in shapes)


def _separate(experts: ModuleNode) -> list[ModuleNode]:
    """Return the modules of single experts, `experts.7` or `experts.expert_7`; none when tensors hold all of them.

    A lone module in between is passed through (`experts.deepspeed_experts.7`).
    """
    while len(experts.children) == 1 and not experts.tensors and not _numbered(experts):
        (experts,) = experts.children.values()
    return _numbered(experts)


def _numbered(experts: ModuleNode) -> list[ModuleNode]:
    return [child for key, child in experts.children.items() if key.removeprefix("expert_").isdecimal()]


def _num_slices(experts: ModuleNode, told: int | None) -> int | None:
    """Return into how many experts the tensors divide; matrices that stand below one another need a config for that."""
    largest = max(experts.all_tensors(), key=lambda tensor: (len(tensor.shape), tensor.num_bytes), default=None)
    if largest is None or not largest.shape or not largest.shape[0]:
        return None
    rows = largest.shape[0]
    if len(largest.shape) >= 3:
        return rows
    return told if told is not None and rows % told == 0 else None
