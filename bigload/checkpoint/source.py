"""Open a checkpoint: a file, a folder or an index, on this machine or at a remote location."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.formats.dcp_safetensors import joined_parts, part_files
from bigload.checkpoint.formats.gguf.splits import split_files, split_problems
from bigload.checkpoint.formats.registry import DCP, FORMATS, main_files, weight_suffixes
from bigload.checkpoint.formats.unsupported import (
    adapter_warning,
    refuse_deepspeed,
    refuse_other_file,
    refuse_other_folder,
)
from bigload.checkpoint.index import ShardIndex, read_beside, read_index, resolve_shard
from bigload.checkpoint.location import locate
from bigload.checkpoint.model import (
    AssembledTensor,
    Checkpoint,
    CheckpointWarning,
    Component,
    ShardHeader,
    StoredTensor,
    StoredTensors,
    TensorInfo,
    sizes_of,
)
from bigload.checkpoint.pipeline import (
    MODULES_FILE,
    PIPELINE_FILE,
    as_one_checkpoint,
    listed_components,
    listed_modules,
)
from bigload.checkpoint.records.part import part_warning
from bigload.checkpoint.shard_headers import (
    OnHeader,
    contradictions,
    meanwhile,
    on_header_read,
    read_headers,
    stored_twice,
)
from bigload.checkpoint.sources.listings import is_there, listed
from bigload.checkpoint.weight_files import (
    advice_for,
    are_whole,
    files_of_first_form,
    main_file,
    main_file_of_library,
    one_to_name,
    why_none,
)
from bigload.documents import MAX_CONFIG_BYTES, parse_json
from bigload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
    LegacyPickleError,
    Problem,
    ReadError,
)

DELTA_FILE = "bigload-delta.json"
"""See `delta.py`, which is imported when there is one."""

_all_tensors: ContextVar[bool] = ContextVar("all_tensors", default=False)


def open_checkpoint(
    path: str | Path,
    *,
    on_header: OnHeader | None = None,
    trusts_recent: bool = False,
    all_tensors: bool = False,
) -> Checkpoint:
    """Open the checkpoint at `path` by reading and validating its headers.

    `path` is a folder with `model.safetensors` or one `*.safetensors.index.json`, such an index, a `.safetensors` file,
    or a location of a registered scheme (`checkpoint.byte_source`), which is read by byte ranges. `org/model`, which
    may go on with `@revision` and `/subfolder`, is a repository of the Hugging Face Hub (`hf://org/model`), unless it
    is a path that exists; the Hugging Face cache comes first. What
    `torch.save` wrote (`.bin`, `.pt`, `.pth`; `pytorch_model.bin.index.json`) is read alike, and executes nothing; a
    folder's safetensors come first, as with transformers. An index of another name is taken where it is the only one.
    Of what torch.distributed.checkpoint saved (`.metadata` and the files it names; or `shard-*.safetensors`), tensors
    are joined from the parts that ranks hold; of `.metadata`, the model's tensors are taken, by the names that they
    have in its state dict.
    A pipeline of diffusers (`model_index.json`), or of sentence-transformers (`modules.json`) where another module has
    weights too, is one checkpoint of all its `components`.

    Args:
        path: What to open.
        on_header: Called after each header of a remote checkpoint, by the calling thread.
        trusts_recent: Take the listing of a folder in an object store that was made within the last ten minutes, and
            send no request: for looking at it. Before data are read, the service is asked anyway.
        all_tensors: Of a distributed checkpoint, also take what is not the model's, such as the state of an optimizer;
            every tensor then has its whole name.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that is a checkpoint.
        UnsupportedFormatError: weights in another format; it says what it is.
        InvalidCheckpointError: files break the format or contradict the index; `.problems` lists them all.
        LegacyPickleError: files of torch before 1.6, which have no parts that could be read by themselves.
        AccessDeniedError: a service refuses it to this user.
        CheckpointError: a file cannot be read.
    """
    token, second = on_header_read.set(on_header), _all_tensors.set(all_tensors)
    try:
        place = locate(path)
        if not scheme_of(place).is_local:
            return _open_remote(place, trusts_recent=trusts_recent)
        if place.is_dir():
            return _open_folder(place, str(path))
        if place.suffix == ".json":
            return _open_sharded(place.parent, place.name, str(path))
        refuse_other_file(place)
        return _open_files(place.parent, None, [place.name], str(path))
    except CheckpointError:
        raise
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointNotFoundError(path, error.message, hint=error.hint) from error
        raise CheckpointError(error.message, hint=error.hint) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    finally:
        on_header_read.reset(token)
        _all_tensors.reset(second)


def open_files(files: Sequence[Path]) -> Checkpoint:
    """Open the checkpoint that these local files of one folder are, whatever else is there."""
    return _open_files(files[0].parent, None, [file.name for file in files], str(files[0].parent))


def _open_remote(location: Path, *, trusts_recent: bool) -> Checkpoint:
    scheme = scheme_of(location)
    path = address_text(location)
    if location.name.endswith(".json"):
        return _open_sharded(location.parent, location.name, path)
    if location.name.endswith(weight_suffixes()):
        return _open_files(location.parent, None, [location.name], path)
    if scheme.list_folder is None:
        return _open_by_known_names(location, path)
    if trusts_recent and (recent := scheme.recent_listing(location)):
        with suppress(CheckpointError, ReadError), listed(location, recent):  # files may have been added or replaced
            return _open_names(location, sorted(recent), path)
    files = scheme.list_folder(location)
    if not files:
        raise CheckpointNotFoundError(path, "no such folder, or it is empty")
    with listed(location, files):
        return _open_names(location, sorted(files), path)


def _open_folder(root: Path, path: str) -> Checkpoint:
    names = sorted(file.name for file in root.iterdir() if not file.is_dir())
    return _open_delta(root, path) if DELTA_FILE in names else _open_names(root, names, path)


def _open_names(root: Path, listed: list[str], path: str) -> Checkpoint:
    """Open the checkpoint in a folder whose files are `listed`, with those of its folders as `folder/name`."""
    names = [name for name in listed if "/" not in name]
    main = main_file(root, names, path)
    if main is None and PIPELINE_FILE in names:
        return _open_pipeline(root, listed, path)
    if MODULES_FILE in names and (found := _open_modules(root, listed, path)):
        return found
    if main := main or main_file_of_library(names):
        if main.endswith(".index.json"):
            return _open_sharded(root, main, path)
        return _open_files(root, None, [main], path)
    refuse_deepspeed(root, path, names)
    if parts := part_files(names):
        return _open_parts(root, parts, path)
    files = files_of_first_form(names)
    advice = advice_for(root, listed)
    if advice is None and are_whole(files):
        return _open_files(root, None, files[:1], path)
    if advice is None and not files:
        refuse_other_folder(path, names)
    raise CheckpointNotFoundError(path, why_none(names), hint=advice or one_to_name(root, files))


def _open_delta(root: Path, path: str) -> Checkpoint:
    """Open a delta and its base, both on this machine."""
    from bigload.checkpoint.records.delta import open_delta

    return open_delta(
        root,
        path,
        open_folder=lambda place: _open_folder(place, str(place)),
        open_files=lambda files: _open_files(root, DELTA_FILE, list(files), path),
    )


def _open_pipeline(root: Path, listed: list[str], path: str) -> Checkpoint:
    """Open every component of a pipeline of diffusers, as one checkpoint."""
    components: list[Component] = []
    warnings: list[CheckpointWarning] = []
    for component in listed_components(root, path):
        shown = f"{path.rstrip('/')}/{component.name}"
        names = _names_in(root, component.name, listed, path)
        if any(name.endswith(weight_suffixes()) for name in names):
            components.append(component._replace(checkpoint=_open_names(root / component.name, names, shown)))
            continue
        refuse_other_folder(shown, names)
        components.append(component)
        if not names or "config.json" in names:
            missing = "no folder" if not names else "a config.json and no weights"
            text = f"{component.name} ({component.class_name}) has {missing} here: the pipeline is not whole"
            warnings.append(CheckpointWarning(code="missing-component", text=text))
    if not any(component.checkpoint for component in components):
        hint = "name the folder that save_pretrained of diffusers wrote, or fetch the repository whole"
        raise CheckpointNotFoundError(path, "a diffusers pipeline none of whose components has weights", hint=hint)
    return as_one_checkpoint(path, root, components, warnings)


def _open_modules(root: Path, listed: list[str], path: str) -> Checkpoint | None:
    """Open the modules of sentence-transformers as one checkpoint; `None` if it is that of the folder itself."""
    modules: list[Component] = []
    warnings: list[CheckpointWarning] = []
    for listed_module in listed_modules(root, path):
        module, folder = listed_module, listed_module.name
        names = _names_in(root, folder, listed, path) if folder else [name for name in listed if "/" not in name]
        if any(name.endswith(weight_suffixes()) for name in names):
            shown = f"{path.rstrip('/')}/{folder}" if folder else path
            try:
                opened = _open_names(root / folder, [name for name in names if name != MODULES_FILE], shown)
            except CheckpointError as error:
                if not folder:
                    raise
                text = f"{folder} ({module.class_name}) is not counted: {error.message}"
                warnings.append(CheckpointWarning(code="unread-module", text=text))
            else:
                module = module._replace(checkpoint=opened)
        modules.append(module)
    if any(module.checkpoint and module.name for module in modules):
        return as_one_checkpoint(path, root, modules, warnings)
    own = next((module.checkpoint for module in modules if module.checkpoint), None)
    return replace(own, warnings=(*own.warnings, *warnings)) if own and warnings else None


def _names_in(root: Path, folder: str, listed: list[str], path: str) -> list[str]:
    """Return the files in a component's folder; a pipeline in a pipeline is none, so links cannot make it endless."""
    if not scheme_of(root).is_local:
        return [name.removeprefix(f"{folder}/") for name in listed if name.startswith(f"{folder}/")]
    place = resolve_shard(root, folder)
    if isinstance(place, str):
        raise InvalidCheckpointError(
            path, [Problem(code="unsafe-path", file=PIPELINE_FILE, text=f"the component {folder!r} {place}")]
        )
    found = sorted(file.name for file in place.iterdir() if not file.is_dir()) if place.is_dir() else []
    return [name for name in found if name not in (PIPELINE_FILE, MODULES_FILE)]


