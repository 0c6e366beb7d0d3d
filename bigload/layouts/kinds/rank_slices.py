"""One folder per rank, tensor-parallel within pipeline stages, so that each reads its own file and nothing else.

out/config.json ...                     of the model; the root is no checkpoint, it has no index
out/rank-0/config.json                  a copy of it
out/rank-0/model.safetensors            what rank 0 holds, each tensor under its name; or numbered files and an index
out/rank-1/model.safetensors
out/ranks.json                          how every tensor is divided (docs/schemas/ranks-1.0.json); written last

With several stages, rank `stage * tp + n` has the part of tensor-parallel rank n of the tensors of its stage, and
`ranks.json` is of version 2.0, which readers of 1.0 refuse.

A rank's folder is a checkpoint for every reader of safetensors, of tensors that are slices. Its `config.json` is a copy
of the model's, and describes the whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

from bigload.checkpoint.formats.registry import SAFETENSORS
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.documents import DocumentError, check_schema, parse_json, read_file
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, Problem
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout, base_name, index_of, one_or_numbered, split
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.loading.scheduling.slices import Slice
from bigload.machine.files.byte_ranges import merged_ranges
from bigload.planning.model.module_tree import key_above
from bigload.planning.model_parallel.divided_model import DividedModel
from bigload.planning.options import PlanOptions
from bigload.planning.plan import Plan, PlanNote
from bigload.planning.tensor_parallel.division import MAX_RANKS, Division, Range
from bigload.planning.tensor_parallel.partition import Partition, partition
from bigload.planning.tensor_parallel.rules import read_tp_rules
from bigload.planning.workload import Workload
from bigload.units import MIB

RANKS_FILE = "ranks.json"
SCHEMA = "bigload.ranks/1.0"
STAGES_SCHEMA = "bigload.ranks/2.0"
MAX_DOCUMENT_BYTES = 512 * MIB
"""Some thousand bytes for each of the 100 000 tensors that the largest models have."""

_HOW = "make one with: bigload reshard CHECKPOINT OUT --layout ranks --tp N"


def rank_folder(rank: int) -> str:
    """Return the name of the folder of `rank`."""
    return f"rank-{rank}"


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of all ranks, each with its part of every tensor, in the order in which a load needs them.

    Files of a stage with the same number have the same tensors, and follow each other: what is read for one rank is
    still cached for the next. `tp_rules`, words by pattern or a file of them, go before those of the model's type. What
    is below none of the `stages` of a plan is left out.
    """
    options = request.options
    assert options.tp is not None, "required_options"
    divided, stages = _divided(request.checkpoint, options)
    base = base_name(request.checkpoint)
    files: list[OutputFile] = []
    documents: dict[str, bytes] = {}
    tensors = request.in_execution_order()
    by_stage = [tensors] if stages is None else [_of_stage(tensors, modules) for modules in stages]
    divided = divided.noting(request.checkpoint, frozenset(tensor.name for held in by_stage for tensor in held))
    for stage, held in enumerate(by_stage):
        columns = _parts(held, divided)
        # The first rank has the largest pieces (torch.chunk), so what fits into its files fits into those of all.
        groups = split(columns[0], options.max_shard_bytes)
        edges = [*accumulate(map(len, groups), initial=0)]
        by_rank = [
            one_or_numbered(
                [column[start:stop] for start, stop in pairwise(edges)],
                folder=rank_folder(stage * options.tp + rank),
                base=base,
            )
            for rank, column in enumerate(columns)
        ]
        indexes: dict[int, bytes] = {}  # equal for ranks with as many bytes: names and files are the same
        for rank, of_rank in enumerate(by_rank, start=stage * options.tp):
            if len(of_rank) > 1:
                size = sum([tensor.num_bytes for file in of_rank for tensor in file.tensors])
                if size not in indexes:
                    (indexes[size],) = index_of(of_rank, rank_folder(rank), base=base).values()
                documents[f"{rank_folder(rank)}/{base}{SAFETENSORS.index_suffix}"] = indexes[size]
        files += [file for same_number in zip(*by_rank, strict=True) for file in same_number]
    documents[RANKS_FILE] = _document(divided, by_stage)
    return Output(files=tuple(files), documents=documents, notes=tuple(note.text for note in divided.notes))


