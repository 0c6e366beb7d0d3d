"""Output layout: a function from a checkpoint to the files to write, its capabilities as data, and common steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigload.checkpoint.formats.registry import LIBRARY_BASES, SAFETENSORS
from bigload.checkpoint.index import encode_index
from bigload.checkpoint.model import AssembledTensor, Checkpoint, StoredTensors
from bigload.conversion.computed_tensor import ComputedTensor
from bigload.layouts.options import DEFAULTS, ReshardOptions
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.layouts.writing.kernel_copy import data_offset
from bigload.planning.model.module_tree import build_tree
from bigload.planning.plan import Plan

TENSOR_ALIGNMENT = 64
_NUMBER = re.compile(r"-\d+-of-\d+$")
_RANK = re.compile(r"^shard-\d+-")  # of a file in which torch.distributed.checkpoint saved parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Input of a layout.

    Attributes:
        checkpoint: Checkpoint to rewrite, with its tensors under the names to write.
        sources: What those of its tensors are made of that are no stored ones, by name.
        plan: Plan to follow, if one was given; never `None` for a layout that `needs_plan`.
        options: Options of the reshard, of which it heeds sizes, dtypes and those in `OutputLayout.own_options`.
        can_share_blocks: Files whose bytes are unchanged can share blocks with the source if their data lies in blocks
            as it does there (`at_offsets`). A layout that cuts tensors has no use for it.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, AssembledTensor | ComputedTensor] = field(default_factory=dict)
    plan: Plan | None = None
    options: ReshardOptions = DEFAULTS
    can_share_blocks: bool = False

    def in_execution_order(self) -> list[OutputTensor]:
        """Return all tensors whole, in the dtype to write, in the order in which a forward pass needs them."""
        tensors = build_tree(StoredTensors.of_all([self.checkpoint.tensors])).all_tensors()  # its tables go with it
        return [
            OutputTensor(source=self.sources.get(tensor.name, tensor), dtype=self.options.dtypes(tensor))
            for tensor in tensors
        ]

    def at_offsets(self, files: Iterable[OutputFile]) -> tuple[OutputFile, ...]:
        """Return `files` with the metadata asked for, and their data where blocks can be shared with the source."""
        files = (replace(output, metadata=self.options.metadata) for output in files)
        if not self.can_share_blocks:
            return tuple(files)
        return tuple(replace(output, data_offset=data_offset(output.tensors)) for output in files)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """A layout, to be named in `registry.LAYOUTS`.

    Attributes:
        lay_out: Returns the files to write. It moves no byte.
        needs_plan: It cannot be made from a checkpoint alone.
        follows_plan: A plan decides what is written where, so weights are cast only to the dtype that the plan counted.
        part_of_plan: The part of the checkpoint that is written by a plan, in words; empty if it is all of it.
        takes_keep_fp32: Tensors may differ in dtype.
        takes_blocks: Weights may be written in Q8_0, a type of ggml.
        takes_names: Tensors may have other names and forms than in the source.
        own_options: Options that are refused by layouts that do not name them here: of `ReshardOptions`, or further
            ones, which come in `layout_options`; `ReshardOptions.value` returns both.
        required_options: Options without which it cannot be made, and what is expected of each.
        recorded_options: Own options that the manifest records.
        next_step: How to use the output, from its path, files and plan; `None` if it can be loaded as a checkpoint.
    """

    lay_out: Callable[[LayoutRequest], Output]
    needs_plan: bool = False
    follows_plan: bool = False
    part_of_plan: str = ""
    takes_keep_fp32: bool = True
    takes_blocks: bool = False
    takes_names: bool = True
    own_options: tuple[str, ...] = ()
    required_options: Mapping[str, str] = field(default_factory=dict)
    recorded_options: tuple[str, ...] = ()
    next_step: Callable[[str, Output, Plan | None], str] | None = None


def split(tensors: Iterable[OutputTensor], max_bytes: int | None) -> list[list[OutputTensor]]:
    """Return `tensors` in files of at most `max_bytes` of data each, a larger tensor by itself; `None` for one file."""
    parts: list[list[OutputTensor]] = []
    filled = 0
    for tensor in tensors:
        if not parts or (max_bytes is not None and filled + tensor.num_bytes > max_bytes):
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.num_bytes
    return parts


def aligned(tensors: Sequence[OutputTensor]) -> tuple[OutputTensor, ...]:
    """Keep the order, but put odd sizes last, wide types first: the other tensors start at multiples of 64.

    The format allows no gaps, so order is all that there is to align tensors by. Odd sizes are rare, and small.
    """
    even = [tensor for tensor in tensors if tensor.num_bytes % TENSOR_ALIGNMENT == 0]
    odd = [tensor for tensor in tensors if tensor.num_bytes % TENSOR_ALIGNMENT]
    return (*even, *sorted(odd, key=lambda tensor: -tensor.dtype.alignment))


def base_name(checkpoint: Checkpoint) -> str:
    """Return what the output's files are called before their numbers, which is what libraries look for.

    Safetensors keep the name that they have, `diffusion_pytorch_model` for one. Torch files become `model`, as
    transformers calls `pytorch_model.bin` in safetensors, unless diffusers or PEFT have their own name for them.
    """
    stored = _RANK.sub("", (checkpoint.index_file or checkpoint.shards[0].file).rpartition("/")[2])
    for suffix in (SAFETENSORS.index_suffix, ".safetensors"):
        if stored.endswith(suffix) and (base := _NUMBER.sub("", stored.removesuffix(suffix))):
            return base
    base = stored.partition(".")[0]
    return base if base in LIBRARY_BASES else "model"


def numbered(parts: Sequence[Sequence[OutputTensor]], *, folder: str, base: str) -> tuple[OutputFile, ...]:
    """Return the files of `parts` below `folder` (`""` for the output) under the names that save_pretrained gives."""
    prefix = f"{folder}/" if folder else ""
    return tuple(
        OutputFile(file=f"{prefix}{base}-{number:05d}-of-{len(parts):05d}.safetensors", tensors=aligned(part))
        for number, part in enumerate(parts, start=1)
    )


def one_or_numbered(parts: Sequence[Sequence[OutputTensor]], *, folder: str, base: str) -> tuple[OutputFile, ...]:
    """Return one file without a number for one or none of `parts`; otherwise as `numbered`."""
    if len(parts) > 1:
        return numbered(parts, folder=folder, base=base)
    file = f"{folder}/{base}.safetensors" if folder else f"{base}.safetensors"
    return (OutputFile(file=file, tensors=aligned(parts[0] if parts else [])),)


def with_aliases(files: Iterable[OutputFile], aliases: Mapping[str, str]) -> tuple[OutputFile, ...]:
    """Return `files` with the other names of their tensors."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    return tuple(
        replace(output, aliases={alias: t.name for t in output.tensors for alias in others.get(t.name, ())})
        for output in files
    )


def index_of(files: Iterable[OutputFile], folder: str = "", *, base: str = "model") -> dict[str, bytes]:
    """Return the index of `folder` by its path; it maps the tensors of all `files` in it and below."""
    prefix = f"{folder}/" if folder else ""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for output in files:
        if output.file.startswith(prefix):
            weight_map |= dict.fromkeys((tensor.name for tensor in output.tensors), output.file.removeprefix(prefix))
            total_bytes += sum(tensor.num_bytes for tensor in output.tensors)
    return {f"{prefix}{base}{SAFETENSORS.index_suffix}": encode_index(weight_map, total_size=total_bytes)}
