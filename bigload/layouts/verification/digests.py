"""Digests of a file and of its tensors, taken in one pass, in file order, whatever order its windows are ready in.

XXH3 with 128 bits, as `xxhsum -H2` prints it: it finds every damage that a disk or a network does, at the speed of
memory, so that digesting takes no time beside writing. It is no proof against forgery.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import NamedTuple

import xxhash

from bigload.layouts.output import OutputFile
from bigload.units import MIB

_ZEROS = memoryview(bytes(MIB))


class Mark(NamedTuple):
    """A place in a file, and its digest up to there."""

    position: int
    num_tensors: int
    whole: xxhash.xxh3_128


class FileDigest:
    """The running digests of one output file: bytes go in by order, holes as the zeros that they read as.

    Attributes:
        position: Up to where the file has gone in.
        tensors: Digests, in hexadecimal, of the tensors that are complete, by name.
    """

    def __init__(self, output: OutputFile) -> None:
        self.position = 0
        self.tensors: dict[str, str] = {}
        self._output = output
        self._stops = [start + tensor.num_bytes for start, tensor in zip(output.starts(), output.tensors, strict=True)]
        self._whole = xxhash.xxh3_128()
        self._tensor = xxhash.xxh3_128()
        self._header_bytes = output.header_bytes

    def update(self, view: memoryview) -> None:
        """Take the bytes that follow in the file."""
        self._whole.update(view)
        if self.position < self._header_bytes:
            skipped = min(self._header_bytes - self.position, len(view))
            view, self.position = view[skipped:], self.position + skipped
        self._close_tensors()
        while view:
            stop = self._stops[len(self.tensors)]
            taken = min(stop - self.position, len(view))
            self._tensor.update(view[:taken])
            view, self.position = view[taken:], self.position + taken
            self._close_tensors()

    def skip_to(self, position: int) -> None:
        """Take zeros up to `position`."""
        while self.position < position:
            count = len(self.tensors)
            stop = self._stops[count] if count < len(self._stops) else self._output.num_bytes
            num_bytes = stop - self.position
            is_whole = count < len(self._stops) and num_bytes == self._output.tensors[count].num_bytes
            if is_whole and self._header_bytes <= self.position and stop <= position:
                # Models have few sizes of tensors: that of zeros is the same for all of one size.
                for begin in range(0, num_bytes, len(_ZEROS)):
                    self._whole.update(_ZEROS[: num_bytes - begin])
                self.position = stop
                self._note(_digest_of_zeros(num_bytes))
                self._close_tensors()
            else:
                self.update(_ZEROS[: min(stop, position) - self.position])

    def finish(self) -> str:
        """Take what is missing up to the end of the file as zeros, and return the digest of all of it."""
        self.skip_to(self._output.num_bytes)
        self._close_tensors()
        return self._whole.hexdigest()

    def mark(self) -> Mark:
        """Return what `rewind` needs to come back here, where a tensor begins or all of them have ended."""
        return Mark(self.position, len(self.tensors), self._whole.copy())

    def rewind(self, mark: Mark) -> None:
        """Forget what has gone in since `mark`; once for each mark."""
        while len(self.tensors) > mark.num_tensors:
            self.tensors.popitem()
        self.position, self._whole, self._tensor = mark.position, mark.whole, xxhash.xxh3_128()

    def _close_tensors(self) -> None:
        """Note the digests of tensors that end here; empty ones end where they begin."""
        count = len(self.tensors)
        while self.position >= self._header_bytes and count < len(self._stops) and self._stops[count] == self.position:
            self._note(self._tensor.hexdigest())
            self._tensor = xxhash.xxh3_128()
            count += 1

    def _note(self, digest: str) -> None:
        self.tensors[self._output.tensors[len(self.tensors)].name] = digest


@lru_cache(maxsize=1024)
def _digest_of_zeros(num_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    for begin in range(0, num_bytes, len(_ZEROS)):
        digest.update(_ZEROS[: num_bytes - begin])
    return digest.hexdigest()


class InOrderDigest:
    """Lets threads that fill windows of a file digest them one after the other, in file order.

    Windows are handed to threads in that order, so the one whose turn it is is always being filled, and waits for none.
    """

    def __init__(self, digest: FileDigest) -> None:
        self.digest = digest
        self._turn = 0
        self._moved = threading.Condition()
        self._is_aborted = False

    def add(self, number: int, start: int, view: memoryview) -> bool:
        """Wait for the turn of window `number`, which starts at byte `start`, and digest it.

        Bytes that the digest has already, of a file that is gone on with, are left out. Returns whether it was done:
        not if an earlier window failed.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._turn == number or self._is_aborted)
            if self._is_aborted:
                return False
        # Outside of the lock: whoever waits is behind this one anyway.
        self.digest.skip_to(start)
        self.digest.update(view[self.digest.position - start :])
        with self._moved:
            self._turn += 1
            self._moved.notify_all()
        return True

    def abort(self) -> None:
        """Let nobody wait any more: a window will never come."""
        with self._moved:
            self._is_aborted = True
            self._moved.notify_all()


def digest_of(data: bytes) -> str:
    """Return the digest of a small file."""
    return xxhash.xxh3_128_hexdigest(data)
