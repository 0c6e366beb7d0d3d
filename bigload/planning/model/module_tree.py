"""The module tree of a model, from the names of its tensors alone: no model code, no config.

`model.layers.0.mlp.up_proj.weight` names a parameter `weight` of the module `model.layers.0.mlp.up_proj`. Children are
put into the order in which a forward pass needs them, which no file records: indexes are sorted by letters (layers.10
before layers.2) and shards by dtype.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, auto
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import methodcaller
from types import MappingProxyType

from bigload.checkpoint.model import StoredForm, TensorInfo, forms_of, ranges_of
from bigload.errors import PlanError
from bigload.machine.profiles.machine_profile import WIDE_ROW

MAX_DEPTH = 100
"""Modules in one name; real models need about ten, and a bound keeps hostile names from exhausting the stack."""

MAX_STAGES = 8
"""More numbered siblings than this are blocks, not stages."""

_SHORTEST_ROW = 64
"""Elements. Shorter rows are those of convolutions, of scales, or of words of packed weights."""

Children = Mapping[str, "ModuleNode"]
Parts = tuple[tuple[TensorInfo, ...], Children]
Contents = tuple[tuple[str, ...], tuple[StoredForm, ...]]
"""Names below a module, sorted, and their forms."""


class ModuleNode:
    """A module: its own tensors by name, and its children in execution order. `num_bytes` are those of the subtree."""

    __slots__ = ("_parts", "name", "num_bytes")

    def __init__(self, name: str, num_bytes: int, parts: Parts | None = None) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self._parts = parts

    @classmethod
    def of(cls, name: str, tensors: Sequence[TensorInfo], children: Children = MappingProxyType({})) -> ModuleNode:
        """Return a module of known parts."""
        num_bytes = sum(tensor.num_bytes for tensor in tensors) + sum(child.num_bytes for child in children.values())
        return ModuleNode(name, num_bytes, (tuple(tensors), children))

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return self._found()[0]

    @property
    def children(self) -> Children:
        return self._found()[1]

    def _found(self) -> Parts:
        assert self._parts is not None
        return self._parts

    @property
    def num_tensors(self) -> int:
        """Tensors of the subtree."""
        return sum(1 for _ in self.all_tensors())

    @property
    def num_elements(self) -> int:
        """Elements of the tensors of the subtree."""
        return sum(tensor.num_elements for tensor in self.all_tensors())

    @property
    def num_rows(self) -> int:
        """Rows of the matrices of the subtree, see `rows_of`."""
        return sum(rows_of(tensor.shape) for tensor in self.all_tensors())

    @property
    def contents(self) -> Contents:
        """Names and tensors below it; equal for modules that are alike."""
        start = len(self.name) + 1 if self.name else 0
        forms = {tensor.name[start:]: StoredForm.of(tensor) for tensor in self.all_tensors()}
        return tuple(sorted(forms)), tuple(forms[name] for name in sorted(forms))

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


def build_tree(tensors: Mapping[str, TensorInfo]) -> ModuleNode:
    """Return the tree of the modules that `tensors` belong to; the root has the name `""`."""
    long_names = [name for name in tensors if len(name) >= MAX_DEPTH]  # others are not asked: most of 100,000
    deepest = max(long_names, key=methodcaller("count", "."), default="")
    if deepest.count(".") >= MAX_DEPTH:
        raise PlanError(
            f"tensor {deepest:.60}… nests {deepest.count('.') + 1} modules, models nest {MAX_DEPTH} at most"
        )
    return _StoredModule(_Tree(tensors), "", 0, len(tensors))


def without(node: ModuleNode, names: Sequence[str]) -> ModuleNode:
    """Return the tree without the modules called `names`; what is not around them is not built again."""
    if not any(f"{name}.".startswith(f"{node.name}." if node.name else "") for name in names):
        return node
    children = {key: without(child, names) for key, child in node.children.items() if child.name not in names}
    return ModuleNode.of(node.name, node.tensors, children)


def block_lists(node: ModuleNode) -> Iterator[ModuleNode]:
    """Yield the outermost lists of repeated blocks, in execution order."""
    if node.is_block_list:
        yield node
        return
    for child in node.children.values():
        yield from block_lists(child)


def blocks_of(node: ModuleNode) -> Iterator[ModuleNode]:
    """Yield the repeated blocks of a model, in execution order."""
    is_list = node.is_block_list  # it looks at all children, so it is asked once
    for key, child in node.children.items():
        if is_list and is_index(key):
            yield child
        else:
            yield from blocks_of(child)


def key_above(name: str, keys: Collection[str]) -> str | None:
    """Return the key of a device map that covers a tensor or module: itself, or one whose name its name begins with."""
    while name not in keys:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name


def rows_of(shape: Sequence[int]) -> int:
    """Return the rows of a matrix `[out, in]`, or of a stack of them, by its stored shape, packed or not.

    Vectors, convolutions and other tensors with short last dimensions have none. Rows longer than those of wide
    matrices count as several: they are no faster (16-bit ones of 8,192 elements 15 GB/s, of 4,096 16).
    """
    return prod(shape[:-1]) * -(-shape[-1] // WIDE_ROW) if len(shape) > 1 and shape[-1] >= _SHORTEST_ROW else 0


def is_index(key: str) -> bool:
    """Return whether a part of a name is the number of a module in a list."""
    return key.isdecimal() and key.isascii() and len(key) < 10


class _Tree:
    """Tensors of a model, and columns of what is asked about ranges of their sorted names."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors
        self.ranges = ranges_of(tensors)

    @cached_property
    def forms(self) -> list[StoredForm]:
        return list(map(forms_of(self.tensors).__getitem__, self.ranges.names))

    @cached_property
    def element_sums(self) -> list[int]:
        return [0, *accumulate([form.num_elements for form in self.forms])]

    @cached_property
    def row_sums(self) -> list[int]:
        return [0, *accumulate([rows_of(form.shape) for form in self.forms])]


