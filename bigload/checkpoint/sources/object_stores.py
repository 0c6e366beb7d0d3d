"""Object stores: `s3://bucket/folder`, `gs://bucket/folder` and `az://container/folder`, read by obstore.

obstore takes credentials, region and endpoint from the variables that the stores' own programs use (AWS_*, GOOGLE_*,
AZURE_*); where boto3 is installed, also profiles. It retries what a service refuses for now. Where it is not
installed, fsspec reads (s3fs, gcsfs, adlfs). A range is asked for with If-Match, so an object that changes is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from bigload.checkpoint.byte_source import SourceIdentity, SourceScheme, address_text, ended_early
from bigload.checkpoint.sources.http import NO_RANGES_HINT
from bigload.checkpoint.sources.http_requests import plain_etag
from bigload.checkpoint.sources.listings import keep_listing, kept_listing
from bigload.checkpoint.sources.ranged_source import RangedSource, TemporaryError, missing, translated
from bigload.checkpoint.sources.small_reads import is_recent
from bigload.checkpoint.sources.store_hints import STORES, connection_hint, credentials_hint, refusal_hint
from bigload.errors import AccessDeniedError, BigloadError, CheckpointError, CheckpointNotFoundError, ReadError
from bigload.machine.files.cache_folder import cache_folder

MAX_LISTED = 100_000

RETRY: dict[str, Any] = {
    "max_retries": 6,
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
    "retry_timeout": timedelta(seconds=30),
}
"""Tries again after 429, 503 SlowDown, other 5xx and lost connections: pauses grow, with jitter. Reads of data have
`MAX_FRUITLESS_TRIES` of these."""

# The limit of obstore for a whole answer is 30 s; answers of 256 MiB take longer on slow lines.
_CLIENT = {"allow_http": True, "connect_timeout": "5s", "read_timeout": "10s", "timeout": "1h"}
_CHUNK_BYTES = 1 << 20

_PREFIXES = {"s3a": "s3", "gcs": "gs"}
_CREDENTIAL_HOSTS = ("169.254.169.254", "metadata.google")
"""Services of cloud machines that are asked where no variable has credentials."""

_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_")

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_REGION = re.compile(r"<Region>([\w-]{1,40})</Region>")
_CAUSE = re.compile(r'(?:message|error): "([^"]{1,150})"|\b(Invalid(?!Data)\w+|UnknownIssuer)\b')
"""Of a failed connection, in the description of the client's error."""

_KEY_CODES = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_REGION_CODES = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")


T = TypeVar("T")


class ObjectSource(RangedSource):
    """An object that is read by ranges; every answer has the ETag of the first."""

    @contextmanager
    def _answered(self, start: int, stop: int) -> Iterator[Iterator[bytes]]:
        store, key = _place(self._location)
        options = {"range": (start, stop), **({"if_match": f'"{self.etag}"'} if self.etag else {})}
        with _translated(self._location):
            try:
                result = _waited(lambda: store.get(key, options=options))
            except _errors() as error:
                if _is_temporary(error):
                    raise TemporaryError(_reason(error)) from None
                raise
        if result.range != (start, stop):
            raise ended_early(self._shown, result.range[1], missing=stop - result.range[1])
        etag = plain_etag(result.meta["e_tag"] or "")
        self.etag = self.etag or etag
        if etag != self.etag:
            raise self._changed(f"ETag {self.etag:.70} expected, {etag or 'none':.70} found")
        try:
            stream = iter(result.stream(min_chunk_size=_CHUNK_BYTES))
            yield iter(lambda: _waited(lambda: next(stream, b"")), b"")
        except _errors() as error:
            raise TemporaryError(f"the answer was cut off: {_reason(error)}") from None


def _waited(call: Callable[[], T]) -> T:
    """Return the result of a call of obstore, which holds Ctrl-C back: the main thread waits for another thread."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    results = SimpleQueue[Future[T]]()

    def run() -> None:
        result = Future[T]()
        try:
            result.set_result(call())
        except BaseException as error:  # raised by the main thread
            result.set_exception(error)
        results.put(result)

    threading.Thread(target=run, name="bigload-store", daemon=True).start()
    return results.get().result()


def _errors() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError


def _translated(location: Path) -> AbstractContextManager[None]:
    return translated(_errors(), _failure, location)


def _failure(location: Path, error: Exception) -> BigloadError:
    kind, text, shown = type(error).__name__, str(error), address_text(location)
    scheme, bucket, _ = _parts(location)
    status, code = _found(_STATUS, text), _found(_CODE, text)
    if code in ("NoSuchBucket", "ContainerNotFound"):
        hint = "check the name and, for a store that is not Amazon's, AWS_ENDPOINT_URL" if scheme == "s3" else None
        return CheckpointNotFoundError(shown, f'there is no bucket "{bucket}"', hint=hint)
    if isinstance(error, FileNotFoundError):
        return missing(shown, "no such object")
    if any(host in text for host in _CREDENTIAL_HOSTS):
        return AccessDeniedError(shown, "no credentials were found", hint=credentials_hint(scheme))
    if code in _REGION_CODES or "redirect without LOCATION" in text:
        hint = f"set AWS_REGION to {_found(_REGION, text) or 'the region of the bucket'}"
        return ReadError(shown, "the bucket is in another region", hint=hint)
    is_refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or status in ("401", "403")
    if is_refused or code in _KEY_CODES:
        return AccessDeniedError(shown, _reason(error), hint=refusal_hint(scheme))
    reason, hint = _reason(error), None
    if kind == "PreconditionError":
        reason = "it changed since the checkpoint was opened: its ETag is another"
    elif status == "416":
        reason = "the file ended too early: it ends before the range that was asked for"
    elif "non-partial" in text:
        reason, hint = "the service does not support byte ranges (status 200, expected 206)", NO_RANGES_HINT
    elif "kind: Connect" in text:
        reason, hint = f"the connection failed: {_cause(text)}", connection_hint(scheme)
    return ReadError(shown, reason, hint=hint)


def _found(form: re.Pattern[str], text: str) -> str | None:
    found = form.search(text)
    return None if found is None else found[1]


def _cause(text: str) -> str:
    found = _CAUSE.search(text)
    if found is None:
        return "no reason given"
    return found[1] or f"TLS: {found[2]}"


def _is_temporary(error: Exception) -> bool:
    status = _STATUS.search(str(error))
    return status is not None and (status[1] == "429" or status[1] >= "500")


def _reason(error: Exception) -> str:
    """Return why a request failed, without its address."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if status:
        return f"the service answers {status[1]}" + (f" {code[1]}" if code else "")
    line = str(error).partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"\S*://\S*", "…", line)[:200]