def _divided(checkpoint: Checkpoint, options: ReshardOptions) -> tuple[Partition, Sequence[Sequence[str]] | None]:
    """Return how ranks divide tensors, and the modules of each stage; `None` for all tensors in one."""
    assert options.tp is not None, "required_options"
    rules = options.tp_rules
    words = read_tp_rules(rules) if isinstance(rules, str | Path) else rules
    if options.stages is not None or (options.pp or 1) == 1:
        return partition(checkpoint, tp=options.tp, rules=words), options.stages
    # without a plan to say what is left out, layers that only predict further tokens are written too
    model = DividedModel.of(checkpoint, options.tp, PlanOptions(keep_extra_layers=True), words)
    return model.divided, model.stages(options.pp or 1, Workload())


def _of_stage(tensors: Iterable[OutputTensor], modules: Sequence[str]) -> list[OutputTensor]:
    names = frozenset(modules)
    return [tensor for tensor in tensors if key_above(tensor.name, names) is not None]


def _parts(tensors: Iterable[OutputTensor], divided: Partition) -> list[list[OutputTensor]]:
    """Return what each rank has of each tensor. Few differ in shape and division, so few are worked out."""
    columns: list[list[OutputTensor]] = [[] for _ in range(divided.tp)]
    known: dict[tuple[int, str, tuple[int, ...]], list[OutputTensor]] = {}
    for whole in tensors:
        division = divided.divisions[whole.name]
        key = id(division), whole.dtype.name, whole.shape
        if key not in known:
            known[key] = [whole if division.dim is None else _cut(whole, division, rank) for rank in range(divided.tp)]
        for column, example in zip(columns, known[key], strict=True):
            column.append(example.of(whole.source))
    return columns


def _cut(tensor: OutputTensor, division: Division, rank: int) -> OutputTensor:
    assert division.dim is not None
    parts = tuple(Slice(division.dim, start, stop) for start, stop in division.ranges[rank])
    return OutputTensor(source=tensor.source, dtype=tensor.dtype, parts=parts)


def _document(divided: Partition, by_stage: Sequence[Sequence[OutputTensor]]) -> bytes:
    """Return the text of `ranks.json`, a line for each tensor."""
    wholes = {tensor.name: tensor for held in by_stage for tensor in held}
    stages: dict[str, list[int]] = {}
    for stage, held in enumerate(by_stage):
        for tensor in held:
            stages.setdefault(tensor.name, []).append(stage)
    head: dict[str, object] = {"schema": SCHEMA, "tp": divided.tp}
    if len(by_stage) > 1:
        head |= {"schema": STAGES_SCHEMA, "pp": len(by_stage)}
    head["notes"] = [{"code": n.code, "text": n.text} for n in divided.notes]
    texts: dict[object, str] = {}  # few differ, and those of an expert's 256 ranks are long
    entries = []
    for name, division in divided.divisions.items():
        if name not in wholes:
            continue
        whole, held_by = wholes[name], tuple(stages[name]) if len(by_stage) > 1 else None
        key = (division, whole.dtype.name, whole.shape, held_by)
        if key not in texts:
            texts[key] = _json(_entry(division, whole, held_by))
        entries.append(f"    {_json(name)}: {texts[key]}")
    text = "{\n" + "".join(f"  {_json(key)}: {_json(value)},\n" for key, value in head.items())
    return (text + '  "tensors": {\n' + ",\n".join(entries) + "\n  }\n}\n").encode()


def _entry(division: Division, whole: OutputTensor, stages: Sequence[int] | None) -> dict[str, object]:
    entry: dict[str, object] = {"dtype": whole.dtype.name, "shape": list(whole.shape), "dim": division.dim}
    entry |= {} if division.dim is None else {"ranges": division.ranges}
    return entry if stages is None else {**entry, "stages": stages}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    template = out.replace("{", "{{").replace("}", "}}") + "/rank-{r}"
    return f"in Python, on rank r: bigload.load(f{template!r})"