def _open_by_known_names(root: Path, path: str) -> Checkpoint:
    """Open a checkpoint in a location that cannot be listed."""
    for form in FORMATS.values():
        if is_there(root / form.whole_file):
            return _open_files(root, None, [form.whole_file], path)
        if is_there(root / form.default_index):
            return _open_sharded(root, form.default_index, path)
    raise CheckpointNotFoundError(path, f"none of {', '.join(main_files())} can be read there")


def _open_sharded(root: Path, index_file: str, path: str) -> Checkpoint:
    index = read_index(root / index_file)
    if not index.weight_map:
        text = "the weight_map is empty"
        raise InvalidCheckpointError(path, [Problem(code="bad-index", file=index_file, text=text)])
    return _open_files(root, index_file, sorted(set(index.weight_map.values())), path, index)


def _open_files(
    root: Path, index_file: str | None, files: list[str], path: str, index: ShardIndex | None = None
) -> Checkpoint:
    if files == [DCP.whole_file]:
        return _open_distributed(root, path)
    if index_file is None and len(files) == 1:
        files = split_files(files[0])
    with meanwhile(partial(_read_config, root), is_local=scheme_of(root).is_local) as read_config:
        headers, problems, legacy = read_headers(root, files, index_file, index)
    tensors = StoredTensors.of_all([header.tensors for header in headers])
    if len(tensors) != sum(len(header.tensors) for header in headers):
        problems += stored_twice(headers)
        tensors = StoredTensors.of_all([header.tensors for header in reversed(headers)])  # the first counts
    problems += split_problems([header.shard for header in headers], len(tensors), is_whole=not problems)
    if index is not None and not legacy:
        is_listed = all({*map(index.weight_map.get, each.tensors)} <= {each.shard.file} for each in headers)
        if not is_listed or len(tensors) != len(index.weight_map):
            files_of = {name: tensor.span.file for name, tensor in tensors.items()}
            problems += contradictions(index, files_of, {header.shard.file for header in headers})
    if problems:
        raise InvalidCheckpointError(path, problems)
    if legacy:
        raise LegacyPickleError(path, [root / file for file in files], legacy=legacy)
    config, config_warnings = read_config()
    if headers and all(header.shard.format == "gguf" for header in headers):
        config, tensors, gguf_warnings = _as_transformers(headers, tensors, config)
        config_warnings += gguf_warnings
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
            *part_warning(root),
        ),
    )


