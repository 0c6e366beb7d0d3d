"""Byte ranges over HTTP: the reader that the Hub's source and plain web servers share, on huggingface_hub's client.

The client brings the user's proxies, certificates, offline mode and client factory. What is checked here, because a
checkpoint must never be a mixture: only the range that was asked for is taken, bytes are counted, no encoding is
undone, and every answer has the ETag of the first. Answers that were cut off are continued where they stopped.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

from bigload.checkpoint.byte_source import SourceIdentity, SourceScheme, ended_early, warn_of_server_without_ranges
from bigload.checkpoint.sources.http_requests import HttpResponse, HttpStatusError, host_of, requested
from bigload.checkpoint.sources.ranged_source import RangedSource, Retries, TemporaryError, missing
from bigload.checkpoint.sources.whole_files import SERVERS_WITHOUT_RANGES, WholeFile
from bigload.errors import AccessDeniedError, BigloadError, CheckpointNotFoundError, ReadError
from bigload.machine.threads.activities import Phase, Recorder
from bigload.units import MIB

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_EMPTY_RANGE = re.compile(r"bytes \*/(\d+)")
NO_RANGES_HINT = "download the files, then name their folder"

MAX_HEAD_BYTES = 16 * MIB
"""A header that ends before this is the beginning of a response, which is then closed: no whole file is transferred."""

Refuse = Callable[[Path, HttpStatusError], BigloadError]
"""Return the error to raise for a location whose server answered with a status."""


class _NoRangesError(Exception):
    """The server answers with the whole file, of which more than the beginning is wanted."""


class HttpSource(RangedSource):
    """A file that is read by ranges if the server has them, or else whole; see `ByteSource`. Opening it sends nothing.

    Args:
        location: Named by errors.
        url: Address that is asked for every range: signed addresses that it leads to are good for one range only.
        headers: Returns the headers of each request.
        refuse: Makes the error for a status.
        etag: Version that every answer must have; None takes that of the first answer.
        num_bytes: Size that every answer must state; None takes that of the first answer.
    """

    def __init__(
        self,
        location: Path,
        url: str,
        recorder: Recorder,
        *,
        headers: Callable[[], Mapping[str, str]] = dict,
        refuse: Refuse | None = None,
        etag: str | None = None,
        num_bytes: int | None = None,
    ) -> None:
        super().__init__(location, recorder)
        self._server = host_of(url)
        self._url = url
        self._headers = headers
        self._refuse = refuse or refusal
        self.etag = etag
        self._num_bytes = num_bytes
        self._modified: str | None = None
        self._is_expected = False
        self._whole: WholeFile | None = None
        self._opening = threading.Lock()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._is_expected = True
        super().expect(ranges)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        is_ranged = self._whole is None and self._server not in SERVERS_WITHOUT_RANGES
        if is_ranged or self._is_head(offset + num_bytes) or not num_bytes:
            try:
                super().read_into(buffers, offset)
                return
            except _NoRangesError:
                pass
        whole = self._opened_whole()
        with self._recorder.span(Phase.READ, num_bytes=num_bytes, file=self._location.name):
            whole.read_into(buffers, offset)

    def close(self) -> None:
        super().close()
        if self._whole is not None:
            self._whole.close()

    def _is_head(self, stop: int) -> bool:
        """Return whether a read up to `stop` is one of a header; reads of data were expected."""
        return not self._is_expected and stop <= MAX_HEAD_BYTES

    def _opened_whole(self) -> WholeFile:
        with self._opening:
            if self._whole is None:
                warn_of_server_without_ranges(self._server)
                asked = partial(self._asked, takes_whole=True)
                self._whole = WholeFile(self._shown, self._size(), asked, self._received)
            return self._whole

    def _answered(self, start: int, stop: int) -> AbstractContextManager[Iterator[bytes]]:
        return self._asked(start, stop, takes_whole=self._is_head(stop))

    def _size(self) -> int:
        if self._num_bytes is None:
            self._num_bytes = _identity(self._location).num_bytes
        return self._num_bytes

    @contextmanager
    def _asked(self, start: int, stop: int, *, takes_whole: bool) -> Iterator[Iterator[bytes]]:
        # gzip in Accept-Encoding has content networks ignore Range.
        headers = {**self._headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            with requested(self._url, headers) as answer:
                self._check(answer, start, stop)
                if answer.status == 200 and (start or answer.headers["content-length"] != str(stop)):
                    SERVERS_WITHOUT_RANGES.add(self._server)
                    if not takes_whole:
                        raise _NoRangesError
                    yield self._part_of_whole(answer, start, stop)
                else:
                    yield self._counted(answer, stop - start)
        except HttpStatusError as error:
            if error.status == 416 and (end := _EMPTY_RANGE.search(error.headers.get("content-range", ""))):
                raise ended_early(self._shown, int(end[1]), missing=stop - int(end[1])) from None
            refused = self._refuse(self._location, error)
            raise refused from refused.__cause__

    def _counted(self, answer: HttpResponse, num_bytes: int) -> Iterator[bytes]:
        for chunk in answer.chunks():
            num_bytes -= len(chunk)
            if num_bytes < 0:
                raise ReadError(self._shown, "the server sent more than was asked for")
            if chunk:
                yield chunk

    def _part_of_whole(self, answer: HttpResponse, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start` to `stop` of an answer that is the whole file; what follows is not read."""
        position = 0
        for chunk in answer.chunks():
            part = chunk[max(start - position, 0) : stop - position]
            position += len(chunk)
            if part:
                yield part
            if position >= stop:
                return

    def _check(self, answer: HttpResponse, start: int, stop: int) -> None:
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ReadError(self._shown, f"the server sent it encoded as {encoding:.30}, expected plain bytes")
        if answer.etag is not None:
            self.etag = self.etag or answer.etag
            if answer.etag != self.etag:
                raise self._changed(f"ETag {self.etag:.70} expected, {answer.etag:.70} found")
        elif (modified := answer.first.get("last-modified")) is not None:
            self._modified = self._modified or modified
            if modified != self._modified:
                raise self._changed(f"Last-Modified {self._modified:.40} expected, {modified:.40} found")
        if answer.status == 200:
            size = answer.headers.get("content-length", "")
            if not size.isdecimal():
                text = "the server supports no byte ranges, and does not say how large the file is"
                raise ReadError(self._shown, text, hint=NO_RANGES_HINT)
            self._check_size(size, stop)
            return
        SERVERS_WITHOUT_RANGES.discard(self._server)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None or int(found[1]) != start or int(found[2]) >= stop:
            shown = answer.headers.get("content-range", "none")
            text = f"asked for bytes {start}-{stop - 1}, the server answers {answer.status} with {shown:.60}"
            raise ReadError(self._shown, text)
        if found[3] != "*":
            self._check_size(found[3], stop)

    def _check_size(self, found: str, stop: int) -> None:
        """Compare the size that an answer states with what is known, and with the end of what is read."""
        self._num_bytes = int(found) if self._num_bytes is None else self._num_bytes
        if self._num_bytes != int(found):
            raise self._changed(f"{self._num_bytes} bytes expected, {found} found")
        if int(found) < stop:
            raise ended_early(self._shown, int(found), missing=stop - int(found))


