"""The module tree of a model, from the names of its tensors alone: no model code, no config.

`model.layers.0.mlp.up_proj.weight` names a parameter `weight` of the module `model.layers.0.mlp.up_proj`. Children are
put into the order in which a forward pass needs them, which no file records: indexes are sorted by letters (layers.10
before layers.2) and shards by dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from bigload.checkpoint.model import TensorInfo
from bigload.errors import PlanError

MAX_DEPTH = 100
"""Modules in one name; real models need about ten, and a bound keeps hostile names from exhausting the stack."""

MAX_STAGES = 8
"""More numbered siblings than this are blocks, not stages."""


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module: its own tensors, and its children in execution order. Counts and bytes are of the whole subtree."""

    name: str
    tensors: tuple[TensorInfo, ...]
    children: Mapping[str, ModuleNode]
    num_tensors: int
    num_bytes: int

    @property
    def is_block_list(self) -> bool:
        """Whether the children are the repeated blocks of a model: numbered, and mostly modules with their own parts.

        A numbered sequence of plain layers (`mlp.0.weight`, `mlp.2.weight`) is not one, nor are the stages of a
        convolutional or hierarchical vision model, whose blocks are one level further down.
        """
        numbered = [child for key, child in self.children.items() if is_index(key)]
        has_parts = sum(bool(child.children) for child in numbered) >= 0.6 * len(numbered)
        return bool(numbered) and has_parts and not _are_stages(numbered)

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this module and all below it, parents first, in execution order."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def all_tensors(self) -> Iterator[TensorInfo]:
        """Yield the tensors of the subtree, in execution order."""
        for node in self.walk():
            yield from node.tensors


def _are_stages(children: list[ModuleNode]) -> bool:
    """Return whether numbered siblings are stages: few, each mostly a list of blocks, and each of another width.

    The width is that of the norms in the blocks. Blocks that themselves hold a numbered list, of T5 or of experts, have
    one width throughout.
    """
    if not 2 <= len(children) <= MAX_STAGES:
        return False
    widths = []
    for child in children:
        inner = next((node for node in child.walk() if node is not child and node.is_block_list), None)
        if inner is None or inner.num_bytes <= 0.5 * child.num_bytes:
            return False
        widths.append(
            {tensor.shape for tensor in inner.all_tensors() if "norm" in tensor.name and len(tensor.shape) == 1}
        )
    return all(one and not one & other for index, one in enumerate(widths) for other in widths[:index])


def build_tree(tensors: Iterable[TensorInfo]) -> ModuleNode:
    """Return the tree of the modules that `tensors` belong to; the root has the name `""`.

    Raises:
        PlanError: a name nests more than `MAX_DEPTH` modules.
    """
    items = [(tensor.name.split("."), tensor) for tensor in tensors]
    deepest = max((item for item in items if len(item[0]) > MAX_DEPTH), key=lambda item: len(item[0]), default=None)
    if deepest is not None:
        raise PlanError(
            f"tensor {deepest[1].name:.60}… nests {len(deepest[0])} modules, models nest {MAX_DEPTH} at most"
        )
    return _node("", items, depth=0)


def is_index(key: str) -> bool:
    """Return whether a part of a name is the number of a module in a list."""
    return key.isdecimal() and key.isascii() and len(key) < 10


def _node(name: str, items: list[tuple[list[str], TensorInfo]], *, depth: int) -> ModuleNode:
    own: list[TensorInfo] = []
    below: dict[str, list[tuple[list[str], TensorInfo]]] = {}
    for item in items:
        parts, tensor = item
        if len(parts) <= depth + 1:
            own.append(tensor)
        else:
            below.setdefault(parts[depth], []).append(item)
    if not below:  # most modules of a large model
        return ModuleNode(name, tuple(sorted(own, key=_by_name)), {}, len(own), sum([t.num_bytes for t in own]))
    if own:
        own = _hand_down(own, below, depth)
    prefix = f"{name}." if depth else ""
    children = {key: _node(prefix + key, below[key], depth=depth + 1) for key in sorted(below, key=execution_order)}
    num_bytes = sum([tensor.num_bytes for tensor in own]) + sum([child.num_bytes for child in children.values()])
    return ModuleNode(name, tuple(sorted(own, key=_by_name)), children, len(items), num_bytes)


def _hand_down(
    own: list[TensorInfo], below: dict[str, list[tuple[list[str], TensorInfo]]], depth: int
) -> list[TensorInfo]:
    """Give a tensor `x.weight` that stands beside `x.weight.absmax` (quantised weights) to the module `x.weight`."""
    kept = []
    for tensor in own:
        parts = tensor.name.split(".")
        if len(parts) == depth + 1 and parts[depth] in below:
            below[parts[depth]].append((parts, tensor))
        else:
            kept.append(tensor)
    return kept


def _by_name(tensor: TensorInfo) -> str:
    return tensor.name


# Asked in this order, because names combine the words: `embed_out` is a head, `visual_projection` no vision tower.
_STAGES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (6, ("lm_head", "embed_out", "proj_out", "classifier", "qa_outputs", "score", "pooler", "mtp")),
    (1, ("projector", "projection", "merger", "connector")),
    (0, ("vision", "visual", "image", "audio", "speech")),
    (2, ("embed", "wte", "wpe", "shared")),
    (5, ("norm", "ln_f")),
)
_EXACT_STAGES = {"encoder": 3, "head": 6, "output": 6, "cls": 6}
_OTHER_STAGE = 4


def execution_order(key: str) -> tuple[int, int, str]:
    """Sort key of a module among its siblings: towers, projectors, embeddings, encoder, blocks, norms, heads.

    >>> sorted(["lm_head", "layers", "norm", "embed_tokens"], key=execution_order)
    ['embed_tokens', 'layers', 'norm', 'lm_head']
    >>> sorted(["10", "2"], key=execution_order)
    ['2', '10']
    """
    if is_index(key):
        return _OTHER_STAGE, int(key), key
    return _stage(key), -1, key


@lru_cache(maxsize=10_000)
def _stage(key: str) -> int:
    lower = key.lower()
    if lower in _EXACT_STAGES:
        return _EXACT_STAGES[lower]
    return next((stage for stage, words in _STAGES if any(word in lower for word in words)), _OTHER_STAGE)
