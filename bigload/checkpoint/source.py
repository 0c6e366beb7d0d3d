"""Find the files of a checkpoint and open it: a file, a folder, an index, or a repository in the Hugging Face cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.formats.registry import FORMATS, LegacyFileError, main_files, read_shard_header, weight_suffixes
from bigload.checkpoint.formats.unsupported import (
    adapter_warning,
    refuse_other_file,
    refuse_other_folder,
    refuse_pipeline,
)
from bigload.checkpoint.index import ShardIndex, read_beside, read_index, resolve_shard
from bigload.checkpoint.model import Checkpoint, CheckpointWarning, ShardHeader, TensorInfo
from bigload.documents import MAX_CONFIG_BYTES, parse_json
from bigload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
    LegacyPickleError,
    Problem,
    ReadError,
)
from bigload.units import counted

_SHARD_OF_MANY = re.compile(r".*-of-\d+\.\w+")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at `path` by reading and validating its headers.

    `path` is a folder with `model.safetensors` or one `*.safetensors.index.json`, such an index, a `.safetensors` file,
    or the name of a repository (`org/model`) that lies in the local Hugging Face cache. Nothing is downloaded, unless
    `path` is a location of a registered scheme (`checkpoint.byte_source`), which is read by byte ranges. What
    `torch.save` wrote (`.bin`, `.pt`, `.pth`; `pytorch_model.bin.index.json`) is read alike, and executes nothing; a
    folder's safetensors come first, as with transformers. An index of another name is taken where it is the only one.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that is a checkpoint.
        UnsupportedFormatError: weights in another format, or a pipeline of several models; it says what it is.
        InvalidCheckpointError: files break the format or contradict the index; `.problems` lists them all.
        LegacyPickleError: files of torch before 1.6, which have no parts that could be read by themselves.
        CheckpointError: a file cannot be read.
    """
    place = _existing(path)
    try:
        if place.is_dir():
            return _open_folder(place, str(path))
        if place.suffix == ".json":
            return _open_sharded(place.parent, place.name, str(path))
        if scheme_of(place).is_local:
            refuse_other_file(place)
        elif not place.name.endswith(weight_suffixes()):
            return _open_by_known_names(place, str(path))
        return _open_files(place.parent, None, [place.name], str(path))
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def checkpoint_root(path: str | Path) -> Path | None:
    """Return the folder that the files of a checkpoint at `path` are in, also where they are gone; None without one."""
    place = Path(path).expanduser()
    root = place.parent if place.suffix in (".json", *weight_suffixes()) and not place.is_dir() else place
    return root if root.is_dir() else None


