"""Digests of a file and of its tensors in one pass in file order, for writing and for verifying.

XXH3 with 128 bits, as `xxhsum -H2` prints it: it finds damage by disks and networks at the speed of memory, so
digesting takes no time beside writing. It does not protect against forgery.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import xxhash

from bigload.checkpoint.model import TensorInfo
from bigload.layouts.output import OutputFile
from bigload.units import MIB

_ZEROS = memoryview(bytes(MIB))


class TensorRange(NamedTuple):
    """Bytes `start` to `stop` of a file that hold the tensor `name`."""

    name: str
    start: int
    stop: int


def ranges_of(tensors: Iterable[TensorInfo]) -> tuple[list[TensorRange], dict[str, str]]:
    """Return where the tensors of a file are, in file order, and of tensors in the same bytes the name that is there.

    Tensors that share only some bytes, as views of one storage in a torch file may, are left out but for the first.
    """
    ranges: list[TensorRange] = []
    same: dict[str, str] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.span.start, tensor.span.stop)):
        span, last = tensor.span, ranges[-1] if ranges else TensorRange("", 0, 0)
        if ranges and (span.start, span.stop) == (last.start, last.stop):
            same[tensor.name] = last.name
        elif span.start >= last.stop:
            ranges.append(TensorRange(tensor.name, span.start, span.stop))
            same[tensor.name] = tensor.name
    return ranges, same


class DigestMark(NamedTuple):
    """A position in a file to which `FileDigest.rewind` can return."""

    position: int
    num_tensors: int
    whole: xxhash.xxh3_128
    tensor: xxhash.xxh3_128
    service: hashlib._Hash | None


class FileDigest:
    """Running digests of a file and of its tensors, from the bytes of the file in their order.

    Args:
        ranges: Where each tensor is, in file order and without overlaps.
        num_bytes: Size of the file.
        service: The digest by which a service knows the file, to compute as well; SHA-256 takes 1 to 2 GiB/s.

    Attributes:
        num_bytes: Size of the file.
        position: Bytes digested so far.
        tensors: Digests, in hexadecimal, of the tensors that are complete, by name.
    """

    def __init__(self, ranges: Iterable[TensorRange], num_bytes: int, *, service: hashlib._Hash | None = None) -> None:
        self.position = 0
        self.tensors: dict[str, str] = {}
        self._ranges = tuple(ranges)
        self.num_bytes = num_bytes
        self._whole = xxhash.xxh3_128()
        self._tensor = xxhash.xxh3_128()
        self._service = service
        self.update(_ZEROS[:0])  # completes tensors without bytes at the beginning

    @classmethod
    def of(cls, output: OutputFile) -> FileDigest:
        """Return the digest of a file to write, before its first byte."""
        starts = zip(output.tensors, output.starts(), strict=True)
        ranges = (TensorRange(one.name, start, start + one.num_bytes) for one, start in starts)
        return cls(ranges, output.num_bytes, service=None if output.sha256 is None else hashlib.sha256())

    @property
    def so_far(self) -> str:
        """Digest of all bytes up to `position`."""
        return self._whole.hexdigest()

    @property
    def by_service(self) -> str | None:
        """Digest of all bytes up to `position` as the service has it, if it is computed."""
        return None if self._service is None else self._service.hexdigest()

    def update(self, view: memoryview) -> None:
        """Digest the bytes that follow in the file."""
        begin, self.position = self.position, self.position + view.nbytes
        self._feed(view)
        while len(self.tensors) < len(self._ranges):
            name, start, stop = self._ranges[len(self.tensors)]
            if start > self.position:
                break
            self._tensor.update(view[max(start - begin, 0) : stop - begin])
            if stop > self.position:
                break
            self.tensors[name] = self._tensor.hexdigest()
            self._tensor.reset()

    def skip_to(self, position: int) -> None:
        """Digest zeros up to `position`: a hole reads as zeros."""
        while self.position < position:
            count = len(self.tensors)
            at_end = TensorRange("", position, position)
            name, start, stop = self._ranges[count] if count < len(self._ranges) else at_end
            if self.position == start and stop <= position:
                # Models have few sizes of tensors: the digest of zeros is the same for all of one size.
                for begin in range(start, stop, len(_ZEROS)):
                    self._feed(_ZEROS[: stop - begin])
                self.position = stop
                self.tensors[name] = _digest_of_zeros(stop - start)
                self.update(_ZEROS[:0])  # completes tensors without bytes that follow
            else:
                edge = min(start if self.position < start else stop, position)
                self.update(_ZEROS[: edge - self.position])

    def finish(self) -> str:
        """Digest zeros up to the end of the file, and return the digest of all of it."""
        self.skip_to(self.num_bytes)
        return self._whole.hexdigest()

    def mark(self) -> DigestMark:
        """Return what `rewind` needs to return here."""
        service = None if self._service is None else self._service.copy()
        return DigestMark(self.position, len(self.tensors), self._whole.copy(), self._tensor.copy(), service)

    def rewind(self, mark: DigestMark) -> None:
        """Forget what was digested since `mark`; once for each mark."""
        while len(self.tensors) > mark.num_tensors:
            self.tensors.popitem()
        self.position, self._whole, self._tensor, self._service = mark.position, mark.whole, mark.tensor, mark.service

    def _feed(self, view: memoryview) -> None:
        self._whole.update(view)
        if self._service is not None:
            self._service.update(view)


@lru_cache(maxsize=1024)
def _digest_of_zeros(num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    for begin in range(0, num_bytes, len(_ZEROS)):
        digest.update(_ZEROS[: num_bytes - begin])
    return digest.hexdigest()


class InOrderDigest:
    """Digest of a file whose windows are filled by several threads: it takes them in file order, and no thread waits.

    A window that comes too early is kept, and digested by the thread that brings the one before it. So windows have to
    get their memory in file order: else those that are kept could hold all of it.

    Attributes:
        prefixes: Digest of all bytes up to the end of each window, by that position.
    """

    def __init__(self, digest: FileDigest) -> None:
        self.digest = digest
        self.prefixes: dict[int, str] = {}
        self._early: dict[int, tuple[int, memoryview, ExitStack]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_aborted = False

    def add(
        self, number: int, start: int, view: memoryview, lent: ExitStack, on_digested: Callable[[int], object]
    ) -> None:
        """Digest window `number`, which starts at byte `start`, and those that wait for it; close `lent` after each.

        Then `on_digested` is called with the number of each. It is not kept: what it belongs to would never be freed
        where cycles are not looked for.

        Bytes that are digested already, of a file that is resumed, are left out. After `abort` nothing is digested.
        """
        with self._lock:
            if not self._is_aborted:
                self._early[number] = start, view, lent.pop_all()
        lent.close()
        while (found := self._take_next()) is not None:
            number, start, view, lent = found
            with lent:
                self.digest.skip_to(start)
                self.digest.update(view[self.digest.position - start :])
                self.prefixes[self.digest.position] = self.digest.so_far
            self._next = number + 1
            self._is_busy = False
            on_digested(number)  # others may go on: it may flush the file

    def abort(self) -> None:
        """Give back the memory of all windows that are kept: the one that they wait for will never come."""
        with self._lock:
            self._is_aborted = True
            early, self._early = self._early, {}
        for _, _, lent in early.values():
            lent.close()

    def _take_next(self) -> tuple[int, int, memoryview, ExitStack] | None:
        """Return the next window and its number, unless it is not there or another thread digests."""
        with self._lock:
            if self._is_busy or self._next not in self._early:
                return None
            self._is_busy = True
            return self._next, *self._early.pop(self._next)
