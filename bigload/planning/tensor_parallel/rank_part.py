"""Part of a checkpoint that one tensor-parallel rank holds, as a checkpoint of tensors with the shapes of their parts.

What a rank needs beside its weights, above all its KV cache, is read from it by the code that reads whole models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigload.checkpoint.model import Checkpoint, StoredForm, StoredTensors, TensorRow, forms_of
from bigload.planning.tensor_parallel.division import Division


def part_of_rank(checkpoint: Checkpoint, divisions: Mapping[str, Division], rank: int) -> Checkpoint:
    """Return the tensors of `checkpoint` as `rank` holds them. Their spans have their sizes, and name no file."""
    parts: dict[tuple[StoredForm, int], StoredForm] = {}
    rows: dict[str, TensorRow] = {}
    for name, form in forms_of(checkpoint.tensors).items():
        division = divisions[name]
        part = parts.get((form, id(division)))
        if part is None:
            part = parts[form, id(division)] = part_form(form, division, rank)
        rows[name] = part, "", 0, part.num_bytes
    return replace(checkpoint, tensors=StoredTensors(rows), assembled={})


def part_form(form: StoredForm, division: Division, rank: int) -> StoredForm:
    """Return the form of the part that `rank` holds of a tensor."""
    if division.dim is None or not form.shape[division.dim]:
        return form
    size, length = form.shape[division.dim], division.length(rank)
    return StoredForm(
        form.dtype_name,
        division.shape(form.shape, rank),
        form.num_elements // size * length,
        form.num_bytes * length // size,
    )
