"""One folder per device, each a sharded safetensors checkpoint of its own, in the order in which a load needs it.

out/model.safetensors.index.json                  everything, by way of the folders
out/plan.json  out/config.json ...
out/cuda-0/model-00001-of-00004.safetensors ...   what lives on cuda:0
out/cuda-0/model.safetensors.index.json
out/cpu/ ...                                      what lives in RAM
out/offload/ ...                                  what stays on disk
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.checkpoint.safetensors import encode_header
from bigload.devices import Device
from bigload.planning.plan import Plan
from bigload.planning.tree import build_tree

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes of a source file, and the offset at which they go into an output file."""

    source: Span
    offset: int


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A safetensors file to write. `file` is relative to the output folder; tensors are in file order."""

    device: Device
    file: str
    tensors: tuple[TensorInfo, ...]

    @cached_property
    def header(self) -> bytes:
        entries = ((tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in self.tensors)
        return encode_header(entries, metadata=_METADATA)

    @cached_property
    def num_bytes(self) -> int:
        """Size of the file: header and data."""
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)

    def copies(self) -> tuple[CopyRange, ...]:
        """Return where the data comes from, neighbours that stay neighbours merged."""
        merged: list[CopyRange] = []
        offset = len(self.header)
        for tensor in self.tensors:
            span, last = tensor.span, merged[-1] if merged else None
            if last is not None and (last.source.file, last.source.stop) == (span.file, span.start):
                merged[-1] = CopyRange(Span(span.file, last.source.start, span.stop), last.offset)
            elif span.num_bytes:
                merged.append(CopyRange(span, offset))
            offset += span.num_bytes
        return tuple(merged)


def lay_out(
    plan: Plan, checkpoint: Checkpoint, *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
) -> tuple[OutputFile, ...]:
    """Return the files that hold every tensor that `plan` places once, in the folder of its device, as it is stored.

    A file ends before the tensor that would take its data past `max_shard_bytes`; one larger tensor has a file of its
    own.
    """
    by_device: dict[Device, list[TensorInfo]] = {use.device: [] for use in plan.devices}
    for tensor in build_tree(checkpoint.tensors.values()).all_tensors():
        if not plan.leaves_out(tensor.name):
            by_device[plan.device_of(tensor.name)].append(tensor)
    files = []
    for device, tensors in by_device.items():
        parts = _split(tensors, max_shard_bytes)
        files += [
            OutputFile(
                device=device,
                file=f"{device.folder}/model-{number:05d}-of-{len(parts):05d}.safetensors",
                tensors=_aligned(part),
            )
            for number, part in enumerate(parts, start=1)
        ]
    return tuple(files)


def weight_maps(files: Iterable[OutputFile]) -> Mapping[str, Mapping[str, str]]:
    """Return the weight map of each folder by its name; the root, `""`, maps all tensors through the folders."""
    maps: dict[str, dict[str, str]] = {}
    for output in files:
        folder, _, name = output.file.rpartition("/")
        for tensor in output.tensors:
            maps.setdefault(folder, {})[tensor.name] = name
            maps.setdefault("", {})[tensor.name] = output.file
    return maps


def _split(tensors: Sequence[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    parts: list[list[TensorInfo]] = []
    filled = 0
    for tensor in tensors:
        if not parts or filled + tensor.num_bytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.num_bytes
    return parts


def _aligned(tensors: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Keep the order if every tensor then starts at a multiple of its element size, else put wide types first.

    Readers view the bytes in place and need that; odd sizes are rare enough that the order nearly always stays.
    """
    offset = 0
    for tensor in tensors:
        if offset % tensor.dtype.alignment:
            return tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.alignment))
        offset += tensor.num_bytes
    return tuple(tensors)