class _StoredModule(ModuleNode):
    """A module as a range of sorted names, whose parts are looked up when they are first asked for.

    Most modules of a large model are inside experts, which a plan does not look into.
    """

    __slots__ = ("_prefix", "_start", "_stop", "_tree")

    def __init__(self, tree: _Tree, prefix: str, start: int, stop: int) -> None:
        """Take the module whose name and a dot are `prefix`; the names of its tensors are at `start` to `stop`."""
        super().__init__(prefix[:-1], tree.ranges.num_bytes(start, stop))
        self._tree, self._prefix, self._start, self._stop = tree, prefix, start, stop

    @property
    def num_tensors(self) -> int:
        return self._stop - self._start

    @property
    def num_elements(self) -> int:
        return self._tree.element_sums[self._stop] - self._tree.element_sums[self._start]

    @property
    def num_rows(self) -> int:
        return self._tree.row_sums[self._stop] - self._tree.row_sums[self._start]

    @property
    def contents(self) -> Contents:
        start, stop, below = self._start, self._stop, len(self._prefix)
        return tuple([name[below:] for name in self._tree.ranges.names[start:stop]]), tuple(
            self._tree.forms[start:stop]
        )

    def all_tensors(self) -> Iterator[TensorInfo]:
        """Yield the tensors of the subtree, in execution order, and keep no module that was not looked at before."""
        tensors, children = self._parts or self._look_up()
        yield from tensors
        for child in children.values():
            yield from child.all_tensors()

    def _found(self) -> Parts:
        if self._parts is None:
            self._parts = self._look_up()
        return self._parts

    def _look_up(self) -> Parts:
        """Return the tensors and children of a module.

        A tensor `x.weight` that stands beside `x.weight.absmax` (quantised weights) goes to a node `x.weight`, which is
        no module of the model. Where a module has nothing else below it, all of them go back to the module. Elsewhere
        they stay a node, because the parameters of a module that is cut into units are keys of the device map, and none
        may be below another.
        """
        tree, prefix = self._tree, self._prefix
        own, inside = dict[str, int](), dict[str, tuple[int, int]]()
        names, position = tree.ranges.names, self._start
        while position < self._stop:
            key, dot, _ = names[position][len(prefix) :].partition(".")
            end = tree.ranges.end(f"{prefix}{key}", position, self._stop) if dot else position + 1
            if dot:
                inside[key] = (position, end)
            else:
                own[key] = position
            position = end
        handed = own.keys() & inside.keys()
        if not inside or (prefix and len(handed) == len(inside)):
            return self._stored(names[self._start : self._stop]), {}
        children: Children = {
            key: self._handed(own[key], *inside[key])
            if key in handed
            else _StoredModule(tree, f"{prefix}{key}.", *inside[key])
            for key in in_execution_order(tuple(inside))
        }
        return self._stored(names[at] for key, at in own.items() if key not in handed), children

    def _handed(self, own: int, start: int, stop: int) -> ModuleNode:
        """Return the node of the tensor at `own` and of those at `start` to `stop`, which stand below it."""
        names = self._tree.ranges.names
        return ModuleNode.of(names[own], self._stored([names[own], *names[start:stop]]))

    def _stored(self, names: Iterable[str]) -> tuple[TensorInfo, ...]:
        return tuple(map(self._tree.tensors.__getitem__, names))


