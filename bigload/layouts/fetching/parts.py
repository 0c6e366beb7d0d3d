"""Output of a fetch: whole files, files with some of their tensors, or the folders of devices or ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from bigload.checkpoint.byte_source import address_text
from bigload.checkpoint.formats.registry import check_data_is_read
from bigload.checkpoint.index import encode_index
from bigload.checkpoint.model import Checkpoint, Shard, TensorInfo
from bigload.checkpoint.pipeline import refuse_pipeline
from bigload.checkpoint.records.part import PART_FILE, PartDescription
from bigload.devices import Device
from bigload.errors import OptionError
from bigload.layouts.fetching.options import FetchOptions
from bigload.layouts.kinds.layout import LayoutRequest, aligned, base_name, index_of
from bigload.layouts.kinds.rank_slices import rank_folder
from bigload.layouts.model_files.folder_files import FolderFiles
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.layouts.resharding.selection import lay_out
from bigload.loading.scheduling.read_requests import MAX_GAP_BYTES, gathers
from bigload.loading.scheduling.slices import rows_of
from bigload.planning.plan import Plan

WHOLE_FILE_SHARE = 0.9
"""A file of which this part is needed is fetched whole: it stays as it is, and its SHA-256 can be checked."""

LAYOUT = "files"
"""What manifests call the files of the source, whole or in part."""


def fetched_output(
    checkpoint: Checkpoint, files: FolderFiles, options: FetchOptions, plan: Plan | None
) -> tuple[Output, PartDescription | None]:
    """Return the files to write, and of what they are a part; `plan` is that of the options, opened."""
    if options.only or options.rank is not None or plan is not None:
        refuse_pipeline(checkpoint, asked="part by tensors, rank or device")
    beside, config = dict(files.beside), files.beside.get("config.json")
    if plan is not None or options.rank is not None:
        output = _folders_of_layout(checkpoint, options, plan)
    else:
        output = _files_of_source(checkpoint, files, options.only)
    tensors = {tensor.name for file in output.files for tensor in _tensors_of(checkpoint, file)}
    is_whole = output.layout == LAYOUT and len(tensors) == len(checkpoint.tensors)
    documents, part = dict(output.documents), None
    if not is_whole:
        beside.pop(checkpoint.index_file or "", None)
        beside.pop(PART_FILE, None)
        part = PartDescription(
            source=address_text(checkpoint.root),
            selection=options.described,
            num_tensors=len(tensors),
            source_tensors=len(checkpoint.tensors),
        )
        folders = dict.fromkeys(["", *(file.folder for file in output.files)])
        documents = {f"{folder}/{PART_FILE}".lstrip("/"): part.to_json() for folder in folders} | documents
    taken = {*documents, *(file.file for file in output.files)}
    copies = [
        OutputFile.copy_of(name, found.num_bytes, sha256=found.sha256)
        for name, found in beside.items()
        if name not in taken
    ]
    if config is not None:
        copies += [
            OutputFile.copy_of("config.json", config.num_bytes, to=f"{folder}/config.json")
            for folder in dict.fromkeys(file.folder for file in output.files if not file.is_copy and file.folder)
        ]
    return replace(output, files=(*copies, *output.files), documents=documents), part


def _files_of_source(checkpoint: Checkpoint, files: FolderFiles, only: Sequence[str]) -> Output:
    """Return the shards that have wanted tensors, whole if most of them is wanted, and an index of what is there."""
    wanted = set(_named(checkpoint.tensors, only)) if only else None
    outputs, weight_map, total_bytes = list[OutputFile](), dict[str, str](), 0
    for shard in checkpoint.shards:
        if shard.file not in files.shards:
            continue
        stored = [tensor for tensor in checkpoint.tensors.values() if tensor.span.file == shard.file]
        found = stored if wanted is None else [tensor for tensor in stored if tensor.name in wanted]
        if not found:
            continue
        output = _file_of(checkpoint, shard, found, files, is_whole=wanted is None)
        outputs.append(output)
        kept = stored if output.is_copy else found
        weight_map |= {tensor.name: output.file for tensor in kept}
        total_bytes += sum(tensor.num_bytes for tensor in kept)
    documents = {}
    if checkpoint.index_file is not None and weight_map and len(weight_map) < len(checkpoint.tensors):
        documents[checkpoint.index_file] = encode_index(weight_map, total_size=total_bytes)
    return Output(files=tuple(outputs), documents=documents, layout=LAYOUT)


def _file_of(
    checkpoint: Checkpoint, shard: Shard, wanted: Sequence[TensorInfo], files: FolderFiles, *, is_whole: bool
) -> OutputFile:
    num_bytes = sum(tensor.num_bytes for tensor in wanted) + shard.header_bytes
    if is_whole or num_bytes >= WHOLE_FILE_SHARE * shard.num_bytes:
        return OutputFile.copy_of(shard.file, shard.num_bytes, sha256=files.shards[shard.file].sha256)
    check_data_is_read(checkpoint)
    name = str(PurePosixPath(shard.file).with_suffix(".safetensors"))
    if checkpoint.index_file is None and name != shard.file:
        name = f"{base_name(checkpoint)}.safetensors"
    names = {tensor.name for tensor in wanted}
    return OutputFile(
        file=name,
        tensors=aligned([OutputTensor(source=tensor, dtype=tensor.dtype) for tensor in wanted]),
        aliases={alias: name for alias, name in shard.metadata.items() if name in names},
    )


def _named(known: Collection[str], asked: Iterable[str]) -> Iterator[str]:
    """Yield the names that are asked for: of tensors, of modules for all that is in them, or patterns of either."""
    unknown = []
    for pattern in asked:
        found = [
            name for name in known if name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        ]
        if not found:
            unknown.append(pattern)
        yield from found
    if unknown:
        modules = {
            ".".join(parts[:end]): None
            for name in known
            for parts in [name.split(".")]
            for end in range(1, len(parts) + 1)
        }
        close = get_close_matches(unknown[0], modules, n=3, cutoff=0.4)
        hint = f"close to {unknown[0]:.100} are {', '.join(close)}" if close else None
        raise OptionError.of("only", ", ".join(unknown), "names or patterns of tensors or modules there", hint=hint)


def _folders_of_layout(checkpoint: Checkpoint, options: FetchOptions, plan: Plan | None) -> Output:
    """Return the folders of some devices or of one rank, out of the layout that a reshard would write."""
    base = base_name(checkpoint)
    if plan is None:
        layout = ReshardOptions(layout="ranks", tp=options.tp, tp_rules=options.tp_rules)
        folders = {rank_folder(options.rank or 0)}
    else:
        layout = ReshardOptions(layout="devices")
        folders = {Device.parse(device).folder for device in options.devices}
    check_data_is_read(checkpoint)
    whole = lay_out(LayoutRequest(checkpoint=checkpoint, plan=plan, options=layout))
    files = tuple(file for file in whole.files if file.folder in folders)
    empty = folders - {file.folder for file in files}
    if empty:
        there = sorted({file.folder for file in whole.files})
        raise OptionError.of(
            "device", ", ".join(sorted(empty)), f"devices with weights in the plan: {', '.join(there)}"
        )
    if plan is None:
        kept = (name for name in whole.documents if "/" not in name or name.partition("/")[0] in folders)
        documents = {name: whole.documents[name] for name in kept}
    else:
        documents = {}
        for folder in sorted(folders):
            documents |= index_of([file for file in files if file.folder == folder], folder, base=base)
        documents |= index_of(files, base=base)
    return replace(whole, files=files, documents=documents)


def _tensors_of(checkpoint: Checkpoint, file: OutputFile) -> Iterator[OutputTensor | TensorInfo]:
    if not file.is_copy:
        yield from file.tensors
        return
    yield from (tensor for tensor in checkpoint.tensors.values() if tensor.span.file == file.file)


def byte_ranges(output: Output) -> Iterator[tuple[str, int, int]]:
    """Yield the byte ranges of source files that `output` is read from, merged as far as a window can merge them."""
    for file in output.files:
        last: tuple[str, int, int] | None = None
        for one in _ranges_of(file):
            if last is not None and last[0] == one[0] and 0 <= one[1] - last[2] <= MAX_GAP_BYTES:
                last = last[0], last[1], one[2]
                continue
            if last is not None:
                yield last
            last = one
        if last is not None:
            yield last


def _ranges_of(file: OutputFile) -> Iterator[tuple[str, int, int]]:
    for tensor in file.tensors:
        source = tensor.source
        assert isinstance(source, TensorInfo), "only a reshard renames or computes"
        if source.strides is not None or not source.num_bytes:
            yield source.span.file, source.span.start, source.span.stop
            continue
        for part in tensor.parts or (None,):
            rows = rows_of(source, part)
            if rows.count == 1 or gathers(rows):
                stop = rows.start + (rows.count - 1) * rows.stride + rows.row_bytes
                yield source.span.file, rows.start, stop
            else:
                for row in range(rows.count):
                    start = rows.start + row * rows.stride
                    yield source.span.file, start, start + rows.row_bytes
