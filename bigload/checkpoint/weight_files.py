"""Choice of the files of a folder that are its checkpoint, as the libraries that wrote it choose; if none, why."""

from __future__ import annotations

import re
from pathlib import Path

from bigload.checkpoint.formats.gguf.splits import split_files
from bigload.checkpoint.formats.registry import DCP, FORMATS, LIBRARY_BASES
from bigload.errors import CheckpointNotFoundError
from bigload.units import counted

_SHARD_OF_MANY = re.compile(r".*-of-\d+\.\w+")


def main_file(root: Path, names: list[str], path: str) -> str | None:
    """Return the file or index by which transformers and others load a folder."""
    for form in FORMATS.values():
        indexes = [name for name in names if name.endswith(form.index_suffix)]
        for file in (form.whole_file, form.default_index):
            if file in names:
                return file
        if len(indexes) > 1:
            for base in LIBRARY_BASES:
                if f"{base}{form.index_suffix}" in indexes:
                    return f"{base}{form.index_suffix}"
            hint = f"name the one you mean: {root / indexes[0]}"
            raise CheckpointNotFoundError(path, f"{len(indexes)} index files, which differ", details=indexes, hint=hint)
        if indexes:
            return indexes[0]
    return None


def main_file_of_library(names: list[str]) -> str | None:
    """Return the file by which diffusers or PEFT loads a folder, whatever variants are beside it; else a lone index."""
    files = (f"{base}{suffix}" for form in FORMATS.values() for base in LIBRARY_BASES for suffix in form.suffixes)
    indexes = [name for name in names if name.endswith(".index.json")]
    return next((file for file in files if file in names), indexes[0] if len(indexes) == 1 else None)


def files_of_first_form(names: list[str]) -> list[str]:
    """Return the safetensors files among `names`; torch's without those, for a training leaves some beside them."""
    found = ([name for name in names if name.endswith(form.suffixes)] for form in FORMATS.values())
    return next((files for files in found if files), [])


def are_whole(files: list[str]) -> bool:
    """Return whether `files` are one checkpoint without an index: a single file, or all of a split GGUF."""
    if files and files[0].endswith(".gguf") and set(files) == set(split_files(files[0])):
        return True
    return len(files) == 1 and not _SHARD_OF_MANY.fullmatch(files[0])


def one_to_name(root: Path, files: list[str]) -> str | None:
    """Return the advice to name a file, where some are checkpoints of their own."""
    whole = [name for name in files if not _SHARD_OF_MANY.fullmatch(name)]
    return f"name the one you mean: {root / whole[0]}" if whole else None


def why_none(names: list[str]) -> str:
    """Return why no file among `names` is a checkpoint."""
    for form in FORMATS.values():
        files = [name for name in names if name.endswith(form.suffixes)]
        if files and form is DCP:
            return f"{counted(len(files), '.distcp file')} but no {DCP.whole_file} that says which tensor is where"
        if files:
            found = counted(len(files), f"{' or '.join(form.suffixes)} file")
            return f"{found} but no index ({form.default_index}) that says which tensor is where"
    return f"the folder holds neither {' nor '.join(form.whole_file for form in FORMATS.values())} nor an index"


def advice_for(root: Path, names: list[str]) -> str | None:
    """Return what to do with a folder of weights that is no checkpoint in itself, if it is one that is known."""
    is_there = any(name.startswith("rank-0/") for name in names) or (root / "rank-0").is_dir()
    if "ranks.json" in names and is_there:
        return f"it was resharded for tensor-parallel ranks; name the folder of one of them: {root / 'rank-0'}"
    if any(name.endswith(".distcp") for name in names):
        return f"torch.distributed.checkpoint writes {DCP.whole_file} last: it was interrupted, or not all was copied"
    if "index.json" in names and any(name.endswith(".dat") for name in names):
        return "it is an offload folder as accelerate has them; in Python: bigload.OffloadFolder.open"
    return None
