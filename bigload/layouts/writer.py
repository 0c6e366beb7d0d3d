"""Write output files: header, then byte ranges of the sources, flushed to the disk and compared with them.

The unit of work is a part of a file: it is copied, waited for until the disk has it, and read back from there. While
one thread waits or reads back, another copies. Each thread has two blocks of memory, and all together at most
`MAX_BUFFER_BYTES`, whatever the size of the files. Holes in a source stay holes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigload.checkpoint.model import Span
from bigload.errors import ReadError, VerificationError, WriteError
from bigload.layouts.device_folders import OutputFile
from bigload.layouts.extents import data_extents
from bigload.loading.bytesource import fill
from bigload.loading.events import Tally
from bigload.loading.workers import run_jobs
from bigload.units import MIB

BLOCK_BYTES = 8 * MIB
MAX_BUFFER_BYTES = 64 * MIB
"""With more threads than have room for two full blocks, blocks are smaller."""

PART_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of a source and where they belong in the output; a hole has no bytes to copy, but is compared too."""

    source: Span
    offset: int
    is_hole: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring blocks of one output file, which is finished when the last of its parts is."""

    file: _OpenOutput
    blocks: tuple[_Block, ...]


class FileWriter:
    """Writes output files below `folder` from open `sources` (descriptors by file name)."""

    def __init__(self, folder: Path, sources: Mapping[str, int], *, verify: bool, tally: Tally) -> None:
        self._folder = folder
        self._sources = sources
        self._verify = verify
        self._tally = tally
        self._memory = threading.local()
        self._block_bytes = BLOCK_BYTES

    def write(self, outputs: Iterable[OutputFile], *, threads: int) -> None:
        """Write `outputs`, wait until the disk has them, and compare what it gives back if asked to verify.

        Raises:
            WriteError: the system refused a write (disk full, quota, I/O error).
            ReadError: a source could not be read to the end.
            VerificationError: a byte that was read back is not the source's.
        """
        self._block_bytes = min(BLOCK_BYTES, MAX_BUFFER_BYTES // (2 * max(threads, 1)))
        files = [_OpenOutput(self._folder, output) for output in outputs]
        try:
            run_jobs(self._do, self._parts(files), threads=threads)
        finally:
            for file in files:
                file.close()

    def _parts(self, files: list[_OpenOutput]) -> Iterator[_Part]:
        for file in files:
            file.create()
            parts = list(_grouped(self._blocks(file.output))) or [()]
            file.unfinished = len(parts)
            yield from (_Part(file, blocks) for blocks in parts)

    def _do(self, part: _Part) -> None:
        file = part.file
        for block in part.blocks:
            if not block.is_hole:
                self._copy(block, file)
            self._tally.add(block.source.num_bytes, phase="write", file=file.output.file)
        if self._verify:
            file.settle([block for block in part.blocks if not block.is_hole])
            for block in part.blocks:
                (self._compare_hole if block.is_hole else self._compare)(block, file)
                self._tally.add(block.source.num_bytes, phase="verify", file=file.output.file)
        file.finish_part(verify=self._verify)

    def _blocks(self, output: OutputFile) -> Iterator[_Block]:
        for copy in output.copies():
            shift = copy.offset - copy.source.start
            for start, stop, is_hole in self._segments(copy.source):
                size = stop - start if is_hole else self._block_bytes
                for begin in range(start, stop, size):
                    yield _Block(Span(copy.source.file, begin, min(begin + size, stop)), begin + shift, is_hole)

    def _segments(self, span: Span) -> Iterator[tuple[int, int, bool]]:
        position, size = span.start, os.fstat(self._sources[span.file]).st_size
        if size < span.stop:  # past the end of a file there is a hole, too, to those who ask for data
            raise ReadError(span.file, f"the file ended at byte {size}, {span.stop - size} bytes too early")
        for start, stop in data_extents(self._sources[span.file], span.start, span.stop):
            if start > position:
                yield position, start, True
            yield start, stop, False
            position = stop
        if position < span.stop:
            yield position, span.stop, True

    def _copy(self, block: _Block, file: _OpenOutput) -> None:
        view = memoryview(self._thread_memory()[0])[: block.source.num_bytes]
        fill([view], self._sources[block.source.file], block.source.start, block.source.file)
        file.write(view, block.offset)

    def _compare(self, block: _Block, file: _OpenOutput) -> None:
        left, right = self._thread_memory()
        count = block.source.num_bytes
        fill([memoryview(left)[:count]], self._sources[block.source.file], block.source.start, block.source.file)
        file.read(memoryview(right)[:count], block.offset)
        if _differ(left, right, count):
            difference = next(index for index in range(count) if left[index] != right[index])
            raise file.verification_error(block.offset + difference)

    def _compare_hole(self, block: _Block, file: _OpenOutput) -> None:
        memory = self._thread_memory()[0]
        for start, stop in data_extents(file.descriptor, block.offset, block.offset + block.source.num_bytes):
            for begin in range(start, stop, self._block_bytes):
                view = memoryview(memory)[: min(self._block_bytes, stop - begin)]
                file.read(view, begin)
                if any(view):
                    raise file.verification_error(begin + next(index for index, byte in enumerate(view) if byte))

    def _thread_memory(self) -> tuple[bytearray, bytearray]:
        if not hasattr(self._memory, "blocks"):
            self._memory.blocks = bytearray(self._block_bytes), bytearray(self._block_bytes)
        blocks: tuple[bytearray, bytearray] = self._memory.blocks
        return blocks


class _OpenOutput:
    """An output file while it is written, possibly by several threads; closed by the one that ends its last part."""

    def __init__(self, folder: Path, output: OutputFile) -> None:
        self.output = output
        self.descriptor = -1
        self.unfinished = 0
        self._path = folder / output.file
        self._lock = threading.Lock()

    def create(self) -> None:
        with _write_errors(self._path):
            self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.ftruncate(self.descriptor, self.output.num_bytes)
        self.write(memoryview(self.output.header), 0)

    def write(self, view: memoryview, offset: int) -> None:
        start, num_bytes = offset, len(view)
        with _write_errors(self._path):
            while view:
                count = os.pwrite(self.descriptor, view, offset)
                view, offset = view[count:], offset + count
        _sync_range(self.descriptor, start, num_bytes, _START)

    def read(self, view: memoryview, offset: int) -> None:
        fill([view], self.descriptor, offset, self._path)

    def settle(self, blocks: list[_Block]) -> None:
        """Wait until the disk has `blocks`, and forget the cached pages: what is read next is what the disk holds."""
        if not blocks:
            return
        start, stop = blocks[0].offset, blocks[-1].offset + blocks[-1].source.num_bytes
        with _write_errors(self._path):
            if not _sync_range(self.descriptor, start, stop - start, _START_AND_WAIT):
                os.fdatasync(self.descriptor)
        os.posix_fadvise(self.descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    def finish_part(self, *, verify: bool) -> None:
        with self._lock:
            self.unfinished -= 1
            if self.unfinished:
                return
        with _write_errors(self._path):
            os.fsync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if verify:
            header = bytearray(len(self.output.header))
            self.read(memoryview(header), 0)
            if header != self.output.header:
                raise self.verification_error(0)
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def verification_error(self, offset: int) -> VerificationError:
        position, holder = len(self.output.header), None
        for tensor in self.output.tensors:
            if position <= offset < position + tensor.num_bytes:
                holder = tensor.name
            position += tensor.num_bytes
        return VerificationError(self._path, offset=offset, tensor=holder)


def _differ(left: bytearray, right: bytearray, count: int) -> bool:
    """Compare at the speed of memory and without copies: Python compares views of bytes one by one."""
    array = ctypes.c_char * count
    return bool(_libc.memcmp(array.from_buffer(left), array.from_buffer(right), ctypes.c_size_t(count)))


def _grouped(blocks: Iterable[_Block]) -> Iterator[tuple[_Block, ...]]:
    part: list[_Block] = []
    num_bytes = 0
    for block in blocks:
        part.append(block)
        num_bytes += 0 if block.is_hole else block.source.num_bytes
        if num_bytes >= PART_BYTES:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(path, error) from error


_START, _START_AND_WAIT = 2, 1 | 2 | 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc_sync_file_range = getattr(_libc, "sync_file_range", None)


def _sync_range(descriptor: int, offset: int, num_bytes: int, flags: int) -> bool:
    """Write these pages to the disk now (sync_file_range(2)); return whether the system did as asked.

    Left alone, dirty pages pile up in memory, and the flush at the end waits for all of them.
    """
    if _libc_sync_file_range is None:
        return False
    failed: int = _libc_sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), flags)
    return not failed
