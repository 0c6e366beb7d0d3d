"""HTTP requests through the client of huggingface_hub: answers, refusals, pauses that servers ask for."""

from __future__ import annotations

import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bigload.checkpoint.sources.ranged_source import Retries, TemporaryError
from bigload.errors import BigloadError, ReadError

_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK_BYTES = 1 << 18
_RATE_LIMIT = re.compile(r'"([\w-]+)"\s*;\s*r\s*=\s*(\d+)\s*;\s*t\s*=\s*(\d+)')
_QUOTA = re.compile(r";\s*q\s*=\s*(\d+)")
_LIMIT_HEADERS = ((_RATE_LIMIT, "ratelimit"), (_QUOTA, "ratelimit-policy"))
_LOW_SHARE = 0.1
"""Below this share of a quota, the requests that are left are spread over the time until it is renewed."""
_CERTIFICATE_HINT = "set SSL_CERT_FILE to the certificates of your proxy or mirror"
_OFFLINE_HINT = "unset HF_HUB_OFFLINE to use the network"


class RateLimitWarning(UserWarning):
    """A server asked for a pause; requests go on after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response whose body is read as it arrives.

    Attributes:
        status: Of the last response, after redirects.
        headers: Of the last response.
        first: Headers of the first response, which names the file where the last one is of a content network.
        chunks: Yields the body as it was sent, without decoding.
    """

    status: int
    headers: Mapping[str, str]
    first: Mapping[str, str]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def etag(self) -> str | None:
        """Version of the file: that of the first response."""
        found = self.first.get("x-linked-etag") or self.first.get("etag")
        return None if found is None else plain_etag(found)


class HttpStatusError(Exception):
    """The server refused for good; `code` and `reason` are the Hub's words, empty with other servers."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(status)
        self.status = status
        self.headers = headers
        self.code = headers.get("x-error-code", "")
        self.reason = headers.get("x-error-message", "")


class _Pause:
    """Time until which requests to a host wait: one limit for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._paces: dict[str, tuple[float, float]] = {}  # seconds between requests, and until when
        self._next: dict[str, float] = {}

    def extend(self, host: str, seconds: float) -> None:
        """Have requests to `host` wait for `seconds` from now, and say so once for all threads."""
        until = _now() + seconds
        with self._lock:
            is_new = until > self._until.get(host, 0) + 1
            self._until[host] = max(until, self._until.get(host, 0))
        if is_new:
            text = f"{host} limits the rate of requests; waiting {seconds:.0f} s as it asks"
            warnings.warn(text, RateLimitWarning, stacklevel=2)

    def spread(self, host: str, left: int, seconds: float) -> None:
        """Spread the `left` requests that `host` still takes over `seconds`, and say so once for all threads."""
        now = _now()
        with self._lock:
            is_new = now >= self._paces.get(host, (0, now))[1]
            self._paces[host] = seconds / max(left, 1), now + seconds
        if is_new:
            text = f"{host} takes {left} more requests in the next {seconds:.0f} s; they are sent evenly"
            warnings.warn(text, RateLimitWarning, stacklevel=2)

    def wait(self, host: str) -> None:
        """Wait until requests to `host` are welcome again."""
        turn = self._turn(host)
        while (seconds := max(self._until.get(host, 0), turn) - _now()) > 0:
            _sleep(min(seconds, 1))  # by seconds, so that Ctrl-C and a longer pause are noticed

    def _turn(self, host: str) -> float:
        with self._lock:
            interval, end = self._paces.get(host, (0, 0))
            now = _now()
            if now >= end:
                return now
            turn = min(max(self._next.get(host, now), now), end)
            self._next[host] = turn + interval
            return turn


_PAUSE = _Pause()
_now = time.monotonic
_sleep = time.sleep


def plain_etag(text: str) -> str:
    """Return an ETag without quotes and the mark of a weak one."""
    return text.removeprefix("W/").strip('"')