LAYOUT = OutputLayout(
    lay_out=lay_out,
    own_options=("tp", "tp_rules", "pp", "stages"),
    takes_names=False,
    required_options={"tp": "the number of ranks"},
    recorded_options=("tp", "pp"),
    next_step=_next_step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFolder:
    """A folder of the layout `ranks`, as its `ranks.json` describes it.

    Attributes:
        shapes: Of every whole tensor by name.
        divisions: What each rank holds of it, by name.
        notes: What is worth knowing about the division.
        pp: Number of pipeline stages, each of `tp` ranks.
        stages: Those that hold a tensor, by its name; of one stage, none is named.
    """

    root: Path
    tp: int
    shapes: Mapping[str, tuple[int, ...]]
    divisions: Mapping[str, Division]
    notes: tuple[PlanNote, ...] = ()
    pp: int = 1
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def stages_of(self, name: str) -> tuple[int, ...]:
        return self.stages.get(name, (0,))

    def stage(self, stage: int) -> RanksFolder:
        """Return what `stage` holds, for a model that has nothing else.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage < self.pp:
            raise ValueError(f"stage {stage} of {self.pp}")
        held = [name for name in self.shapes if stage in self.stages_of(name)]
        return replace(
            self,
            shapes={name: self.shapes[name] for name in held},
            divisions={name: self.divisions[name] for name in held},
            stages=dict.fromkeys(held, (stage,)),
        )

    def checkpoint(self, rank: int) -> Checkpoint:
        """Open the checkpoint of `rank`, whose tensors are its parts of the whole ones of its stage.

        Raises:
            ValueError: there is no such rank.
            CheckpointNotFoundError, InvalidCheckpointError: its folder is not there, or does not hold what
                `ranks.json` says.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of {self.num_ranks}")
        folder = self.root / rank_folder(rank)
        if folder.is_symlink():
            raise _invalid(folder, [("link", "it is a link; a rank's folder lies in the folder of its layout")])
        opened, stage = open_checkpoint(folder), rank // self.tp
        held = {name for name in self.shapes if stage in self.stages_of(name)}
        problems = [("missing-tensor", f"{name!r:.200} is not in it") for name in held - opened.tensors.keys()]
        problems += [("unknown-tensor", f"{name!r:.200} is not divided") for name in opened.tensors.keys() - held]
        for name, tensor in opened.tensors.items():
            if name in held:
                shape = self.divisions[name].shape(self.shapes[name], rank % self.tp)
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
    tp = _number_of_ranks(path, document, "tp")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict):
        raise _invalid(path, [("bad-ranks", 'expected "tensors": {name: {"shape": ..., "dim": ...}, ...}')])
    pp = _number_of_ranks(path, document, "pp") if _has_stages(document) else 1
    shapes: dict[str, tuple[int, ...]] = {}
    divisions: dict[str, Division] = {}
    stages: dict[str, tuple[int, ...]] = {}
    problems = []
    for name, entry in tensors.items():
        try:
            shapes[name], divisions[name] = _parsed(entry, tp)
            if pp > 1:
                stages[name] = _stages(entry.get("stages"), pp)
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
        pp=pp,
        stages=stages,
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
        return check_schema(document, STAGES_SCHEMA if _has_stages(document) else SCHEMA)
    except ValueError as error:
        raise _invalid(path, [("bad-ranks", str(error))]) from None


def _number_of_ranks(path: Path, document: Mapping[str, object], key: str) -> int:
    found = document.get(key)
    if not isinstance(found, int) or not _is_count(found) or not 1 <= found <= MAX_RANKS:
        raise _invalid(path, [("bad-ranks", f'"{key}" is {found!r:.50}, expected 1 to {MAX_RANKS}')])
    return found


def _has_stages(document: object) -> bool:
    schema = document.get("schema") if isinstance(document, dict) else None
    return str(schema).startswith(f"{STAGES_SCHEMA.partition('.0')[0]}.")


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


def _stages(found: object, pp: int) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(_is_count(stage) and stage < pp for stage in found):
        raise ValueError(f'expected "stages" below {pp}')
    return tuple(found)


def _range(part: object, size: int) -> Range:
    if not isinstance(part, list) or len(part) != 2 or not all(map(_is_count, part)):
        raise ValueError(f"{part!r:.50} is no range")
    start, stop = part
    if not start <= stop <= size:
        raise ValueError(f"range {start} to {stop} of {size} elements")
    return start, stop


def _check_covered(division: Division, size: int) -> None:
    merged = merged_ranges(part for parts in division.ranges for part in parts)
    reached = merged[0][1] if merged and merged[0][0] == 0 else 0
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
