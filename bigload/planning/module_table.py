"""A model in a screenful: the module tree with repeated blocks folded into one row, "80 alike"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.planning.model.module_tree import Contents, ModuleNode, is_index


class OutlineRow(NamedTuple):
    """One row: a module, or `num_alike` modules of the same form taken together. `depth` is 0 at the top.

    `is_last` says for every level down to the row's own whether it is the last there; tables draw branches from it.
    """

    label: str
    depth: int
    num_alike: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    is_last: tuple[bool, ...]


def outline(root: ModuleNode, *, max_depth: int) -> tuple[OutlineRow, ...]:
    """Return the rows of the tree below `root`, at most `max_depth` levels, in execution order.

    Numbered children of one form become one row. When all of a module's children are of one form, that row is the
    module's own, and what follows are the parts of one of them, added up over all.
    """
    return tuple(_below([root], max_depth=max_depth, ancestors=()))


class _Group(NamedTuple):
    """Modules shown as one row; `parts` are those whose children the rows below show."""

    label: str
    members: Sequence[ModuleNode]
    parts: Sequence[ModuleNode]
    num_alike: int


def _below(nodes: Sequence[ModuleNode], *, max_depth: int, ancestors: tuple[bool, ...]) -> Iterator[OutlineRow]:
    if len(ancestors) == max_depth:
        return
    groups = list(_groups(nodes))
    for index, group in enumerate(groups):
        is_last = (*ancestors, index == len(groups) - 1)
        yield OutlineRow(
            label=group.label,
            depth=len(ancestors),
            num_alike=group.num_alike,
            num_tensors=sum(node.num_tensors for node in group.members),
            num_parameters=sum(node.num_elements for node in group.members),
            num_bytes=sum(node.num_bytes for node in group.members),
            is_last=is_last,
        )
        yield from _below(group.parts, max_depth=max_depth, ancestors=is_last)


def _groups(nodes: Sequence[ModuleNode]) -> Iterator[_Group]:
    """Yield the rows directly below `nodes`, which are alike and are shown as one."""
    keys = dict.fromkeys(key for node in nodes for key in node.children)
    numbered = [key for key in keys if is_index(key)]
    norms = [key for key in keys if _is_norm(key) and not any(node.children[key].children for node in nodes)]
    for key in keys:
        members = [node.children[key] for node in nodes if key in node.children]
        if key in numbered and len(numbered) > 1:
            if key == numbered[0]:
                yield from _numbered_groups(nodes, numbered)
        elif key in norms and len(norms) > 1:
            if key == norms[0]:
                merged = [node.children[norm] for norm in norms for node in nodes if norm in node.children]
                yield _Group(f"{len(norms)} norms", merged, (), 1)
        else:
            yield _named_group(key, members)
    for name, tensors in _own_tensors(nodes).items():
        if not nodes[0].name or nodes[0].children:
            yield _Group(name, [ModuleNode.of(name, tensors)], (), 1)


def _named_group(key: str, members: Sequence[ModuleNode]) -> _Group:
    numbered = [child for name, child in members[0].children.items() if is_index(name)]
    if len(numbered) == len(members[0].children) > 1 and _are_alike(numbered):
        blocks = [child for member in members for child in member.children.values()]
        return _Group(f"{key} ({len(numbered)} alike)", members, blocks, len(numbered))
    return _Group(key, members, members, 1)


def _numbered_groups(nodes: Sequence[ModuleNode], keys: Sequence[str]) -> Iterator[_Group]:
    by_contents: dict[Contents, list[str]] = {}
    for key in keys:
        first = next(node.children[key] for node in nodes if key in node.children)
        by_contents.setdefault(first.contents, []).append(key)
    for alike in by_contents.values():
        members = [node.children[key] for node in nodes for key in alike if key in node.children]
        suffix = f" ({len(alike)} alike)" if len(alike) > 1 else ""
        yield _Group(ranges([int(key) for key in alike]) + suffix, members, members, len(alike))


def ranges(numbers: Sequence[int], *, max_runs: int = 3) -> str:
    """Return ascending numbers as runs.

    >>> ranges([0, 1, 2, 5, 7, 8]), ranges([0, 2, 4, 6, 8])
    ('0-2, 5, 7-8', '0, 2, 4, …')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join([*texts[:max_runs], "…"] if len(texts) > max_runs else texts)


def folded_names(modules: Sequence[str]) -> str:
    """Return module names the short way, runs of blocks folded.

    >>> folded_names(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"])
    'embed_tokens, layers 0-2, lm_head'
    >>> folded_names(["layers.0.mlp.experts", "layers.1.mlp.experts", "layers.2.attn", "layers.2.norm"])
    'layers 0-1 mlp.experts, layers 2 (2 parts)'
    """
    blocks = [
        (name, number, tuple(part for _, _, part in members))
        for (name, number), members in groupby(map(_block_of, modules), key=itemgetter(0, 1))
    ]
    # Neighbours with the same difference of number and place follow each other in their list.
    runs = groupby(enumerate(blocks), key=lambda at: (at[1][0], at[1][2], at[1][1] is not None and at[1][1] - at[0]))
    texts = []
    for (name, parts, _), run in runs:
        numbers = [number for _, (_, number, _) in run if number is not None]
        words = [name.removeprefix("model.").removeprefix("transformer."), ranges(numbers)]
        words.append(parts[0] if len(parts) == 1 else f"({len(parts)} parts)")
        texts.append(" ".join(filter(None, words)))
    return ", ".join(texts)


def _block_of(module: str) -> tuple[str, int | None, str]:
    """Return the list, the number and the rest of a name: `layers`, 3, `mlp.gate`."""
    words = module.split(".")
    for place, word in enumerate(words[1:], start=1):
        if is_index(word):
            return ".".join(words[:place]), int(word), ".".join(words[place + 1 :])
    return module, None, ""


def _are_alike(nodes: Sequence[ModuleNode]) -> bool:
    return len({node.num_bytes for node in nodes}) == 1 and len({node.contents for node in nodes}) == 1


def _own_tensors(nodes: Sequence[ModuleNode]) -> dict[str, list[TensorInfo]]:
    own: dict[str, list[TensorInfo]] = {}
    for node in nodes:
        for tensor in node.tensors:
            own.setdefault(tensor.name.rpartition(".")[2], []).append(tensor)
    return own


def _is_norm(key: str) -> bool:
    return "norm" in key or key.startswith("ln_")