def refusal(location: Path, error: HttpStatusError) -> BigloadError:
    """Return the error for a status of a plain web server."""
    shown = url_of(location)
    if error.status in (404, 410):
        return missing(shown, f"no such file (status {error.status})")
    if error.status in (401, 403):
        return AccessDeniedError(shown, f"the server answers {error.status}", hint="only public files are read")
    return ReadError(shown, f"the server answers {error.status}")


def url_of(location: Path) -> str:
    """Return the address of a location of the schemes http and https."""
    scheme, _, rest = str(location).partition(":/")
    return f"{scheme}://{quote(rest, safe='/:@!$&()*+,;=~%-._[]')}"


def _pinned(location: Path) -> Path:
    parts = urlsplit(url_of(location).replace("%3F", "?"))
    if parts.query or parts.username is not None:
        shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        hint = "secrets of an address would be written into plans; use a public address, or an object store"
        raise CheckpointNotFoundError(shown, "an address with a query or a user is not read", hint=hint)
    return location


def _identity(location: Path) -> SourceIdentity:
    """Ask for the first byte: unlike HEAD, that shows whether ranges are supported, and gets past signed addresses."""
    url = url_of(location)
    # Of a server without ranges, HEAD spares the part of the body that is under way until the connection is closed.
    method = "GET" if _server_without_ranges(location) is None else "HEAD"
    retries = Retries(url)
    while True:
        try:
            headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
            with requested(url, headers, method=method) as answer:
                version = (answer.etag or answer.first.get("last-modified", ""),)
                if answer.status == 206 and (found := _CONTENT_RANGE.fullmatch(answer.headers["content-range"])):
                    SERVERS_WITHOUT_RANGES.discard(host_of(url))
                    return SourceIdentity(num_bytes=int(found[3]), version=version)
                if (size := answer.headers.get("content-length", "")).isdecimal():
                    SERVERS_WITHOUT_RANGES.add(host_of(url))
                    return SourceIdentity(num_bytes=int(size), version=version)
            raise ReadError(url, "the server does not say how large it is", hint=NO_RANGES_HINT)
        except TemporaryError as error:
            retries.failed(error, 0)
        except HttpStatusError as error:
            if error.status == 416 and _EMPTY_RANGE.fullmatch(error.headers.get("content-range", "")):
                return SourceIdentity(num_bytes=0, version=())
            if method == "HEAD" and error.status not in (404, 410):  # some servers refuse HEAD only
                method = "GET"
                continue
            refused = refusal(location, error)
            raise refused from refused.__cause__


def _server_without_ranges(location: Path) -> str | None:
    host = host_of(url_of(location))
    return host if host in SERVERS_WITHOUT_RANGES else None


def _scheme(name: str) -> SourceScheme:
    return SourceScheme(
        name=name,
        open=lambda location, recorder: HttpSource(location, url_of(location), recorder),
        identity=_identity,
        pin=_pinned,
        server_without_ranges=_server_without_ranges,
    )


SCHEMES = (_scheme("https"), _scheme("http"))
