"""Tensors that a delta leaves to its base: those that are written as they are stored, and are the same there."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from bigload.checkpoint.formats.registry import SAFETENSORS, TORCH
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.records.delta import DELTA_FILE, FILE_BASE, DeltaDescription, check_base
from bigload.checkpoint.records.fingerprint import fingerprint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError
from bigload.layouts.differences import diff
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.planning.plan import Plan
from bigload.units import counted, format_size


def left_to_base(
    checkpoint: Checkpoint, found: TensorsToWrite, options: ReshardOptions, *, plan: Plan | None, target: Path
) -> tuple[TensorsToWrite, DeltaDescription | None]:
    """Return what is written of `found` to `target`, and for a delta what is left to the base that `options` name.

    Tensors that a transform computes are written; those that are stored are compared, by digests or bytes.
    """
    if options.base is None:
        return found, None
    asked = str(options.base)
    if checkpoint.components or checkpoint.assembled or checkpoint.format not in (SAFETENSORS.name, TORCH.name):
        raise OptionError.of("base", asked, "a source in safetensors or torch files with it, and no pipeline")
    for name in ("dtypes", "tp", "metadata"):
        if not options.is_default(name):
            expected = "no cast, ranks or texts of headers with it: a delta has the tensors of its base as they are"
            raise OptionError.of("base", asked, expected)
    if options.layout not in (None, "shards") or plan is not None:
        raise OptionError.of("base", asked, "a checkpoint and the layout shards with it")
    base = open_checkpoint(asked)
    digests = check_base(base)
    names = _same_tensors(checkpoint, found, base, digests.keys())
    if len(names) in (0, len(found.tensors)):
        what = "no tensor differs from it" if names else "no tensor is the same there"
        raise OptionError.of("base", asked, f"a checkpoint that shares some tensors: {what}")
    written = [tensor for name, tensor in found.tensors.items() if name not in names]
    num_bytes = sum(base.tensors[name].num_bytes for name in names)
    note = f"{counted(len(names), 'tensor')} ({format_size(num_bytes)}) are those of {base.root}, and not written"
    path = str(base.root) if Path(asked).is_absolute() or not Path(asked).exists() else None
    described = DeltaDescription(
        base=path or os.path.relpath(base.root, target.absolute()),
        shards=fingerprint(base),
        tensors={name: digests[name] for name in names},
        files=(),
    )
    return found.with_tensors(written, notes=[note]), described


def as_delta(output: Output, described: DeltaDescription | None) -> Output:
    """Return the files of a delta: under names of their own, without an index, with its description."""
    if described is None:
        return output
    numbers = (f"{number:05}-of-{len(output.files):05}" for number in range(1, len(output.files) + 1))
    # Numbered also where there is one: a lone file of another name would be taken for a model.
    files = tuple(
        replace(file, file=f"{FILE_BASE}-{number}.safetensors")
        for file, number in zip(output.files, numbers, strict=True)
    )
    documents = {name: text for name, text in output.documents.items() if not name.endswith(".index.json")}
    description = replace(described, files=tuple(file.file for file in files))
    return replace(output, files=files, documents={**documents, DELTA_FILE: description.to_json()})


def _same_tensors(
    checkpoint: Checkpoint, found: TensorsToWrite, base: Checkpoint, known: Collection[str]
) -> frozenset[str]:
    """Return the names of stored tensors that the base has too, with the same form and bytes."""
    stored = {
        name: tensor
        for name, tensor in found.tensors.items()
        if isinstance(tensor, TensorInfo) and tensor.strides is None and name in known
    }
    first = replace(checkpoint, tensors=stored, assembled={})
    second = replace(base, tensors={name: base.tensors[name] for name in stored})
    report = diff(first, second)
    return frozenset(stored) - {each.name for each in report.changed}
