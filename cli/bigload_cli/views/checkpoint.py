"""A checkpoint as `bigload inspect` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigload.checkpoint.formats.registry import FORMATS
from bigload.checkpoint.model import Checkpoint, TensorInfo, spans_of
from bigload.checkpoint.quantisation import Quantisation, quantisation_of
from bigload.plain_text import PlainTable, Styled, printable
from bigload.planning.model.module_tree import ModuleNode
from bigload.planning.module_table import OutlineRow
from bigload.units import counted, format_count, format_size
from bigload_cli.views.documents import bytes_by_dtype, largest_tensor
from bigload_cli.views.text import argument, bar

_BAR_WIDTH = 16


def headline(checkpoint: Checkpoint) -> str:
    """Return the two lines that say what this checkpoint is."""
    index = ", index complete" if checkpoint.index_file else ""
    quantised = quantisation_of(checkpoint)
    parameters = f"{format_count(checkpoint.num_parameters)} parameters"
    if quantised is not None:
        parameters = _quantised(checkpoint, quantised)
    tensors, size = counted(len(checkpoint.tensors), "tensor"), format_size(checkpoint.total_bytes)
    shards = counted(len(checkpoint.shards), "shard")
    if checkpoint.stored_bytes < checkpoint.total_bytes:
        size += f", sharing {format_size(checkpoint.stored_bytes)} on disk"
    return (
        f"{printable(checkpoint.name)}   {_formats(checkpoint)}, {shards}{index}, headers valid\n"
        f"{parameters} in {tensors}, {size}, {_dtypes(checkpoint)}"
    )


def _formats(checkpoint: Checkpoint) -> str:
    found = {shard.format for shard in checkpoint.shards}
    titles = [each.title for each in FORMATS.values() if each.name in found]
    return titles[0] if len(titles) == 1 else f"{' and '.join(titles)}s"


def _quantised(checkpoint: Checkpoint, found: Quantisation) -> str:
    """Return how many values are stored, and how many parameters they stand for."""
    stored = format_count(checkpoint.num_parameters)
    if found.num_parameters is None:
        return f"{stored} values quantised by {printable(found.method)},"
    parameters = f"about {_rounded(found.num_parameters)} parameters in {printable(str(found))},"
    return f"{stored} packed values, {parameters}" if found.is_packed else parameters


def _rounded(count: int) -> str:
    """Return a count as an estimate: `71 B`."""
    number, _, letter = format_count(count).partition(" ")
    return f"{float(number):.3g} {letter}".strip()


def modules(checkpoint: Checkpoint, rows: Sequence[OutlineRow], *, blocks: bool) -> PlainTable:
    """Return the module table: a row a module, repeated blocks folded."""
    table = PlainTable(
        ("MODULE", "TENSORS", "PARAMS", "SIZE", "SHARE", ""), right=("TENSORS", "PARAMS", "SIZE", "SHARE"), droppable=""
    )
    total = checkpoint.total_bytes or 1
    for row in rows:
        share = row.num_bytes / total
        table.add(
            _branch(row, blocks=blocks) + row.label,
            str(row.num_tensors),
            format_count(row.num_parameters),
            format_size(row.num_bytes),
            f"{share:.1%}",
            Styled(bar(share, width=_BAR_WIDTH, blocks=blocks), "cyan"),
        )
    return table


def components(checkpoint: Checkpoint) -> PlainTable:
    """Return a row for every component of a pipeline, in the order of its index."""
    table = PlainTable(
        ("COMPONENT", "CLASS", "TENSORS", "PARAMS", "SIZE", "DTYPE"),
        right=("TENSORS", "PARAMS", "SIZE"),
        droppable="PARAMS",
    )
    for component in checkpoint.components:
        found, class_name = component.checkpoint, f"{component.library}.{component.class_name}"
        name = component.name or "."
        if found is None:
            table.add(name, class_name, "-", "-", "-", "-")
        else:
            counts = (str(len(found.tensors)), format_count(found.num_parameters), format_size(found.total_bytes))
            table.add(name, class_name, *counts, ", ".join(bytes_by_dtype(found)))
    return table


def shards(checkpoint: Checkpoint) -> PlainTable:
    """Return a row for every file."""
    table = PlainTable(("SHARD", "TENSORS", "SIZE", "HEADER", "HEADER SHA-256"), right=("TENSORS", "SIZE", "HEADER"))
    held = Counter(file for tensor in checkpoint.stored.values() for file in {span.file for span in spans_of(tensor)})
    for shard in checkpoint.shards:
        size, header = format_size(shard.num_bytes), format_size(shard.header_bytes)
        table.add(shard.file, str(held[shard.file]), size, header, shard.header_sha256[:16])
    return table


def tensors(infos: Sequence[TensorInfo]) -> PlainTable:
    """Return a row for every tensor."""
    table = PlainTable(("TENSOR", "DTYPE", "SHAPE", "SIZE", "FILE", "BYTES"), right=("SIZE",))
    for tensor in infos:
        span = tensor.span
        row = (tensor.name, tensor.dtype.name, str(list(tensor.shape)), format_size(tensor.num_bytes))
        table.add(*row, *((span.file, f"{span.start}-{span.stop}") if span.file else ("in several parts", "")))
    return table


def closing(checkpoint: Checkpoint, repeated: Sequence[ModuleNode], *, path: str) -> str:
    """Return the lines below the table: the largest pieces, and what to do next with what the user calls `path`."""
    pieces = []
    block = max(repeated, key=lambda block: block.num_bytes, default=None)
    if block is not None:
        pieces.append(f"Largest block: {printable(block.name)}, {format_size(block.num_bytes)}.")
    tensor = largest_tensor(checkpoint)
    if tensor is not None:
        size = format_size(tensor.num_bytes)
        pieces.append(f"Largest tensor: {printable(tensor.name)} {list(tensor.shape)}, {size}.")
    if any(warning.code == "adapter" for warning in checkpoint.warnings):  # its base model is what to plan
        return "\n".join(pieces)
    next_command = f"Next: bigload plan {argument(path)} -m cuda:0=24GiB -m cpu=64GiB -o plan.json"
    return "\n".join([*pieces, next_command])


def _dtypes(checkpoint: Checkpoint) -> str:
    sizes = bytes_by_dtype(checkpoint)
    if len(sizes) == 1:
        return f"all {next(iter(sizes))}"
    total = checkpoint.total_bytes or 1
    return ", ".join(f"{name} {size / total:.1%}" for name, size in sizes.items()) or "empty"


def _branch(row: OutlineRow, *, blocks: bool) -> str:
    """Draw the branches in front of a row; the top level has none."""
    bar_, tee, corner = ("│  ", "├─ ", "└─ ") if blocks else ("|  ", "|- ", "`- ")
    *above, last = row.is_last[1:] or (None,)
    if last is None:
        return ""
    return "".join("   " if ended else bar_ for ended in above) + (corner if last else tee)
