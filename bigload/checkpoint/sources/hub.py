"""Repositories of the Hugging Face Hub, read by ranges: `hf://org/model[@revision][/subfolder]`.

huggingface_hub has the token, the endpoint, the offline mode, the proxies and the cache of the user. A branch is
resolved to a commit once, and everything after that names the commit; its files never change. What the Hugging Face
cache holds of that commit is read from there.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from urllib.parse import quote, unquote

from bigload.checkpoint.byte_source import ByteSource, PositionalReader, SourceIdentity, SourceScheme, address_text
from bigload.checkpoint.sources.http import HttpSource
from bigload.checkpoint.sources.http_requests import HttpStatusError, read_document
from bigload.checkpoint.sources.listings import keep_listing, kept_listing
from bigload.checkpoint.sources.ranged_source import missing
from bigload.checkpoint.sources.small_reads import is_recent
from bigload.documents import parse_json
from bigload.errors import AccessDeniedError, BigloadError, CheckpointNotFoundError, ReadError, abridged
from bigload.machine.files.cache_folder import cache_folder, keep_file
from bigload.machine.threads.activities import Recorder
from bigload.units import counted
from bigload.version import __version__

MAX_LISTING_BYTES = 256 << 20

_ADDRESS = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[^/@]+))?(?:/(?P<path>.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCK = threading.Lock()
_HEADERS_LOCK = threading.Lock()
_listings: dict[tuple[str, str], Mapping[str, SourceIdentity]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A repository, a revision of it, and a file or folder there; empty texts are the main branch and the root."""

    repo: str
    revision: str
    path: str

    @property
    def location(self) -> Path:
        """The location by which it is opened; a `/` in a revision is written as %2F."""
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return Path(f"hf:/{self.repo}{revision}", self.path)

    @property
    def cached(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE, f"models--{self.repo.replace('/', '--')}")


def parse_address(text: str) -> HubAddress | None:
    """Return what `org/model[@revision][/path]` names, with or without `hf://` before it; None for another text."""
    found = _ADDRESS.fullmatch(re.sub(r"^hf:/+", "", text).rstrip("/"))
    if found is None or re.search(r"--|\.\.|\.git(?=/|$)|\0", found["repo"]) or len(found["repo"]) > 96:
        return None
    if ".." in (found["path"] or "").split("/"):
        return None
    return HubAddress(repo=found["repo"], revision=unquote(found["revision"] or ""), path=found["path"] or "")


def _address(location: Path) -> HubAddress:
    address = parse_address(str(location))
    if address is None:
        raise CheckpointNotFoundError(location, "expected hf://org/model[@revision][/subfolder]")
    return address


def _pinned(location: Path) -> Path:
    address = _address(location)
    if not _COMMIT.fullmatch(address.revision):
        address = replace(address, revision=_commit_of(address))
    if not _in_folder(_listing(address), address.path):
        _refuse_path(address)
    return address.location


def _commit_of(address: HubAddress) -> str:
    """Return the commit of a branch or tag: as the Hub said lately, or as it says now."""
    from huggingface_hub import constants

    revision = address.revision or "main"
    asked = f"{constants.ENDPOINT} {address.repo} {revision}".encode()
    ref = cache_folder() / "revisions" / hashlib.sha256(asked).hexdigest()
    commit = _kept_commit(ref)
    if constants.HF_HUB_OFFLINE:
        known = commit or _kept_commit(address.cached / "refs" / revision)
        if known is None:
            raise _offline(address)
        return known
    if commit is None or not is_recent(ref):
        commit = _asked_listing(address, revision)
        keep_file(ref, commit.encode())
    return commit