def _as_transformers(
    headers: Sequence[ShardHeader], tensors: Mapping[str, TensorInfo], config: Mapping[str, object] | None
) -> tuple[Mapping[str, object] | None, Mapping[str, TensorInfo], tuple[CheckpointWarning, ...]]:
    """Return config and tensors of a GGUF model as transformers has them; `config` is that of a file beside it."""
    from bigload.checkpoint.formats.gguf.config import config_of, family_of
    from bigload.checkpoint.formats.gguf.names import renamed

    shards = [header.shard for header in headers]
    first = next((shard for shard in shards if shard.metadata.get("split.no", "0") == "0"), shards[0])
    family = family_of(first, tensors)
    if family is None:
        found = first.metadata.get("general.architecture", "")
        text = f"the architecture {found!r:.100} is not known: plans count weights, but not KV cache and activations"
        return config, tensors, (CheckpointWarning(code="gguf-weights-only", text=text),)
    several = list(renamed(family, tensors.values()))
    named = {tensor.name: tensor for tensor in several}
    if len(named) < len(several):
        text = "two tensors would have one name of transformers: the names of the file are kept"
        return config, tensors, (CheckpointWarning(code="gguf-names", text=text),)
    return config or config_of(first, family, named), named, ()


def _open_distributed(root: Path, path: str) -> Checkpoint:
    """Open the folder that torch.distributed.checkpoint saved to."""
    # Imported here: other formats need neither the unpickler nor zipfile.
    from bigload.checkpoint.formats.dcp_folder import DistributedFolder

    folder = DistributedFolder(all_tensors=_all_tensors.get())
    metadata_form, items_form = (DCP._replace(reader=each) for each in (folder.read_metadata, folder.read_items))
    first, problems, _ = read_headers(root, [DCP.whole_file], None, form=metadata_form)
    headers, of_items, _ = read_headers(root, sorted(folder.files), DCP.whole_file, form=items_form)
    problems += of_items
    found = ({}, problems) if problems else folder.joined()
    return _of_pieces(root, path, [*first, *headers], found, index_file=DCP.whole_file)


