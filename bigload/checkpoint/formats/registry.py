"""Registry of checkpoint formats by name. A new one is a module with a header reader, and a line in `FORMATS`.

Everything above works on byte ranges of tensors, so that a format whose tensors are stored as plain bytes is inspected,
planned, loaded and resharded as soon as its headers are read. Modules are imported when a file of theirs is opened:
zipfile and pickle take time that safetensors do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

from bigload.checkpoint.byte_source import ReadRange, scheme_of
from bigload.checkpoint.model import Checkpoint, ShardHeader
from bigload.checkpoint.sources.listings import identity_of
from bigload.checkpoint.sources.small_reads import GUESSED_BYTES, opened_range
from bigload.errors import InvalidCheckpointError, Problem, ReadError, UnsupportedFormatError

ReadHeader = Callable[[ReadRange, int, str], ShardHeader]
"""Read the header of a file of so many bytes (not 0), which the checkpoint calls by a name.

It raises FormatError where the file breaks the format, LegacyFileError for a bare pickle, and what `ReadRange` does."""


_LFS_POINTER = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md


class FormatError(Exception):
    """A file breaks its format, or holds what is not read: a stable `code` and one sentence, as in a `Problem`.

    `problems` has all pairs of code and text where there are more than one.
    """

    def __init__(self, code: str, text: str, *, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.problems = problems or [(code, text)]

    @classmethod
    def of(cls, problems: Sequence[tuple[str, str]]) -> FormatError:
        return cls(*problems[0], problems=problems)


def refuse_lfs_pointer(head: bytes) -> None:
    """Raise FormatError if a file that begins with `head` is what git leaves where Git LFS is not installed."""
    if head.startswith(_LFS_POINTER):
        raise FormatError("git-lfs-pointer", "a pointer of Git LFS, not the file itself; fetch it with git lfs pull")


class LegacyFileError(Exception):
    """The file is a bare pickle, as torch before 1.6 wrote them: valid, but its parts cannot be read by themselves."""


class CheckpointFormat(NamedTuple):
    """A file format of checkpoints: how its files are recognised, and how their headers are read.

    Attributes:
        name: `Shard.format` of its files, as documents have it.
        title: What tables call its files.
        suffixes: Of its files. In a cache files are named by digests, so the name in the checkpoint decides.
        whole_file: File of a folder that holds a whole checkpoint.
        index_suffix: Of an index of several files, in JSON.
        default_index: Index that is taken where a folder has several.
        reader: The function that reads a header, or the module that has it as `read_header`.
        has_data_read: Whether `load` and `reshard` read its data; of the others only headers are.
        is_written: Whether `reshard` writes this format, so that resharding can be a mere copy.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    whole_file: str
    index_suffix: str
    default_index: str
    reader: ReadHeader | str
    has_data_read: bool = True
    is_written: bool = False


SAFETENSORS = CheckpointFormat(
    name="safetensors",
    title="safetensors",
    suffixes=(".safetensors",),
    whole_file="model.safetensors",
    index_suffix=".safetensors.index.json",
    default_index="model.safetensors.index.json",
    reader="bigload.checkpoint.formats.safetensors",
    is_written=True,
)

TORCH = CheckpointFormat(
    name="torch",
    title="torch archive",
    suffixes=(".bin", ".pt", ".pth"),
    whole_file="pytorch_model.bin",
    index_suffix=".bin.index.json",
    default_index="pytorch_model.bin.index.json",
    reader="bigload.checkpoint.formats.torch_archive",
)

GGUF = CheckpointFormat(
    name="gguf",
    title="GGUF",
    suffixes=(".gguf",),
    whole_file="model.gguf",
    index_suffix=".gguf.index.json",
    default_index="model.gguf.index.json",
    reader="bigload.checkpoint.formats.gguf.header",
    has_data_read=False,
)

DCP = CheckpointFormat(
    name="dcp",
    title="distributed checkpoint",
    suffixes=(".metadata", ".distcp"),
    whole_file=".metadata",
    index_suffix=".distcp.index.json",
    default_index="model.distcp.index.json",
    reader="bigload.checkpoint.formats.dcp",
)

FORMATS = {each.name: each for each in (SAFETENSORS, TORCH, GGUF, DCP)}
"""In the order in which a folder that has several is searched."""


def format_of(file: str) -> CheckpointFormat | None:
    """Return the format that the name `file` stands for, None if there is none."""
    return next((each for each in FORMATS.values() if file.endswith(each.suffixes)), None)


def weight_suffixes() -> tuple[str, ...]:
    """Return the suffixes of the files of all formats."""
    return tuple(suffix for each in FORMATS.values() for suffix in each.suffixes)


LIBRARY_BASES = ("diffusion_pytorch_model", "adapter_model")
"""Under which diffusers and PEFT look for weights, whatever the format."""


def main_files() -> tuple[str, ...]:
    """Return the names by which a folder is a checkpoint, in the order in which they are looked for."""
    return tuple(name for each in FORMATS.values() for name in (each.default_index, each.whole_file))


def check_data_is_read(checkpoint: Checkpoint) -> None:
    """Raise if `checkpoint` is in a format of which only headers are read."""
    for form in {shard.format for shard in checkpoint.shards}:
        if form in FORMATS and not FORMATS[form].has_data_read:
            title = FORMATS[form].title
            hint = (
                "inspect and plan read it, and reshard decodes it: bigload reshard FILE OUT --dtype bf16; then load OUT"
            )
            raise UnsupportedFormatError(
                checkpoint.path, f"of {title} files only headers are read, not data", hint=hint
            )


def read_shard_header(
    location: Path, file: str, form: CheckpointFormat | None = None, *, guess: int = GUESSED_BYTES
) -> ShardHeader:
    """Read and validate the header of the file at `location`, in the format of its name, or else as safetensors.

    A remote file's first `guess` bytes are fetched at once.

    Raises:
        LegacyFileError: it is a bare pickle of torch before 1.6.
        OSError: it cannot be opened or read.
    """
    reader = (form or format_of(file) or SAFETENSORS).reader
    read = cast("ReadHeader", import_module(reader).read_header) if isinstance(reader, str) else reader
    scheme = scheme_of(location)
    try:
        identity = identity_of(location)
        with opened_range(location, identity, guess=guess) as read_range:
            if identity.num_bytes == 0:
                raise FormatError("file-empty", "the file is empty")
            header = read(read_range, identity.num_bytes, file)
        return header._replace(shard=replace(header.shard, etag=identity.etag)) if identity.etag else header
    except FormatError as error:
        problems = [Problem(code=code, file=file, text=text) for code, text in error.problems]
        raise InvalidCheckpointError(location, problems) from None
    except ReadError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        if scheme.is_local and location.exists() and not location.is_file():
            problem = Problem(code="not-a-file", file=file, text="not a regular file")
            raise InvalidCheckpointError(location, [problem]) from None
        raise