def _kept_commit(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.fullmatch(text) else None


def _listing(address: HubAddress) -> Mapping[str, SourceIdentity]:
    """Return all files of a repository at a commit."""
    from huggingface_hub import constants

    key = address.repo, address.revision
    found = _listings.get(key)
    if found is None:
        found = kept_listing(_listing_file(address))
    if found is None and constants.HF_HUB_OFFLINE:
        found = _cached_listing(address)
    if found is None:
        _asked_listing(address, address.revision)
        return _listings[key]
    with _LOCK:
        _listings[key] = found
    return found


def _listing_file(address: HubAddress) -> Path:
    asked = f"{address.repo} {address.revision}".encode()
    return cache_folder() / "listings" / hashlib.sha256(asked).hexdigest()


def _asked_listing(address: HubAddress, revision: str) -> str:
    """Ask the Hub for the commit of a revision and the files there, keep them, and return the commit."""
    document = _asked(address, f"models/{address.repo}/revision/{quote(revision, safe='')}?blobs=true")
    commit, siblings = document.get("sha"), document.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise ReadError(_shown(address), "the Hub's answer has no commit or no files")
    found = dict(_files(siblings, commit))
    at_commit = replace(address, revision=commit)
    with _LOCK:
        _listings[address.repo, commit] = found
    keep_listing(_listing_file(at_commit), found)
    return commit


def _files(siblings: list[object], commit: str) -> Iterator[tuple[str, SourceIdentity]]:
    for sibling in siblings:
        if not isinstance(sibling, dict):
            continue
        name, size, blob, lfs = (sibling.get(key) for key in ("rfilename", "size", "blobId", "lfs"))
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
        etag = sha256 or blob
        if isinstance(name, str) and isinstance(size, int) and isinstance(etag, str):
            yield name, _identity_of(size, commit, etag, sha256)


def _identity_of(size: int, commit: str, etag: str, sha256: str | None) -> SourceIdentity:
    return SourceIdentity(num_bytes=size, version=(commit, etag), sha256=sha256)


def _cached_listing(address: HubAddress) -> Mapping[str, SourceIdentity]:
    """Return the files of a commit that the Hugging Face cache holds; blobs are named by ETag."""
    folder = address.cached / "snapshots" / address.revision
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {
        path.relative_to(folder).as_posix(): _identity_of(
            path.stat().st_size, address.revision, path.readlink().name if path.is_symlink() else "", None
        )
        for path in files
    }
    if not found:
        raise _offline(address)
    return found


def _asked(address: HubAddress, route: str) -> dict[str, object]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _offline(address)
    try:
        document = _answer(route, _shown(address))
    except HttpStatusError as error:
        raise _refusal(address.location, error) from None
    except ValueError as error:
        raise ReadError(_shown(address), f"the Hub's answer is not JSON: {error}") from None
    return document if isinstance(document, dict) else {}


def _answer(route: str, shown: str) -> object:
    from huggingface_hub import constants

    body = read_document(f"{constants.ENDPOINT}/api/{route}", _headers(), shown, max_bytes=MAX_LISTING_BYTES)
    return parse_json(body, object_pairs_hook=None)


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    token = get_token()
    with _HEADERS_LOCK:  # huggingface_hub asks the Hub for names of agents: once, not from each thread
        return _headers_with(token)


@cache
def _headers_with(token: str | None) -> dict[str, str]:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    implicit = None if token is None or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else token
    return dict(build_hf_headers(token=implicit or False, library_name="bigload", library_version=__version__))


def _refusal(location: Path, error: HttpStatusError) -> BigloadError:
    """Return the error for a status of the Hub; private and missing repositories look alike."""
    from huggingface_hub import get_token

    address = _address(location)
    shown, has_token = _shown(address), get_token() is not None
    log_in = "log in (hf auth login) or set HF_TOKEN"
    page = f"https://huggingface.co/{address.repo}"
    if error.code == "GatedRepo":
        hint = f"ask for access at {page}" + ("" if has_token else f", then {log_in}")
        return AccessDeniedError(shown, "the repository is gated, and this user was not granted access", hint=hint)
    if error.code == "RevisionNotFound":
        names = _near(f"models/{address.repo}/refs", address.revision)
        hint = f"did you mean {' or '.join(names)}?" if names else f"see the branches at {page}/tree/main"
        return CheckpointNotFoundError(shown, f'the repository has no revision "{address.revision:.60}"', hint=hint)
    is_token_wrong = error.status == 401 and error.reason.startswith("Invalid credentials")
    if error.code == "RepoNotFound" or (error.status in (401, 404) and not error.code and not is_token_wrong):
        names = _near(f"models?search={quote(address.repo.rpartition('/')[2])}&limit=20", address.repo)
        hint = f"did you mean {' or '.join(names)}? " if names else ""
        hint += "A private repository needs a token that may read it" + ("" if has_token else f": {log_in}")
        return CheckpointNotFoundError(shown, "the Hub has no such repository, or it is private", hint=hint)
    if error.code == "EntryNotFound":
        return missing(shown, "no such file in the repository")
    if error.status in (401, 403):
        hint = "give the token the right to read this repository" if has_token else log_in
        if is_token_wrong:
            hint = "the Hub does not know this token: log in again (hf auth login), or correct or unset HF_TOKEN"
        reason = error.reason[:200] or f"the Hub answers {error.status}"
        return AccessDeniedError(shown, reason, hint=hint)
    return ReadError(shown, f"the server answers {error.status}" + (f": {error.reason:.200}" if error.reason else ""))


def _near(route: str, wanted: str) -> list[str]:
    """Return names like `wanted` that the Hub knows: repositories or revisions."""
    try:
        document = _answer(route, "the Hub")
    except (BigloadError, HttpStatusError, ValueError):
        return []
    listed = [document.get(key, []) for key in ("branches", "tags")] if isinstance(document, dict) else [document]
    items = [item for each in listed if isinstance(each, list) for item in each]
    names = [item.get("id") or item.get("name") for item in items if isinstance(item, dict)]
    return get_close_matches(wanted, [name for name in names if isinstance(name, str) and name != wanted], n=3)


def _offline(address: HubAddress) -> CheckpointNotFoundError:
    cached = address.cached / "snapshots"
    commits = sorted(folder.name for folder in cached.iterdir()) if cached.is_dir() else []
    reason = "offline mode is on, and the caches do not have it"
    details = [f"cached: {replace(address, revision=commit).repo}@{commit}" for commit in commits]
    return CheckpointNotFoundError(_shown(address), reason, details=details, hint="unset HF_HUB_OFFLINE")


def _refuse_path(address: HubAddress) -> None:
    names = get_close_matches(address.path, _places(_listing(address)), n=3)
    hint = f"did you mean {' or '.join(names)}?" if names else None
    raise CheckpointNotFoundError(_shown(address), f'the repository has no "{address.path:.100}"', hint=hint)


def _places(names: Mapping[str, SourceIdentity]) -> list[str]:
    """Return all files and folders."""
    return list({str(place): None for name in names for place in (Path(name), *Path(name).parents) if place.name})


def _in_folder(files: Mapping[str, SourceIdentity], path: str) -> dict[str, SourceIdentity]:
    """Return the files at or below `path` by their names relative to it."""
    if not path:
        return dict(files)
    if path in files:
        return {Path(path).name: files[path]}
    return {name[len(path) + 1 :]: item for name, item in files.items() if name.startswith(f"{path}/")}


def _list_folder(location: Path) -> Mapping[str, SourceIdentity]:
    address = _address(location)
    files = _listing(address)
    return {} if address.path in files else _in_folder(files, address.path)


def _identity(location: Path) -> SourceIdentity:
    address = _address(location)
    found = _listing(address).get(address.path)
    if found is None:
        raise missing(_shown(address), "no such file in the repository")
    return found


def _open(location: Path, recorder: Recorder) -> ByteSource:
    from huggingface_hub import constants

    address, identity = _address(location), _identity(location)
    cached = _cached_file(address, identity)
    if cached is not None:
        return PositionalReader(cached, recorder=recorder)
    if constants.HF_HUB_OFFLINE:
        raise ReadError(_shown(address), "offline mode is on, and the file is not cached", hint="unset HF_HUB_OFFLINE")
    return HttpSource(
        location,
        f"{constants.ENDPOINT}/{address.repo}/resolve/{address.revision}/{quote(address.path)}",
        recorder,
        headers=_headers,
        refuse=_refusal,
        etag=str(identity.version[-1]) or None,
        num_bytes=identity.num_bytes,
    )


def _cached_file(address: HubAddress, identity: SourceIdentity) -> Path | None:
    """Return the file in the Hugging Face cache, None if it is not there."""
    path = address.cached / "snapshots" / address.revision / address.path
    return path if path.is_file() and path.stat().st_size == identity.num_bytes else None


def _check_available(folder: Path, names: Collection[str]) -> None:
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return
    known = {name: _identity(folder / name) for name in names}
    largest_first = sorted(names, key=lambda name: (-known[name].num_bytes, name))
    found = {name: _cached_file(_address(folder / name), known[name]) for name in largest_first}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        cached = [name for name, path in found.items() if path is not None]
        reason = f"offline mode is on, and the caches lack {len(absent)} of {counted(len(found), 'file')}"
        details = [f"not cached: {_listed(absent)}", f"cached: {_listed(cached)}"]
        raise ReadError(address_text(folder), reason, details=details, hint="unset HF_HUB_OFFLINE")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(abridged(names, 4)) or "none"


def _local_folder(location: Path) -> Path | None:
    """Return the folder of the Hugging Face cache, which trusts its own refs of branches until the next download."""
    address = _address(location)
    commit = address.revision
    if not _COMMIT.fullmatch(commit):
        commit = _kept_commit(address.cached / "refs" / (commit or "main")) or ""
    folder = address.cached / "snapshots" / commit / address.path
    return folder if commit and folder.exists() else None


def _shown(address: HubAddress) -> str:
    return address_text(address.location)


SCHEMES = (
    SourceScheme(
        name="hf",
        open=_open,
        identity=_identity,
        pin=_pinned,
        local_folder=_local_folder,
        list_folder=_list_folder,
        has_strong_versions=True,
        check_available=_check_available,
    ),
)