@contextmanager
def requested(url: str, headers: Mapping[str, str], *, method: str = "GET") -> Iterator[HttpResponse]:
    """Send one request, redirects followed, and give its answer; the body is not read.

    Raises:
        HttpStatusError: the server refused for good.
        TemporaryError: it did for now, or the connection failed, also while the body is read in this context.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    host = host_of(url)
    client: Any = get_session()  # of httpx, httpx2 or requests, as the version of huggingface_hub has it
    _PAUSE.wait(host)
    options = {"headers": dict(headers), "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    try:
        if callable(client.stream):
            with client.stream(method, url, follow_redirects=True, **options) as response:
                yield _checked(response, host, response.status_code, response.iter_raw)
        else:
            with client.request(method, url, stream=True, **options) as response:
                raw = response.raw
                yield _checked(
                    response, host, response.status_code, lambda: raw.stream(_CHUNK_BYTES, decode_content=False)
                )
    except (HttpStatusError, TemporaryError, BigloadError):
        raise
    except ConnectionError as error:
        if type(error).__name__ != "OfflineModeIsEnabled":
            raise TemporaryError(_reason(error, url)) from None
        raise ReadError(host, "offline mode is on", hint=_OFFLINE_HINT) from None
    except _failures(client) as error:
        # Not `from error`: its text and its request may have a token or a signed address.
        if _is_certificate(error):
            raise ReadError(host, "its certificate is not trusted", hint=_CERTIFICATE_HINT) from None
        raise TemporaryError(_reason(error, url)) from None


def host_of(url: str) -> str:
    """Return host and port of an address, without a user."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _failures(client: object) -> tuple[type[Exception], ...]:
    """Return what a client raises where a connection fails or a body ends early."""
    library = sys.modules[type(client).__module__.partition(".")[0]]
    if hasattr(library, "RequestException"):
        return library.RequestException, sys.modules["urllib3"].exceptions.HTTPError
    return library.HTTPError, library.StreamError


def _checked(response: object, host: str, status: int, chunks: Callable[[], Iterator[bytes]]) -> HttpResponse:
    headers: Mapping[str, str] = response.headers  # type: ignore[attr-defined]
    history = response.history  # type: ignore[attr-defined]
    first = history[0].headers if history else headers
    limit, quota = (form.search(first.get(name, "")) for form, name in _LIMIT_HEADERS)
    if limit and quota and status < 400 and limit[1] != "api" and int(limit[2]) < _LOW_SHARE * int(quota[1]):
        _PAUSE.spread(host, int(limit[2]), int(limit[3]))
    if status in _TEMPORARY:
        wait = _asked_wait(headers) if status in (429, 503) else None
        if wait is not None:
            _PAUSE.extend(host, wait)
        raise TemporaryError(f"the server answered {status}", wait)
    if status >= 400:
        raise HttpStatusError(status, headers)
    return HttpResponse(status=status, headers=headers, first=first, chunks=chunks)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds to wait: `RateLimit` of the Hub, or `Retry-After` in seconds."""
    limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if limit and int(limit[2]) == 0:
        return int(limit[3]) + 1
    after = headers.get("retry-after", "").strip()
    return max(int(after), 1) if after.isdecimal() else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _is_certificate(error: BaseException) -> bool:
    import ssl  # here, because a cached checkpoint makes no connection, and the import takes 13 ms

    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)) or (
        "CERTIFICATE_VERIFY_FAILED" in str(error)
    )


def _reason(error: BaseException, url: str) -> str:
    """Return which connection failed and why, without the texts of libraries, which may quote an address."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxies = [name for name in (parts.scheme, "all") if name in getproxies()]
    is_direct = not proxies or proxy_bypass(parts.hostname or "")
    through = "" if is_direct else f" by the proxy of {proxies[0].upper()}_PROXY"
    host = parts.netloc.rpartition("@")[2]
    strerrors = [cause.strerror for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return f"the connection to {host}{through} failed: {strerrors[-1] if strerrors else words}"


def read_document(url: str, headers: Mapping[str, str], location: Path | str, *, max_bytes: int) -> bytes:
    """Return the body at `url`, such as an answer of an API.

    Raises:
        HttpStatusError: the server refused for good.
    """
    retries = Retries(location)
    while True:
        body = bytearray()
        try:
            with requested(url, {**headers, "Accept-Encoding": "identity"}) as answer:
                for chunk in answer.chunks():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ReadError(location, f"the answer has more than {max_bytes} bytes")
                expected = answer.headers.get("content-length", "")
                if expected.isdecimal() and len(body) != int(expected):
                    raise TemporaryError("the answer was cut off")
            return bytes(body)
        except TemporaryError as error:
            retries.failed(error, 0)
