"""One folder per tensor-parallel rank, so that each rank reads its own file and nothing else.

out/config.json ...                     of the model; the root is no checkpoint, it has no index
out/rank-0/config.json                  a copy of it
out/rank-0/model.safetensors            what rank 0 holds, each tensor under its name; or numbered files and an index
out/rank-1/model.safetensors
out/ranks.json                          how every tensor is divided (docs/schemas/ranks-1.0.json); written last

A rank's folder is a checkpoint for every reader of safetensors, of tensors that are slices. Its `config.json` is a copy
of the model's, and describes the whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.documents import DocumentError, check_schema, parse_json, read_file
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, Problem
from bigload.layouts.layout import LayoutRequest, OutputLayout, base_name, index_of, one_or_numbered, split
from bigload.layouts.output import Output, OutputTensor
from bigload.loading.slices import Slice
from bigload.planning.plan import Plan, PlanNote
from bigload.planning.tensor_parallel.division import MAX_RANKS, Division, Range
from bigload.planning.tensor_parallel.partition import Partition, partition
from bigload.planning.tensor_parallel.rules import read_tp_rules
from bigload.units import MIB

RANKS_FILE = "ranks.json"
SCHEMA = "bigload.ranks/1.0"
MAX_DOCUMENT_BYTES = 512 * MIB
"""Some thousand bytes for each of the 100 000 tensors that the largest models have."""

_HOW = "make one with: bigload reshard CHECKPOINT OUT --layout ranks --tp N"


def rank_folder(rank: int) -> str:
    """Return the name of the folder of `rank`."""
    return f"rank-{rank}"


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of `tp` ranks, each with its part of every tensor, in the order in which a load needs them.

    Files with the same number have the same tensors, and follow each other: what is read for one rank is still cached
    for the next. `tp_rules`, words by pattern or a file of them, go before those of the model's type.

    Raises:
        PartitionError: see `read_tp_rules` and `partition`, both of `bigload.planning`.
    """
    checkpoint, options = request.checkpoint, request.options
    assert options.tp is not None, "required_options"
    rules = options.tp_rules
    words = read_tp_rules(rules) if isinstance(rules, str | Path) else rules
    divided = partition(checkpoint, tp=options.tp, rules=words)
    tensors = request.in_execution_order()
    # The first rank has the largest pieces (torch.chunk), so what fits into its files fits into those of all.
    groups = split([_part(tensor, divided, 0) for tensor in tensors], options.max_shard_bytes)
    base = base_name(checkpoint)
    by_rank = [
        one_or_numbered(
            [[_part(tensor, divided, rank) for tensor in group] for group in groups],
            folder=rank_folder(rank),
            base=base,
        )
        for rank in range(options.tp)
    ]
    documents: dict[str, bytes] = {}
    for rank, files in enumerate(by_rank):
        if len(files) > 1:
            documents |= index_of(files, rank_folder(rank), base=base)
    documents[RANKS_FILE] = _document(divided, {tensor.name: tensor for tensor in tensors})
    return Output(
        files=tuple(file for same_number in zip(*by_rank, strict=True) for file in same_number),
        documents=documents,
        notes=tuple(note.text for note in divided.notes),
    )


def _part(tensor: OutputTensor, divided: Partition, rank: int) -> OutputTensor:
    division = divided.divisions[tensor.name]
    dim = division.dim
    parts = () if dim is None else tuple(Slice(dim, start, stop) for start, stop in division.ranges[rank])
    return replace(tensor, parts=parts)


def _document(divided: Partition, wholes: Mapping[str, OutputTensor]) -> bytes:
    """Return the text of `ranks.json`, a line for each tensor."""
    head = {"schema": SCHEMA, "tp": divided.tp, "notes": [{"code": n.code, "text": n.text} for n in divided.notes]}
    entries = (
        f"    {_json(name)}: {_json(_entry(division, wholes[name]))}" for name, division in divided.divisions.items()
    )
    text = "{\n" + "".join(f"  {_json(key)}: {_json(value)},\n" for key, value in head.items())
    return (text + '  "tensors": {\n' + ",\n".join(entries) + "\n  }\n}\n").encode()


def _entry(division: Division, whole: OutputTensor) -> dict[str, object]:
    entry: dict[str, object] = {"dtype": whole.dtype.name, "shape": list(whole.shape), "dim": division.dim}
    return entry if division.dim is None else {**entry, "ranges": division.ranges}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    template = out.replace("{", "{{").replace("}", "}}") + "/rank-{r}"
    return f"in Python, on rank r: bigload.load(f{template!r})"


