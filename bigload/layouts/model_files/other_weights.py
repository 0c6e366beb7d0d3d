"""Weight files beside a checkpoint that are none of its shards: copied, left out with a reason, or refused.

Parts of a model may have files of their own: `2_Dense/model.safetensors` of sentence-transformers, `sparse_linear.pt`,
an adapter. A reader of the output needs them, so none is left out silently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path

from bigload.checkpoint.formats.registry import LegacyFileError, read_shard_header, weight_suffixes
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.errors import InvalidCheckpointError, OptionError
from bigload.units import counted, format_size

FOREIGN_SUFFIXES = frozenset({".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".dat", ".ot", ".tflite"})
MAX_CARRIED_BYTES = 5 * 10**9
"""Of all other weights together. More is rarely part of a model: `original/` of a llama is all of it once more."""

_MAX_ENTRIES = 100_000
"""Of one folder."""

_TRAINING_STATE = ("optimizer", "scheduler", "scaler", "rng_state", "random_states", "training_args")


class LeftOut(StrEnum):
    """Reason for not copying a file."""

    COPY = "the same weights in another file"
    FOREIGN = "weights in the format of another framework"
    FORM = "another form of the same weights"
    TRAINING = "the state of a training"
    LARGE = f"weights beside the checkpoint of more than {format_size(MAX_CARRIED_BYTES)} in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWeights:
    """The weight files in the folder of a checkpoint that are none of its shards, by their paths in it.

    Attributes:
        carried: Files that the output needs, copied unchanged.
        left: Files that are not copied, and the reason.
    """

    carried: tuple[str, ...] = ()
    left: Mapping[str, LeftOut] = field(default_factory=dict)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for the copied files, and one for each reason for leaving files out."""
        if self.carried:
            yield f"{counted(len(self.carried), 'other weight file')} copied unchanged, {self.carried[0]} for one"
        for reason in LeftOut:
            names = [name for name, why in self.left.items() if why is reason]
            if names:
                yield f"{counted(len(names), 'file')} not written: {reason}, {names[0]} for one"


def is_weight_file(path: Path) -> bool:
    """Return whether the name of `path` is that of a file of weights, of whatever framework."""
    return path.suffix in (*weight_suffixes(), ".ckpt") or path.suffix in FOREIGN_SUFFIXES


def other_weights(checkpoint: Checkpoint, *, taken: Collection[str]) -> OtherWeights:
    """Return the other weight files in the checkpoint's folder. Reads headers, no data.

    A file is another copy of the checkpoint if at least half of its tensors have names of the checkpoint. If the
    caller named a file or an index rather than the folder, no other files are looked at. `taken` are first parts of
    paths that the output has for itself.
    """
    if Path(checkpoint.path).is_file():
        return OtherWeights()
    own = {shard.file for shard in checkpoint.shards}
    carried: dict[str, int] = {}
    left: dict[str, LeftOut] = {}
    problems: list[str] = []
    for path in _weight_files(checkpoint.root):
        name = path.relative_to(checkpoint.root).as_posix()
        if name in own:
            continue
        if path.suffix in FOREIGN_SUFFIXES or path.name.startswith(_TRAINING_STATE) or path.suffix == ".distcp":
            left[name] = LeftOut.FOREIGN if path.suffix in FOREIGN_SUFFIXES else LeftOut.TRAINING
            continue
        place = resolve_shard(checkpoint.root, name)
        if isinstance(place, str) or not place.is_file():
            problems.append(f"{name} {place if isinstance(place, str) else 'is no file that can be read'}")
        elif _is_copy(place, name, checkpoint):
            left[name] = LeftOut.COPY
        elif name.partition("/")[0] in taken:
            problems.append(f"{name} is in the place of a file that the output needs")
        else:
            carried[name] = place.stat().st_size
    total = sum(carried.values())
    if total > MAX_CARRIED_BYTES:
        limit = format_size(MAX_CARRIED_BYTES)
        problems += [
            f"{name} has {format_size(size)}, expected {limit} at most in all" for name, size in carried.items()
        ]
    if problems:
        named = checkpoint.root / (checkpoint.index_file or checkpoint.shards[0].file)
        raise OptionError(
            f"{checkpoint.root} has weight files beside the checkpoint that cannot be carried along",
            details=problems,
            hint=f"to write the checkpoint without them, name it instead of its folder: {named}",
        )
    return OtherWeights(carried=tuple(carried), left=left)


def _weight_files(root: Path) -> Iterator[Path]:
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            # Of a linked folder too, which may lead to anything: resolve_shard says whether a file stays inside.
            found = islice(entry.rglob("*"), _MAX_ENTRIES)
            yield from sorted(path for path in found if is_weight_file(path) and not path.is_dir())
        elif is_weight_file(entry):
            yield entry


def _is_copy(place: Path, name: str, checkpoint: Checkpoint) -> bool:
    try:
        names = set(read_shard_header(place, name).tensors)
    except (InvalidCheckpointError, LegacyFileError):  # what it holds is not known, so it may be needed
        return False
    return bool(names) and 2 * len(names & checkpoint.tensors.keys()) >= len(names)
