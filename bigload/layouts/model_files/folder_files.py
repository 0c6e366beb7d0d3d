"""Files to fetch with a model: its shards, and what stands beside them. The rule goes by names and sizes alone.

Left out are other forms of the same weights (torch files beside safetensors, `original/`, `onnx/`, GGUF ...), states of
a training, and hidden files. Weights of other parts of the model come along, `2_Dense/model.safetensors` for one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath

from bigload.checkpoint.byte_source import SourceIdentity, scheme_of
from bigload.checkpoint.formats.registry import weight_suffixes
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.pipeline import components_of, has_modules, in_pipeline
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import InvalidCheckpointError, Problem, ReadError
from bigload.layouts.model_files.other_weights import FOREIGN_SUFFIXES, MAX_CARRIED_BYTES, LeftOut
from bigload.layouts.writing.journal import PREFIX
from bigload.units import counted, format_size

_MAX_FILES = 100_000
_OTHER_FORMS = frozenset({"coreml", "flax", "gguf", "metal", "mlx", "onnx", "openvino", "original", "tensorflow"})
_OTHER_SUFFIXES = FOREIGN_SUFFIXES | {".ckpt", ".mlmodel", ".mlpackage", ".onnx_data", ".pdparams", ".tar"}
_TRAINING = re.compile(r"checkpoint-\d+|global_step\d+|runs|(optimizer|scheduler|scaler|rng_state|training_args)\b.*")
_WHOLE_MODEL = re.compile(r"(model|pytorch_model|consolidated|diffusion_pytorch_model|adapter_model)\b.*")
_KNOWN_NAMES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "adapter_config.json", "README.md"),
)
"""Where a service cannot list a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """Files in the folder of a checkpoint that are to be fetched, by their names in it.

    Attributes:
        left: Files that are left out, and the reason.
        sizes: Bytes of all of them.
    """

    shards: Mapping[str, SourceIdentity]
    beside: Mapping[str, SourceIdentity]
    left: Mapping[str, LeftOut] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each reason for leaving files out."""
        for reason in LeftOut:
            names = [name for name, why in self.left.items() if why is reason]
            if names:
                size = format_size(sum(self.sizes[name] for name in names))
                yield f"{counted(len(names), 'file')} left out ({size}): {reason}, {names[0]} for one"


def folder_files(checkpoint: Checkpoint, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> FolderFiles:
    """Return the files to fetch. `include` replaces the rule; patterns are of whole names, as in `hf download`."""
    listing = _listing(checkpoint)
    own = {shard.file for shard in checkpoint.shards}
    listing |= {file: _identity(checkpoint, file) for file in own - listing.keys()}
    left: dict[str, LeftOut] = {}
    if include:
        names = [name for name in listing if _matches(name, include) and _is_taken(name)]
    else:
        left = dict(_left_out(checkpoint, listing))
        names = [name for name in listing if name not in left and (name in own or _is_taken(name))]
        if _is_file(checkpoint):
            names = [name for name in names if name in own or name in _KNOWN_NAMES or name.startswith("tokenizer")]
            left = {}
    names = sorted(name for name in names if not _matches(name, exclude))
    return FolderFiles(
        shards={name: listing[name] for name in names if name in own},
        beside={name: listing[name] for name in names if name not in own},
        left=left,
        sizes={name: listing[name].num_bytes for name in left},
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)


def _is_taken(name: str) -> bool:
    """Return whether `name` is neither hidden nor a manifest: the copy gets its own."""
    path = PurePosixPath(name)
    return not any(part.startswith(".") for part in path.parts) and path.name != MANIFEST_FILE


def _is_file(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is one file that was named by itself, and may lie among anything."""
    return checkpoint.index_file is None and checkpoint.path.endswith(weight_suffixes())


def _left_out(checkpoint: Checkpoint, listing: Mapping[str, SourceIdentity]) -> Iterator[tuple[str, LeftOut]]:
    own = {shard.file for shard in checkpoint.shards}
    parents = {".", *(str(PurePosixPath(file).parent) for file in own)}
    components = {component.name for component in checkpoint.components}  # one is called scheduler
    indexes = {checkpoint.index_file, *(in_pipeline(each, name).index_file for name, each in components_of(checkpoint))}
    folders = {str(PurePosixPath(name).parent) for name in listing if name.endswith(".safetensors")}
    carried: dict[str, int] = {}
    for name in sorted(listing.keys() - own):
        path = PurePosixPath(name)
        if not _is_taken(name):
            continue
        if path.parts[0] in _OTHER_FORMS or path.suffix in _OTHER_SUFFIXES:
            yield name, LeftOut.FORM
        elif any(_TRAINING.fullmatch(part) for part in path.parts if part not in components):
            yield name, LeftOut.TRAINING
        elif name.endswith((".index.json", *weight_suffixes())):
            is_beside_own = str(path.parent) in parents and name not in indexes
            is_second_form = str(path.parent) in folders and ".safetensors" not in name
            is_in_pipeline = bool(checkpoint.components) and not has_modules(checkpoint)
            is_whole_pipeline = is_in_pipeline and str(path.parent) == "."
            if is_whole_pipeline or (_WHOLE_MODEL.fullmatch(path.name) and (is_beside_own or is_second_form)):
                yield name, LeftOut.FORM
            elif path.suffix != ".json":
                carried[name] = listing[name].num_bytes
    if sum(carried.values()) > MAX_CARRIED_BYTES:
        yield from ((name, LeftOut.LARGE) for name in carried)


def _listing(checkpoint: Checkpoint) -> dict[str, SourceIdentity]:
    """Return the files of the checkpoint's folder, without links that leave it."""
    root, scheme = checkpoint.root, scheme_of(checkpoint.root)
    if scheme.list_folder is not None:
        found = dict(scheme.list_folder(root))
        places = {name: resolve_shard(root, name) for name in found}
        problems = [
            Problem(code="unsafe-path", file=name, text=f"the file name {name!r:.200} {place}")
            for name, place in places.items()
            if isinstance(place, str)
        ]
        if problems:
            raise InvalidCheckpointError(checkpoint.path, problems)
        return found
    if scheme.is_local:
        return {name: scheme.identity(root / name) for name in islice(_local_names(root), _MAX_FILES)}
    known = {}
    for name in (*_KNOWN_NAMES, *filter(None, [checkpoint.index_file])):
        try:
            known[name] = scheme.identity(root / name)
        except ReadError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return known


def _local_names(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name).relative_to(root).as_posix()
            place = resolve_shard(root, file)
            if not isinstance(place, str) and place.is_file() and not name.startswith(PREFIX):
                yield file


def _identity(checkpoint: Checkpoint, file: str) -> SourceIdentity:
    return scheme_of(checkpoint.root).identity(checkpoint.root / file)
