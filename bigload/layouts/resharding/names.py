"""Names and forms under which a reshard writes tensors: those of the files, or those of transformers' models in memory.

Since version 5 transformers renames and fuses tensors when it loads them. A folder that has them in the form in memory
is loaded without that work. The way back is recorded beside them, in `bigload-conversion.json`: what each tensor of the
original form is made of, in the format of `conversion_to_values`, and the shapes of the tensors of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import AssembledTensor, Checkpoint, TensorInfo
from bigload.checkpoint.sources.listings import is_there
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.conversion_file import check_pieces, conversion_from_values, conversion_to_values
from bigload.conversion.derived import derived_conversion, has_transformers_5
from bigload.conversion.inverse import inverse_of
from bigload.conversion.strided_pieces import PiecedTensor
from bigload.documents import MAX_CONFIG_BYTES, DocumentError, check_schema, parse_json
from bigload.errors import NamesUnknownError
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.planning.choices import NameScheme
from bigload.units import counted

CONVERSION_FILE = "bigload-conversion.json"
SCHEMA = "bigload.conversion/1.0"


def named_tensors(checkpoint: Checkpoint, names: NameScheme | None) -> TensorsToWrite:
    """Return the tensors of `checkpoint` under these names; `None` leaves them as they are."""
    if names is None:
        return TensorsToWrite.stored_in(checkpoint)
    recorded = _recorded(checkpoint)
    if names is NameScheme.CHECKPOINT:
        conversion = recorded or _original_of(checkpoint)
    else:
        conversion = _conversion_of(checkpoint) if recorded is None else None
    if conversion is None or _changes_nothing(conversion, checkpoint):
        notes = (f"the tensors have the names of {_WORDS[names]} already",)
        return TensorsToWrite.stored_in(checkpoint, notes=notes)
    way_back = _way_back(conversion, checkpoint)
    tensors = _with_the_rest(conversion, checkpoint)
    return TensorsToWrite.of(
        checkpoint,
        tensors.values(),
        documents={} if names is NameScheme.CHECKPOINT else {CONVERSION_FILE: _document(way_back, tensors)},
        notes=_notes(conversion, checkpoint, names),
    )


_WORDS = {NameScheme.CHECKPOINT: "the original files", NameScheme.TRANSFORMERS: "transformers' models"}


def _conversion_of(checkpoint: Checkpoint) -> Conversion:
    """Return what the tensors in memory are made of."""
    return _checked(derived_conversion(checkpoint), checkpoint)


def _original_of(checkpoint: Checkpoint) -> Conversion | None:
    """Return what the original tensors are made of, if `checkpoint` has those in memory."""
    if not _changes_nothing(_conversion_of(checkpoint), checkpoint):
        return None
    if not has_transformers_5():
        raise NamesUnknownError(
            f"nothing says what the original tensors of {checkpoint.name} are made of",
            hint=f"install transformers, which knows; folders of reshard --names transformers have {CONVERSION_FILE}",
        )
    from bigload.conversion.with_transformers.checkpoints import original_by_transformers

    return _checked(original_by_transformers(checkpoint), checkpoint)


def _checked(conversion: Conversion, checkpoint: Checkpoint) -> Conversion:
    left = set(_left_over(conversion, checkpoint))
    problems = [
        *conversion.problems,
        *(f"{name} is stored, but would be made of other tensors" for name in conversion.tensors if name in left),
    ]
    if problems:
        raise NamesUnknownError(
            f"{checkpoint.name} cannot be converted: {counted(len(problems), 'problem')}",
            details=problems,
            hint="download files again that are incomplete or of several versions of the checkpoint, and check that "
            "config.json is theirs; nothing was written",
        )
    return conversion


def _changes_nothing(conversion: Conversion, checkpoint: Checkpoint) -> bool:
    stored = checkpoint.tensors
    return all(name in stored and tensor == as_stored(stored[name]) for name, tensor in conversion.tensors.items())


def _left_over(conversion: Conversion, checkpoint: Checkpoint) -> list[str]:
    """Return the names of stored tensors that nothing is made of."""
    used = {source for tensor in conversion.tensors.values() for source in tensor.sources}
    return [name for name in checkpoint.tensors if name not in used]


def _with_the_rest(conversion: Conversion, checkpoint: Checkpoint) -> dict[str, TensorInfo | AssembledTensor]:
    """Return what `conversion` makes, and all other stored tensors as they are."""
    stored = checkpoint.stored
    rest = {name: stored[name] for name in _left_over(conversion, checkpoint)}
    return {**conversion.of(checkpoint), **rest}


def _way_back(conversion: Conversion, checkpoint: Checkpoint) -> Conversion:
    """Return what the stored tensors are made of once those of `conversion` are written."""
    stored, tensors = checkpoint.tensors, {}
    for name, tensor in conversion.tensors.items():
        if tensor == as_stored(stored[tensor.sources[0]]):  # also a view of a torch file, which is written row by row
            tensors[name] = PiecedTensor.of(tensor.sources[0], tensor.shape)
        elif all(stored[source].strides is None for source in tensor.sources):
            tensors[name] = tensor
    shapes = {name: each.torch_shape for name, each in stored.items()}
    inverse = inverse_of(tensors, shapes)
    lost = sorted(stored.keys() - inverse.keys() - {*_left_over(conversion, checkpoint)})
    if lost:
        raise NamesUnknownError(
            f"the conversion of {checkpoint.name} uses parts of {counted(len(lost), 'tensor')} only: the rest is lost",
            details=lost,
            hint="keep the stored names",
        )
    finer = {name: shapes[name] for name, tensor in inverse.items() if tensor.shape != shapes[name]}
    return Conversion(tensors=inverse, written_shapes=finer)


def _document(way_back: Conversion, tensors: Mapping[str, TensorInfo | AssembledTensor]) -> bytes:
    used = {source for tensor in way_back.tensors.values() for source in tensor.sources}
    shapes = {name: tensor.torch_shape for name, tensor in tensors.items() if name in used}
    found = {"schema": SCHEMA, "shapes": shapes, **conversion_to_values(way_back)}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _recorded(checkpoint: Checkpoint) -> Conversion | None:
    """Return the way back that an earlier reshard wrote beside the tensors."""
    path = checkpoint.root / CONVERSION_FILE
    if not is_there(path):
        return None
    try:
        found = check_schema(parse_json(read_beside(path, max_bytes=8 * MAX_CONFIG_BYTES)), SCHEMA)
        shapes, conversion = found["shapes"], conversion_from_values(found)
        stored = {name: list(as_stored(tensor).shape) for name, tensor in checkpoint.tensors.items()}
        if not isinstance(shapes, dict):
            raise TypeError('"shapes" is no object')
        problems = [
            f"{name} is {stored.get(name, 'not there')}, expected {shape}"
            for name, shape in shapes.items()
            if stored.get(name) != shape
        ]
        if not problems:
            check_pieces(conversion, shapes)
    except (OSError, DocumentError, ValueError, KeyError, TypeError, IndexError) as error:
        problems = [str(error)]
    if problems:
        raise NamesUnknownError(
            f"{path} is not about the tensors beside it",
            details=problems,
            hint="remove it if other weights have been written into the folder",
        )
    return conversion


def _notes(conversion: Conversion, checkpoint: Checkpoint, names: NameScheme) -> Iterator[str]:
    made = [tensor.sources for name, tensor in conversion.tensors.items() if len(tensor.pieces) > 1]
    text = f"names of {_WORDS[names]}: {counted(len(conversion.tensors), 'tensor')}"
    sources = {source for several in made for source in several}
    yield f"{text}, {len(made)} of them made of {counted(len(sources), 'stored one')}" if made else text
    left = _left_over(conversion, checkpoint)
    if left:
        yield f"{counted(len(left), 'tensor')} that no module holds, written as stored: {left[0]} for one"