def _parts(location: Path) -> tuple[str, str, str]:
    name, _, rest = str(location).partition(":/")
    bucket, _, key = rest.strip("/").partition("/")
    return _PREFIXES.get(name, name), bucket, key


def _pinned(location: Path) -> Path:
    scheme, bucket, key = _parts(location)
    if ":" in bucket or "?" in key:
        shown = f"{scheme}://{bucket.rpartition('@')[2]}/{key.partition('?')[0]}"
        hint = f"secrets of an address would be written into plans; {credentials_hint(scheme)}"
        raise CheckpointNotFoundError(shown, "an address with a key or a query is not read", hint=hint)
    return location


def _place(location: Path) -> tuple[Any, str]:
    """Return the store of a location and the key in it."""
    scheme, bucket, key = _parts(location)
    if not bucket:
        raise CheckpointNotFoundError(address_text(location), f"expected {scheme}://bucket/folder")
    with _translated(location):
        return _store(scheme, bucket, os.getpid()), key


@cache
def _store(scheme: str, bucket: str, _process: int) -> Any:  # noqa: ANN401 - types come with an extra
    """Return the client of a bucket; its threads do not survive a fork."""
    from obstore.store import from_url

    try:
        return from_url(
            f"{scheme}://{bucket}", client_options=_CLIENT, retry_config=RETRY, **_profile_credentials(scheme)
        )
    except _errors() as error:
        hint = credentials_hint(scheme)
        raise CheckpointError(f"cannot read {scheme}://{bucket}: {_reason(error)}", hint=hint) from None


def _profile_credentials(scheme: str) -> dict[str, Any]:
    """Return what reads profiles of `~/.aws`, which obstore does not, where boto3 is there and variables are not."""
    known = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if scheme != "s3" or any(name in os.environ for name in known) or find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # none are found
        return {}


def _identity_of(meta: Mapping[str, Any]) -> SourceIdentity:
    etag = meta["e_tag"]
    version = (plain_etag(etag),) if etag else (meta["last_modified"].isoformat(), "")
    return SourceIdentity(num_bytes=meta["size"], version=version)


def _identity(location: Path) -> SourceIdentity:
    store, key = _place(location)
    if not key:
        raise missing(address_text(location), "a bucket, not an object")
    with _translated(location):
        return _identity_of(_waited(lambda: store.head(key)))


def _list_folder(location: Path) -> Mapping[str, SourceIdentity]:
    store, folder = _place(location)
    found: dict[str, SourceIdentity] = {}
    prefix = f"{folder}/" if folder else ""
    with _translated(location):
        batches = iter(store.list(folder or None, chunk_size=1000))
        while batch := _waited(lambda: next(batches, ())):
            for meta in batch:
                name = meta["path"].removeprefix(prefix)
                if name and not name.endswith("/"):
                    found[name] = _identity_of(meta)
            if len(found) > MAX_LISTED:
                hint = "name the folder of one model"
                raise CheckpointError(f"{address_text(location)} holds more than {MAX_LISTED} objects", hint=hint)
    if all(identity.etag for identity in found.values()):
        keep_listing(_listing_file(location), found)
    return found


def _recent_listing(location: Path) -> Mapping[str, SourceIdentity] | None:
    path = _listing_file(location)
    with suppress(OSError):
        return kept_listing(path) if is_recent(path) else None
    return None


def _listing_file(location: Path) -> Path:
    """Return where the listing of a folder is kept: one for each setting of the store's address and credentials."""
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    asked = hashlib.sha256(json.dumps([str(location), settings]).encode())
    return cache_folder() / "folders" / asked.hexdigest()


def _schemes() -> tuple[SourceScheme, ...]:
    if find_spec("obstore") is None:
        from bigload.checkpoint.sources.fsspec_files import scheme_named

        return tuple(scheme for scheme in map(scheme_named, STORES) if scheme is not None)
    return tuple(
        SourceScheme(
            name=name,
            open=ObjectSource,
            identity=_identity,
            pin=_pinned,
            list_folder=_list_folder,
            recent_listing=_recent_listing,
            has_strong_versions=True,
        )
        for name in STORES
    )


SCHEMES = _schemes()
