"""Reading of remote files that all services share: responses that serve several reads, and tries again."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bigload.checkpoint.byte_source import address_text
from bigload.checkpoint.sources.range_streams import RangeStreams
from bigload.errors import BigloadError, ReadError
from bigload.machine.threads.activities import Phase, Recorder
from bigload.machine.threads.thread_pool import abandonable

MAX_FRUITLESS_TRIES = 5
"""Requests in a row that bring no byte before a temporary failure is raised."""

_sleep = time.sleep


class TemporaryError(Exception):
    """A request failed in a way that may pass. `wait` is how many seconds the server asked for, None if it did not."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


class Retries:
    """Counts the tries of one read that brought nothing, and waits between them."""

    def __init__(self, location: Path | str) -> None:
        self._location = location
        self._fruitless = 0
        self._done = 0

    def failed(self, error: TemporaryError, done: int) -> None:
        """Return when it is time to try again; `done` bytes have come so far."""
        # A pause that the server asked for is not a failure.
        self._fruitless = 0 if done > self._done else self._fruitless + (error.wait is None)
        self._done = done
        if self._fruitless >= MAX_FRUITLESS_TRIES:
            hint = "check the network, or try again later"
            raise ReadError(self._location, f"{error.reason}, {self._fruitless} times in a row", hint=hint) from None
        if error.wait is None and self._fruitless:
            with abandonable():
                _sleep(0.5 * 2 ** (self._fruitless - 1))


class RangedSource:
    """A remote file; see `ByteSource`. Opening it sends nothing. A subclass asks for ranges (`_answered`).

    Attributes:
        etag: Version that every answer must have, where the service has ETags; None takes that of the first answer.
    """

    def __init__(self, location: Path, recorder: Recorder) -> None:
        self._location = location
        self._shown = address_text(location)
        self._recorder = recorder
        self.etag: str | None = None
        self._streams = RangeStreams(self._answered)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._streams.expect(ranges)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        total, done, retries = sum(view.nbytes for view in views), 0, Retries(self._shown)
        with self._recorder.span(Phase.READ, num_bytes=total, file=self._location.name):
            while views:
                try:
                    chunk = self._streams.at(offset + done, offset + total).take(views[0].nbytes)
                    if not chunk:
                        raise TemporaryError("the answer was cut off")
                    views[0][: len(chunk)] = chunk
                    views[0], done = views[0][len(chunk) :], done + len(chunk)
                    if not views[0]:
                        del views[0]
                except TemporaryError as error:
                    retries.failed(error, done)
                else:
                    self._received(len(chunk))

    def close(self) -> None:
        self._streams.close()

    def _answered(self, start: int, stop: int) -> AbstractContextManager[Iterator[bytes]]:
        """Ask for bytes `start` to `stop`, and give them in chunks as they arrive.

        Raises:
            TemporaryError: the service failed for now, also in the context.
        """
        raise NotImplementedError

    def _received(self, num_bytes: int) -> None:
        self._recorder.received(num_bytes, file=self._location.name)

    def _changed(self, text: str) -> ReadError:
        return ReadError(self._shown, f"it changed since the checkpoint was opened: {text}")


@contextmanager
def translated(
    kinds: tuple[type[Exception], ...], failure: Callable[[Path, Exception], BigloadError], location: Path
) -> Iterator[None]:
    """Raise errors of a client as `failure` makes them: the texts of libraries may hold addresses with signatures."""
    try:
        yield
    except BigloadError:
        raise
    except kinds as error:
        made = failure(location, error)
        raise made from made.__cause__


def missing(location: str, reason: str) -> ReadError:
    """Return the error for a file that is not there."""
    error = ReadError(location, reason)
    error.__cause__ = FileNotFoundError(errno.ENOENT, reason, location)
    return error
