"""Recipe of a reshard: one digest of what is written, and of the files that it is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from bigload.checkpoint.byte_source import SourceIdentity
from bigload.checkpoint.model import TensorInfo
from bigload.conversion.computed_tensor import ComputedTensor, Operand
from bigload.layouts.output import Output


def recipe_of(output_digest: str, identities: Mapping[str, SourceIdentity]) -> str:
    """Return a digest of everything that decides which bytes are written, the state of the source files included."""
    digest = hashlib.sha256(output_digest.encode())
    for name, identity in sorted(identities.items()):
        shared = (identity.num_bytes, *identity.version, *identity.status_version)
        digest.update(json.dumps([name, *shared]).encode())
    return digest.hexdigest()


def output_digest_of(output: Output) -> str:
    """Return the digest of all that an output is: files, their tensors, and what these are made of."""
    digest = hashlib.sha256()
    places, is_shared = dict[int, str](), output.is_shared
    parts: dict[int, str] = {}  # by identity, as `places`: both are shared, and their hash is slow
    for file in output.files:
        texts = []
        for source, dtype, cuts, *_ in file.tensors:
            if id(cuts) not in parts:
                parts[id(cuts)] = json.dumps([(part.dim, part.start, part.stop) for part in cuts])
            place = places.get(id(source)) or json.dumps(_place_of(source))[1:-1]
            if is_shared:
                places[id(source)] = place
            texts.append(f'[{place}, "{dtype.name}", {parts[id(cuts)]}]')
        facts = json.dumps([file.file, file.num_bytes, file.header_sha256])
        digest.update(f"{facts[:-1]}, [{', '.join(texts)}]]".encode() + b"".join(file.gaps))
    for name, content in output.documents.items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def _place_of(source: Operand) -> list[object]:
    """Return where `source` is stored and what is computed, as JSON can hold it."""
    if isinstance(source, ComputedTensor):
        return [repr(source.operation)]
    if isinstance(source, TensorInfo):
        return [source.span.file, source.span.start, source.span.stop]
    pieces = ((piece.start, piece.tensor) for piece in source.pieces)
    return [[start, tensor.shape, tensor.strides, *_place_of(tensor)] for start, tensor in pieces]
