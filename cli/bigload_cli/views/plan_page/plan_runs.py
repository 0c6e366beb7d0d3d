"""A plan cut into what a picture of it shows: modules in the order in which they run, runs of blocks taken together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from bigload.devices import Device
from bigload.plain_text import printable
from bigload.planning.model.module_tree import execution_order, is_index
from bigload.planning.model.units import Part, Unit, UnitKind
from bigload.planning.module_table import ranges
from bigload.planning.planner import PlanDetails

MAX_RUNS = 120
"""Of one device; a model has a handful, and a file of 92 000 modules without any blocks is still to have a picture."""

_LONGEST_NAME = 100
_MOST_STRETCHES = 20
"""Of numbers in one name, `0-8, 69-79`."""


class Kind(StrEnum):
    """Purpose of a module, as far as its name tells."""

    EMBEDDING = "embeddings"
    BLOCK = "blocks"
    EXPERTS = "routed experts"
    HEAD = "norms and heads"
    OTHER = "other modules"


_KIND_OF_STAGE = {
    execution_order(word)[0]: kind
    for word, kind in (
        ("embed_tokens", Kind.EMBEDDING),
        ("ln_pre", Kind.HEAD),
        ("norm", Kind.HEAD),
        ("lm_head", Kind.HEAD),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPiece:
    """A module, or several parts of one block that are together.

    Attributes:
        family: What pieces of one run have in common: the list of their blocks, and which parts of a block they are.
        number: Of the block in its list; `None` for any other module.
        step: Which step of a forward pass it belongs to; routed experts share that of their block.
    """

    family: tuple[str, str]
    number: int | None
    kind: Kind
    num_bytes: int
    home: Device
    runs_on: Device
    step: int

    @property
    def name(self) -> str:
        """Name in figures and tables."""
        return family_name(self.family, [] if self.number is None else [self.number])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Pieces that follow each other on a device and are shown together."""

    name: str
    kind: Kind
    pieces: tuple[UnitPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Weights of all its pieces."""
        return sum(piece.num_bytes for piece in self.pieces)


def pieces_of(details: PlanDetails) -> tuple[UnitPiece, ...]:
    """Return the pieces of a model in execution order; together they hold all bytes that have a device.

    A block whose routed experts are on the device of its other parts is one piece, as if it had never been cut.
    """
    placement, sparse = details.solution.placement, details.structure.experts
    pieces: list[UnitPiece] = []
    step = -1
    for unit, home, device in zip(details.solution.problem.units, placement.devices, placement.running, strict=True):
        step += not unit.is_routed
        for piece in _pieces(unit, sparse, home=home, runs_on=device, step=max(step, 0)):
            place = _same_block(piece, pieces) if unit.is_routed else None
            if place is None:
                pieces.append(piece)
            else:
                block = pieces[place]
                whole = (block.family[0], "")
                pieces[place] = replace(block, family=whole, num_bytes=block.num_bytes + piece.num_bytes)
    return tuple(pieces)


def label_of(unit: Unit, sparse: Container[str]) -> tuple[tuple[str, str], int | None, Kind]:
    """Return the family, the number and the kind of the heaviest piece of a unit, by which a picture knows it."""
    nowhere = Device("cpu")
    pieces = _pieces(unit, sparse, home=nowhere, runs_on=nowhere, step=0)
    heaviest = max(pieces, key=lambda piece: piece.num_bytes)
    return heaviest.family, heaviest.number, heaviest.kind


def _same_block(experts: UnitPiece, pieces: Sequence[UnitPiece]) -> int | None:
    """Return the place of the other parts of a block among the pieces of this step that are on the same device."""
    for place in range(len(pieces) - 1, -1, -1):
        piece = pieces[place]
        if piece.step != experts.step:
            return None
        if (piece.family[0], piece.number, piece.home) == (experts.family[0], experts.number, experts.home):
            return place
    return None


def runs_of(pieces: Iterable[UnitPiece]) -> tuple[Run, ...]:
    """Return pieces of one device as runs, `MAX_RUNS` at most: beyond that neighbours are taken together.

    Blocks of one list that follow each other on the device are a run, whether or not others, which are elsewhere, run
    between them.
    """
    runs = []
    for (family, kind, is_numbered), members in groupby(pieces, key=_run_key):
        together = tuple(members)
        if is_numbered:
            numbers = [piece.number for piece in together if piece.number is not None]
            runs.append(Run(name=family_name(family, numbers), kind=kind, pieces=together))
        else:
            runs.extend(Run(name=piece.name, kind=kind, pieces=(piece,)) for piece in together)
    if len(runs) <= MAX_RUNS:
        return tuple(runs)
    each = -(-len(runs) // MAX_RUNS)
    return tuple(_merged(runs[start : start + each]) for start in range(0, len(runs), each))


def family_name(family: tuple[str, str], numbers: Sequence[int]) -> str:
    """Return the name of blocks, or of parts of them, by their numbers: `layers 0-31`, `layers 3-50 mlp.experts`."""
    words = [_bounded(family[0]), ranges(sorted(numbers), max_runs=_MOST_STRETCHES), _bounded(family[1])]
    return " ".join(word for word in words if word)


def short(name: str) -> str:
    """Return a name without the word that nearly every model begins with."""
    return name.removeprefix("model.").removeprefix("transformer.")


def _run_key(piece: UnitPiece) -> tuple[tuple[str, str], Kind, bool]:
    return piece.family, piece.kind, piece.number is not None


def _merged(runs: Sequence[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]
    pieces = tuple(piece for run in runs for piece in run.pieces)
    heaviest = max(runs, key=lambda run: run.num_bytes)
    return Run(name=f"{runs[0].name} … {runs[-1].name}", kind=heaviest.kind, pieces=pieces)


def _pieces(unit: Unit, sparse: Container[str], *, home: Device, runs_on: Device, step: int) -> Iterator[UnitPiece]:
    """Yield the pieces of a unit: parts of one block together, every other part alone."""
    placed = [(*_block_of(part.name, sparse), part) for part in unit.parts]
    for (blocks, number, is_held), members in groupby(placed, key=lambda found: (*found[:2], found[-1].is_held)):
        *_, rests, parts = zip(*members, strict=True)
        is_sparse = f"{blocks}.{number}" in sparse and not unit.is_routed
        yield UnitPiece(
            family=(blocks, _rest(rests, is_sparse=is_sparse)),
            number=number,
            kind=Kind.EXPERTS if unit.is_routed else _kind(parts, is_sparse=is_sparse),
            num_bytes=sum(part.num_bytes for part in parts),
            home=runs_on if is_held else home,
            runs_on=runs_on,
            step=step,
        )


def _rest(rests: Sequence[str], *, is_sparse: bool) -> str:
    """Return which parts of a block there are; nothing for a whole one."""
    if len(rests) == 1:
        return rests[0]
    return "without routed experts" if is_sparse else f"({len(rests)} parts)"


def _kind(parts: Sequence[Part], *, is_sparse: bool) -> Kind:
    if is_sparse or len(parts) > 1 or parts[0].kind is UnitKind.BLOCK:
        return Kind.BLOCK
    words = [word for word in parts[0].name.split(".") if word not in ("weight", "bias") and not is_index(word)]
    return _KIND_OF_STAGE.get(execution_order(words[-1])[0], Kind.OTHER) if words else Kind.OTHER


def _block_of(name: str, sparse: Container[str]) -> tuple[str, int | None, str]:
    """Return list, number and part of a name: `layers`, 3, `mlp.gate`.

    The number is that of the block with routed experts which it is in, otherwise the last in the name.
    """
    words = name.split(".")
    places = [place for place in range(1, len(words)) if is_index(words[place])]
    if not places:
        return name, None, ""
    blocks = (place for place in places if ".".join(words[: place + 1]) in sparse)
    place = next(blocks, places[-1])
    return ".".join(words[:place]), int(words[place]), ".".join(words[place + 1 :])


def _bounded(name: str) -> str:
    """Return a name that can be shown; of one that is far too long, both ends."""
    shown = printable(name)
    half = _LONGEST_NAME // 2
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[:half]}…{shown[-half:]}"