def _existing(path: str | Path) -> Path:
    try:
        place = Path(path).expanduser()
        if not scheme_of(place).is_local:
            return place
        exists = place.exists()
        if exists and str(path).endswith("/") and not place.is_dir():  # Path drops the slash, the system would not
            raise CheckpointNotFoundError(path, "not a folder")
    except CheckpointNotFoundError:
        raise
    except (RuntimeError, ValueError) as error:  # no such user; a NUL character
        raise CheckpointNotFoundError(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if exists:
        return place
    snapshot = _cached_snapshot(str(path)) if _REPOSITORY.fullmatch(str(path)) else None
    if snapshot is not None:
        return snapshot
    hint = f"if this is a repository on the Hugging Face Hub, fetch it first: hf download {path}"
    raise CheckpointNotFoundError(
        path, "no such file or folder", hint=hint if _REPOSITORY.fullmatch(str(path)) else None
    )


def _cached_snapshot(repository: str) -> Path | None:
    # Imported here: it takes time at every start, and a local path never needs it.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in main_files():
        try:
            found = try_to_load_from_cache(repository, file)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _open_folder(root: Path, path: str) -> Checkpoint:
    names = sorted(file.name for file in root.iterdir() if not file.is_dir())
    for form in FORMATS.values():
        indexes = [name for name in names if name.endswith(form.index_suffix)]
        if form.whole_file in names:
            return _open_files(root, None, [form.whole_file], path)
        if form.default_index in indexes:
            return _open_sharded(root, form.default_index, path)
        if len(indexes) == 1:
            return _open_sharded(root, indexes[0], path)
        if indexes:
            hint = f"name the one you mean: {root / indexes[0]}"
            raise CheckpointNotFoundError(path, f"{len(indexes)} index files, which differ", details=indexes, hint=hint)
    refuse_pipeline(root, path, names)
    indexes = [name for name in names if name.endswith(".index.json")]
    if len(indexes) == 1:
        return _open_sharded(root, indexes[0], path)
    what_else = _what_else(root, names)
    files = _files_of_first_form(names)
    if len(files) == 1 and what_else is None and not _SHARD_OF_MANY.fullmatch(files[0]):
        return _open_files(root, None, files, path)
    if not files and what_else is None:
        refuse_other_folder(path, names)
    raise CheckpointNotFoundError(path, _why_none(names), hint=what_else or _one_of(root, files))


def _open_by_known_names(root: Path, path: str) -> Checkpoint:
    """Open a checkpoint in a location that cannot be listed."""
    for form in FORMATS.values():
        if _is_there(root / form.whole_file):
            return _open_files(root, None, [form.whole_file], path)
        if _is_there(root / form.default_index):
            return _open_sharded(root, form.default_index, path)
    raise CheckpointNotFoundError(path, f"none of {', '.join(main_files())} can be read there")


def _is_there(location: Path) -> bool:
    scheme = scheme_of(location)
    if scheme.is_local:
        return location.exists()
    try:
        scheme.identity(location)
    except ReadError:
        return False
    return True


def _one_of(root: Path, files: list[str]) -> str | None:
    """Return the advice to name a file, where some are checkpoints of their own."""
    whole = [name for name in files if not _SHARD_OF_MANY.fullmatch(name)]
    return f"name the one you mean: {root / whole[0]}" if whole else None


def _files_of_first_form(names: list[str]) -> list[str]:
    """Return the safetensors files among `names`; torch's without those, for a training leaves some beside them."""
    found = ([name for name in names if name.endswith(form.suffixes)] for form in FORMATS.values())
    return next((files for files in found if files), [])


def _why_none(names: list[str]) -> str:
    for form in FORMATS.values():
        files = [name for name in names if name.endswith(form.suffixes)]
        if files:
            found = counted(len(files), f"{' or '.join(form.suffixes)} file")
            return f"{found} but no index ({form.default_index}) that says which tensor is where"
    return f"the folder holds neither {' nor '.join(form.whole_file for form in FORMATS.values())} nor an index"


def _what_else(root: Path, names: list[str]) -> str | None:
    """Return what to do with a folder of weights that is no checkpoint in itself, if it is one that is known."""
    if "ranks.json" in names and (root / "rank-0").is_dir():
        return f"it was resharded for tensor-parallel ranks; name the folder of one of them: {root / 'rank-0'}"
    if "index.json" in names and any(name.endswith(".dat") for name in names):
        return "it is an offload folder as accelerate has them; in Python: bigload.OffloadFolder.open"
    return None


def _open_sharded(root: Path, index_file: str, path: str) -> Checkpoint:
    index = read_index(root / index_file)
    if not index.weight_map:
        text = "the weight_map is empty"
        raise InvalidCheckpointError(path, [Problem(code="bad-index", file=index_file, text=text)])
    return _open_files(root, index_file, sorted(set(index.weight_map.values())), path, index)


def _open_files(
    root: Path, index_file: str | None, files: list[str], path: str, index: ShardIndex | None = None
) -> Checkpoint:
    headers, problems, legacy = _read_headers(root, files, index_file)
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                text = f"tensor {tensor.name!r} is also in {tensors[tensor.name].span.file}"
                problems.append(Problem(code="tensor-twice", file=header.shard.file, text=text))
            tensors.setdefault(tensor.name, tensor)
    if index is not None and not legacy:
        problems += _contradictions(index, tensors, {header.shard.file for header in headers})
    if problems:
        raise InvalidCheckpointError(path, problems)
    if legacy:
        raise LegacyPickleError(path, [root / file for file in files], legacy=legacy)
    config, config_warnings = _read_config(root)
    return Checkpoint(
        path=path,
        root=root,
        index_file=index_file,
        shards=tuple(header.shard for header in headers),
        tensors=tensors,
        config=config,
        warnings=(
            *_total_size_warning(index, tensors),
            *(warning for header in headers for warning in header.warnings),
            *config_warnings,
            *adapter_warning(root),
        ),
    )


def _read_headers(
    root: Path, files: list[str], index_file: str | None
) -> tuple[list[ShardHeader], list[Problem], list[str]]:
    """Return the headers of `files`, what is wrong with the others, and which are bare pickles."""
    headers, problems, legacy = [], [], []
    for file in files:
        place = resolve_shard(root, file) if index_file is not None else root / file
        if isinstance(place, str):
            problems.append(
                Problem(code="unsafe-path", file=index_file or file, text=f"the shard name {file!r} {place}")
            )
            continue
        try:
            headers.append(read_shard_header(place, file))
        except LegacyFileError:
            legacy.append(file)
        except InvalidCheckpointError as error:
            problems += error.problems
        except FileNotFoundError:
            text = f"missing, but named in {index_file}" if index_file is not None else "missing: a link to nothing"
            problems.append(Problem(code="missing-shard", file=file, text=text))
        except OSError as error:
            problems.append(Problem(code="unreadable", file=file, text=f"cannot be read: {error.strerror or error}"))
    return headers, problems, legacy


def _contradictions(index: ShardIndex, tensors: Mapping[str, TensorInfo], read: set[str]) -> Iterator[Problem]:
    """Yield the tensors whose place in the index and in the shards differ, for the shards that could be read."""
    for name, file in index.weight_map.items():
        if file not in read:
            continue
        tensor = tensors.get(name)
        if tensor is None:
            yield Problem(
                code="tensor-missing", file=file, text=f"tensor {name!r} is in the index, but not in the shard"
            )
        elif tensor.span.file != file:
            text = f"tensor {name!r} is in {tensor.span.file}, the index says {file}"
            yield Problem(code="tensor-misplaced", file=file, text=text)
    for name, tensor in tensors.items():
        if name not in index.weight_map:
            text = f"tensor {name!r} is in the shard, but not in the index"
            yield Problem(code="tensor-unlisted", file=tensor.span.file, text=text)


def _total_size_warning(index: ShardIndex | None, tensors: Mapping[str, TensorInfo]) -> Iterable[CheckpointWarning]:
    """Compare the index's claim with the headers, which alone decide.

    No loader reads this number, and checkpoints that everyone uses get it wrong (RedPajama-7B by 117 MB, in a float),
    so it is a warning and no error.
    """
    if index is None or index.total_size is None:
        return ()
    total = sum(tensor.num_bytes for tensor in tensors.values())
    stored_once = {(tensor.span, tensor.shape): tensor.num_bytes for tensor in tensors.values()}
    if index.total_size in (total, sum(stored_once.values())):  # tied weights count once, or by each of their names
        return ()
    text = f"the index claims {index.total_size} bytes of tensors, the headers add up to {total}; the headers are right"
    return (CheckpointWarning(code="wrong-total-size", text=text),)


def _read_config(root: Path) -> tuple[Mapping[str, object] | None, tuple[CheckpointWarning, ...]]:
    path = root / "config.json"
    if not _is_there(path):
        return None, ()
    try:
        config = parse_json(read_beside(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except InvalidCheckpointError:
        raise
    except (OSError, ValueError) as error:
        reason = f"config.json cannot be read ({error}): tied weights are unknown"
        return None, (CheckpointWarning(code="bad-config", text=reason),)
    if not isinstance(config, dict):
        return None, (
            CheckpointWarning(code="bad-config", text="config.json is not an object: tied weights are unknown"),
        )
    return config, ()