def _open_parts(root: Path, files: list[str], path: str) -> Checkpoint:
    """Open what the ranks of a training saved as parts in safetensors."""
    headers, problems, _ = read_headers(root, files, None)
    return _of_pieces(root, path, headers, ({}, problems) if problems else joined_parts(headers))


def _of_pieces(
    root: Path,
    path: str,
    headers: Sequence[ShardHeader],
    found: tuple[Mapping[str, StoredTensor], Sequence[Problem]],
    *,
    index_file: str | None = None,
) -> Checkpoint:
    """Return the checkpoint of the tensors `found`, whose pieces the files with these headers hold."""
    stored, problems = found
    if problems:
        raise InvalidCheckpointError(path, problems)
    forms = {name: each.form if isinstance(each, AssembledTensor) else each for name, each in stored.items()}
    assembled = {name: each for name, each in stored.items() if isinstance(each, AssembledTensor)}
    config, warnings = _read_config(root)
    return Checkpoint(
        path=path,
        root=root,
        index_file=index_file,
        shards=tuple(header.shard for header in headers),
        tensors=forms,
        config=config,
        warnings=(*(warning for header in headers for warning in header.warnings), *warnings),
        assembled=assembled,
    )


def _total_size_warning(index: ShardIndex | None, tensors: Mapping[str, TensorInfo]) -> Iterable[CheckpointWarning]:
    """Compare the index's claim with the headers, which alone decide.

    No loader reads this number, and checkpoints that everyone uses get it wrong (RedPajama-7B by 117 MB, in a float),
    so it is a warning and no error.
    """
    if index is None or index.total_size is None:
        return ()
    total = sum(sizes_of(tensors).values())
    if index.total_size == total:
        return ()
    stored_once = {(tensor.span, tensor.shape): tensor.num_bytes for tensor in tensors.values()}
    if index.total_size == sum(stored_once.values()):  # tied weights count once, or by each of their names
        return ()
    text = f"the index claims {index.total_size} bytes of tensors, the headers add up to {total}; the headers are right"
    return (CheckpointWarning(code="wrong-total-size", text=text),)


def _read_config(root: Path) -> tuple[Mapping[str, object] | None, tuple[CheckpointWarning, ...]]:
    path = root / "config.json"
    if not is_there(path):
        return None, ()
    try:
        config = parse_json(read_beside(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        if not scheme_of(root).is_local and isinstance(error, OSError):
            raise
        reason = f"config.json cannot be read ({error}): tied weights are unknown"
        return None, (CheckpointWarning(code="bad-config", text=reason),)
    if not isinstance(config, dict):
        return None, (
            CheckpointWarning(code="bad-config", text="config.json is not an object: tied weights are unknown"),
        )
    return config, ()
