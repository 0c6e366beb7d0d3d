"""Copies by the kernel: blocks shared between files, or copied by a file server.

XFS, Btrfs and bcachefs let two files share blocks until one of them is written (FICLONERANGE of ioctl_ficlonerange(2)):
nothing is read or written, but offsets in both files have to be equal within a block. Network file systems copy on the
server (copy_file_range(2)), without sending a byte. On other file systems the kernel reads and writes like anyone
else, and slower than `writer.py`, so it is not used.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

from bigload.checkpoint.model import Span, TensorInfo
from bigload.layouts.output import DATA_ALIGNMENT, OutputFile, OutputTensor
from bigload.layouts.writing.windows import DataRanges
from bigload.machine.files.file_systems import file_system_of
from bigload.units import MIB

_FICLONERANGE = 0x4020940D
_CLONING = frozenset(("bcachefs", "btrfs", "xfs"))
_COPYING = frozenset(("ceph", "cifs", "nfs", "nfs4", "smb3"))
_LEAST_BYTES = MIB  # for less, a read and a write are as quick
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ETXTBSY)


class KernelCopy(Enum):
    """Kind of copy that the kernel offers between two folders."""

    NOTHING = "nothing"
    CLONE = "share blocks"
    COPY = "copy on the server"


def kernel_copy(source: Path, target: Path) -> KernelCopy:
    """Return the kind of copy between files below two existing folders, by their file system."""
    system = file_system_of(target)
    if system is None or source.stat().st_dev != target.stat().st_dev:
        return KernelCopy.NOTHING
    if system.kind in _CLONING:
        return KernelCopy.CLONE
    return KernelCopy.COPY if system.kind in _COPYING else KernelCopy.NOTHING


def data_offset(tensors: Sequence[OutputTensor]) -> int:
    """Return where in a block the data of a file has to start so that most of it lies in blocks as in the source."""
    weights: Counter[int] = Counter()
    for span, at in _copyable_ranges(tensors, 0):
        weights[(span.start - at) % DATA_ALIGNMENT] += span.num_bytes
    fitting = [(num_bytes, offset) for offset, num_bytes in weights.items() if offset % 8 == 0]
    return max(fitting)[1] if fitting else 0


def copy_in_kernel(
    output: OutputFile, descriptor: int, source_of: dict[str, int], kind: KernelCopy, *, block_bytes: int
) -> DataRanges:
    """Let the kernel copy what it can of `output` to the open file `descriptor`; return the ranges that it has copied.

    Ranges are whole blocks. After a refusal nothing else is tried.
    """
    done: list[tuple[int, int]] = []
    if kind is KernelCopy.NOTHING:
        return DataRanges(())
    copy = _clone if kind is KernelCopy.CLONE else _copy
    for span, at in _copyable_ranges(output.tensors, output.header_bytes):
        begin = -(-at // block_bytes) * block_bytes
        end = (at + span.num_bytes) // block_bytes * block_bytes
        start = span.start + begin - at
        if end - begin < _LEAST_BYTES or (kind is KernelCopy.CLONE and start % block_bytes):
            continue
        try:
            copy(source_of[span.file], start, descriptor, begin, end - begin)
        except OSError as error:
            if error.errno in _NOT_HERE:
                break
            raise
        done.append((begin, end))
    return DataRanges(tuple(done))


def _copyable_ranges(tensors: Sequence[OutputTensor], at: int) -> Iterator[tuple[Span, int]]:
    """Yield ranges that are written as they are stored, and where they go; adjacent ranges are merged."""
    last: tuple[Span, int] | None = None
    for tensor in tensors:
        source = tensor.source
        is_changed = tensor.is_cast or tensor.parts
        span = source.span if isinstance(source, TensorInfo) and not (is_changed or source.strides) else None
        if last is not None and span is not None and (last[0].file, last[0].stop) == (span.file, span.start):
            last = Span(span.file, last[0].start, span.stop), last[1]
        else:
            if last is not None:
                yield last
            last = (span, at) if span is not None else None
        at += tensor.num_bytes
    if last is not None:
        yield last


def _clone(source: int, start: int, target: int, at: int, num_bytes: int) -> None:
    import fcntl  # not on Windows, which needs this module to verify

    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, start, num_bytes, at))


def _copy(source: int, start: int, target: int, at: int, num_bytes: int) -> None:
    while num_bytes:
        count = os.copy_file_range(source, target, num_bytes, start, at)
        if count == 0:
            raise OSError(errno.EINVAL, "the source ended")
        start, at, num_bytes = start + count, at + count, num_bytes - count