class _Stage(IntEnum):
    """Order in which siblings run, earliest first."""

    TOWER = auto()
    BRIDGE = auto()
    EMBEDDING = auto()
    FIRST_NORM = auto()
    ENCODER = auto()
    BLOCKS = auto()
    NORM = auto()
    EXIT = auto()
    HEAD = auto()


# Asked in this order, because names combine the words: `embed_out` is a head, `visual_projection` no vision tower.
_STAGE_OF_WORD: tuple[tuple[_Stage, tuple[str, ...]], ...] = (
    (_Stage.HEAD, ("embed_out", "classifier", "qa_outputs", "score", "pooler", "mtp", "text_projection")),
    (_Stage.EXIT, ("project_out", "merger", "global_transformer", "output_hypernetworks")),
    (_Stage.BRIDGE, ("projector", "projection", "connector", "qformer", "resampler", "abstractor", "aligner")),
    (_Stage.NORM, ("post_tile", "final_")),
    (_Stage.TOWER, ("vision", "visual", "image", "audio", "speech", "feature_extractor")),
    (_Stage.EMBEDDING, ("embed", "wte", "wpe", "project_in")),
    (_Stage.NORM, ("norm", "ln_f")),
    (_Stage.ENCODER, ("encoder",)),
)
_STAGE_OF_NAME = {
    "cls": _Stage.HEAD,
    "head": _Stage.HEAD,
    "output": _Stage.HEAD,
    "output_layer": _Stage.HEAD,
    "proj_out": _Stage.HEAD,
    "talker": _Stage.HEAD,
    "token2wav": _Stage.HEAD,
    "mlp1": _Stage.BRIDGE,
    "shared": _Stage.EMBEDDING,
    # Components of a pipeline of diffusers: what decodes latents runs after what denoises them, and checkers last.
    **dict.fromkeys(("vae", "audio_vae", "video_vae", "movq", "vqvae", "vqgan"), _Stage.EXIT),
    **dict.fromkeys(("vocoder", "safety_checker"), _Stage.HEAD),
    **dict.fromkeys(("pre_layrnorm", "pre_layernorm", "layernorm_pre", "ln_pre", "norm_pre"), _Stage.FIRST_NORM),
}


def execution_order(key: str) -> tuple[int, int, str]:
    """Sort key of a module among its siblings: towers, projectors, embeddings, encoder, blocks, norms, heads.

    >>> sorted(["lm_head", "layers", "norm", "embed_tokens"], key=execution_order)
    ['embed_tokens', 'layers', 'norm', 'lm_head']
    >>> sorted(["10", "2"], key=execution_order)
    ['2', '10']
    """
    if is_index(key):
        return _Stage.BLOCKS, int(key), key
    if numbered := _MODULE_FOLDER.fullmatch(key):
        return _Stage.HEAD, int(numbered[1]), key
    return _stage(key), -1, key


_MODULE_FOLDER = re.compile(r"(\d+)_[A-Z]\w*")
"""A module of sentence-transformers beside the transformer, such as `2_Dense`."""


@lru_cache(maxsize=10_000)
def in_execution_order(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of siblings in the order in which a forward pass needs them; see `execution_order`.

    A merger runs at the end of the tower that holds it, but right after the tower that it stands beside. Projections
    of towers that are compared (CLIP's) run after both.
    """
    has_tower = any(_stage(key) is _Stage.TOWER for key in keys)

    def order(key: str) -> tuple[int, int, str]:
        if has_tower and "merger" in key:
            return _Stage.BRIDGE, -1, key
        if key.endswith("_projection") and "text_projection" in keys:
            return _Stage.HEAD, -1, key
        return execution_order(key)

    return tuple(sorted(keys, key=order))


@lru_cache(maxsize=10_000)
def _stage(key: str) -> _Stage:
    lower = key.lower()
    if lower in _STAGE_OF_NAME:
        return _STAGE_OF_NAME[lower]
    if lower.endswith(("_head", "_heads")):
        return _Stage.HEAD
    return next((stage for stage, words in _STAGE_OF_WORD if any(word in lower for word in words)), _Stage.BLOCKS)