LAYOUT = OutputLayout(
    lay_out=lay_out,
    own_options=("tp", "tp_rules"),
    takes_names=False,
    required_options={"tp": "the number of ranks"},
    recorded_options=("tp",),
    next_step=_next_step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFolder:
    """A folder of the layout `ranks`, as its `ranks.json` describes it.

    Attributes:
        shapes: Of every whole tensor by name.
        divisions: What each rank holds of it, by name.
        notes: What is worth knowing about the division.
    """

    root: Path
    tp: int
    shapes: Mapping[str, tuple[int, ...]]
    divisions: Mapping[str, Division]
    notes: tuple[PlanNote, ...] = ()

    def checkpoint(self, rank: int) -> Checkpoint:
        """Open the checkpoint of `rank`, whose tensors are its parts of the whole ones.

        Raises:
            ValueError: there is no such rank.
            CheckpointNotFoundError, InvalidCheckpointError: its folder is not there, or does not hold what
                `ranks.json` says.
        """
        if not 0 <= rank < self.tp:
            raise ValueError(f"rank {rank} of {self.tp}")
        folder = self.root / rank_folder(rank)
        if folder.is_symlink():
            raise _invalid(folder, [("link", "it is a link; a rank's folder lies in the folder of its layout")])
        opened = open_checkpoint(folder)
        problems = [("missing-tensor", f"{name!r:.200} is not in it") for name in self.shapes.keys() - opened.tensors]
        problems += [
            ("unknown-tensor", f"{name!r:.200} is not divided") for name in opened.tensors.keys() - self.shapes
        ]
        for name, tensor in opened.tensors.items():
            if name in self.shapes:
                shape = self.divisions[name].shape(self.shapes[name], rank)
                if tensor.shape != shape:
                    found, expected = list(tensor.shape), list(shape)
                    problems.append(("wrong-shape", f"{name!r:.200} has shape {found}, expected {expected}"))
        if problems:
            raise _invalid(folder, sorted(problems))
        return opened


def read_ranks(folder: str | Path) -> RanksFolder:
    """Read what `ranks.json` in `folder` says; the files of the ranks are not opened.

    Ranges are checked: they lie within their dimension, and all ranks together hold every element.

    Raises:
        CheckpointNotFoundError: there is no such file.
        InvalidCheckpointError: it is no description of ranks, of another major version, or contradicts itself.
    """
    path = Path(folder) / RANKS_FILE
    document = _read(path)
    tp = document.get("tp")
    if not _is_count(tp) or not 1 <= tp <= MAX_RANKS:  # type: ignore[operator]
        raise _invalid(path, [("bad-ranks", f'"tp" is {tp!r:.50}, expected 1 to {MAX_RANKS}')])
    assert isinstance(tp, int)
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise _invalid(path, [("bad-ranks", 'expected "tensors": {name: {"shape": ..., "dim": ...}, ...}')])
    shapes: dict[str, tuple[int, ...]] = {}
    divisions: dict[str, Division] = {}
    problems = []
    for name, entry in tensors.items():
        try:
            shapes[name], divisions[name] = _parsed(entry, tp)
        except ValueError as error:
            problems.append(("bad-ranks", f"tensor {name!r:.200}: {error}"))
    if problems:
        raise _invalid(path, problems)
    return RanksFolder(
        root=Path(folder),
        tp=tp,
        shapes=shapes,
        divisions=divisions,
        notes=_notes(document.get("notes")),
    )


def _read(path: Path) -> Mapping[str, object]:
    try:
        document = parse_json(read_file(path, max_bytes=MAX_DOCUMENT_BYTES))
    except IsADirectoryError:
        raise _invalid(path, [("not-a-file", "not a regular file")]) from None
    except OSError as error:
        raise CheckpointNotFoundError(path, error.strerror or str(error), hint=_HOW) from None
    except DocumentError as error:
        code = "bad-ranks" if error.code == "too-large" else error.code
        raise _invalid(path, [(code, str(error))]) from None
    try:
        return check_schema(document, SCHEMA)
    except ValueError as error:
        raise _invalid(path, [("bad-ranks", str(error))]) from None


def _parsed(entry: object, tp: int) -> tuple[tuple[int, ...], Division]:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise ValueError('expected a "shape" of whole numbers')
    dim = entry.get("dim")
    if dim is None:
        return tuple(shape), Division()
    if not _is_count(dim) or dim >= len(shape):
        raise ValueError(f'"dim" is {dim!r:.50} of a shape of {len(shape)}')
    ranges = entry.get("ranges")
    if not isinstance(ranges, list) or len(ranges) != tp or not all(isinstance(parts, list) for parts in ranges):
        raise ValueError(f'expected "ranges" of {tp} ranks')
    division = Division(dim, tuple(tuple(_range(part, shape[dim]) for part in parts) for parts in ranges))
    if not all(division.ranges):
        raise ValueError("a rank has no range, not even an empty one")
    _check_covered(division, shape[dim])
    return tuple(shape), division


def _range(part: object, size: int) -> Range:
    if not isinstance(part, list) or len(part) != 2 or not all(map(_is_count, part)):
        raise ValueError(f"{part!r:.50} is no range")
    start, stop = part
    if not start <= stop <= size:
        raise ValueError(f"range {start} to {stop} of {size} elements")
    return start, stop


def _check_covered(division: Division, size: int) -> None:
    ordered = sorted(part for parts in division.ranges for part in parts)
    reached = 0
    for start, stop in ordered:
        if start > reached:
            break
        reached = max(reached, stop)
    if reached < size:
        raise ValueError(f"no rank holds element {reached} of {size}")
    for parts in division.ranges:
        if any(after[0] < before[1] for before, after in pairwise(sorted(parts))):
            raise ValueError("a rank holds an element twice")


def _notes(found: object) -> tuple[PlanNote, ...]:
    notes = found if isinstance(found, list) else []
    texts = [(note.get("code"), note.get("text")) for note in notes if isinstance(note, dict)]
    return tuple(PlanNote(code=c, text=t) for c, t in texts if isinstance(c, str) and isinstance(t, str))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _invalid(path: Path, problems: Sequence[tuple[str, str]]) -> InvalidCheckpointError:
    found = [Problem(code=code, file=path.name, text=text) for code, text in problems]
    return InvalidCheckpointError(path, found, hint=_HOW)
