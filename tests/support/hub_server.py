"""Loopback server that speaks the Hub's routes used by huggingface_hub and bigload, with faults, latency and counts.

`with HubServer() as hub: hub.add("org/model", folder)` serves a folder as a repository. Large files are redirected to
a second origin ("CDN") with an address that is signed for the range asked, as for repositories in Xet. Standard library
only, so that benchmarks and other programs can use it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

CHUNK_BYTES = 1 << 16

IDLE_SECONDS = 0.005
"""Shorter pauses of the line are those of threads that take turns at the interpreter."""


@dataclass
class Fault:
    """What goes wrong with the next `times` answers that match: by the route's name and the end of the path.

    Attributes:
        route: "api", "resolve", "cdn", "plain" or "s3"; what the log calls it.
        file: What the path ends with.
        times: How many answers; a negative number: all.
        status: Sent instead of the file, with `body`, if there is one.
        headers: Added to the answer; they replace others of the same name.
        cut_after: The connection is closed after so many bytes of the body.
        pause: Called before each chunk of the body.
        body: Sent instead of the file's bytes, whatever the lengths say.
        no_ranges: The `Range` is ignored: status 200, whole file.
        gzip: The body is compressed although nobody asked for it.
    """

    route: str
    file: str = ""
    times: int = 1
    status: int | None = None
    headers: dict = field(default_factory=dict)
    cut_after: int | None = None
    pause: object = None
    body: bytes | None = None
    no_ranges: bool = False
    gzip: bool = False


@dataclass
class Request:
    """One request as it arrived, and the bytes of the body that were sent."""

    route: str
    method: str
    path: str
    headers: dict
    status: int = 0
    num_bytes: int = 0


@dataclass
class Repository:
    """A folder under a name; a revision is a commit, and files can be replaced by another commit."""

    folder: Path
    commit: str
    lfs_bytes: int
    refs: dict
    gated: bool = False
    private: bool = False
    xet: bool = False
    etags: dict = field(default_factory=dict)


class HubServer:
    """The server: two origins on ports chosen by the system, faults to be set, and a log of requests.

    Where a bandwidth is set, `busy` has the times from and until which the line was sending, by time.monotonic.
    """

    def __init__(self, *, latency: float = 0, bandwidth: float | None = None, hashes: bool = True) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self.hashes = hashes
        self.repositories: dict[str, Repository] = {}
        self.folders: dict[str, Path] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.token = "hf_" + "x" * 34
        self.key = "AK" + "Y" * 18
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.busy: list[list[float]] = []
        self._servers = [_Server(("127.0.0.1", 0), _Hub), _Server(("127.0.0.1", 0), _Cdn)]
        for server in self._servers:
            server.hub = self
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, name: str, folder: Path, *, lfs_bytes: int = 1 << 12, **options: object) -> Repository:
        """Serve `folder` as the repository `name`; safetensors and files of `lfs_bytes` or more are in LFS."""
        commit = hashlib.sha1(f"{name} {time.time_ns()}".encode()).hexdigest()
        repository = Repository(folder=folder, commit=commit, lfs_bytes=lfs_bytes, refs={"main": commit}, **options)
        self.repositories[name] = repository
        return repository

    def serve(self, name: str, folder: Path) -> str:
        """Serve `folder` as plain files, and return the address."""
        self.folders[name] = folder
        return f"{self.url}/plain/{name}"

    def serve_bucket(self, name: str, folder: Path) -> dict[str, str]:
        """Serve `folder` as a bucket of S3, and return the variables by which clients find it."""
        self.folders[name] = folder
        return {
            "AWS_ENDPOINT_URL": f"{self.url}/s3",
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
            "AWS_REGION": "eu-test-1",
        }

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the variables by which a subprocess takes this server for the Hub."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(cache)}

    @property
    def counts(self) -> Counter:
        """Requests by route."""
        return Counter(request.route for request in self.requests)

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return sum(request.num_bytes for request in self.requests)

    def fault(self, route: str, **options: object) -> Fault:
        """Add a fault; see `Fault`."""
        self.faults.append(Fault(route, **options))
        return self.faults[-1]

    def fault_of(self, route: str, path: str) -> Fault | None:
        """Take a fault for an answer, once of its times."""
        with self._lock:
            for fault in self.faults:
                if fault.route == route and path.endswith(fault.file) and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait as long as `num_bytes` take on a line that all answers share."""
        if self.bandwidth is None:
            return
        with self._lock:
            now = time.monotonic()
            if not self.busy or now - self._free_at > IDLE_SECONDS:
                self.busy.append([now, now])
            self._free_at = self.busy[-1][1] = max(self._free_at, now) + num_bytes / self.bandwidth
            wait = self._free_at - now
        if wait > 0.002:
            time.sleep(wait)

    def etag(self, repository: Repository, path: Path) -> tuple[str, bool]:
        """Return the ETag of a file and whether it is in LFS: sha256, or else git's sha1."""
        key = path, path.stat().st_size, path.stat().st_mtime_ns
        is_lfs = path.suffix in (".safetensors", ".bin", ".gguf") or path.stat().st_size >= repository.lfs_bytes
        if key not in repository.etags:
            if not self.hashes:  # sparse files of terabytes
                repository.etags[key] = hashlib.sha256(str(key).encode()).hexdigest()[: 64 if is_lfs else 40]
            elif is_lfs:
                with path.open("rb") as file:
                    repository.etags[key] = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                content = path.read_bytes()
                repository.etags[key] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return repository.etags[key], is_lfs


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self.posted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._handle()

    def _handle(self) -> None:
        hub = self.server.hub
        self.hub, parts = hub, urlsplit(self.path)
        self.url_path, self.query = unquote(parts.path), parse_qs(parts.query)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_log = Request(self.route(), self.command, self.path, headers)
        hub.requests.append(self.request_log)
        if hub.latency:
            time.sleep(hub.latency)
        self.fault = hub.fault_of(self.request_log.route, self.url_path)
        with suppress(BrokenPipeError, ConnectionResetError):
            if self.fault is not None and self.fault.status is not None:
                self.answer(self.fault.status, self.fault.body or b"{}")
            else:
                self.handle_route()
            self.wfile.flush()

    def answer(self, status: int, body: bytes = b"", headers: dict | None = None) -> None:
        self.head(status, {"Content-Length": len(body), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)
            self.request_log.num_bytes += len(body)

    def answer_json(self, document: object, status: int = 200, headers: dict | None = None) -> None:
        self.answer(status, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})})

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": message or code})

    def head(self, status: int, headers: dict) -> None:
        self.request_log.status = status
        self.send_response(status)
        added = self.fault.headers if self.fault is not None else {}
        for name, value in {**headers, **added}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def send_file(self, path: Path, headers: dict) -> None:
        """Answer with the file, or the range of it that was asked for."""
        size, fault = path.stat().st_size, self.fault or Fault("")
        start, stop, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not fault.no_ranges:
            start, stop = int(asked[1]), min(int(asked[2] or size) + 1, size)
            if start >= size:
                self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        body = fault.body
        if fault.gzip:
            with path.open("rb") as file:
                file.seek(start)
                body = gzip.compress(file.read(stop - start))
            headers = {**headers, "Content-Encoding": "gzip"}
        self.head(
            status, {"Accept-Ranges": "bytes", **headers, "Content-Length": stop - start if body is None else len(body)}
        )
        if self.command == "HEAD":
            return
        if body is not None:
            self.wfile.write(body)
            return
        self._send_bytes(path, start, stop, fault)

    def _send_bytes(self, path: Path, start: int, stop: int, fault: Fault) -> None:
        left = stop - start if fault.cut_after is None else min(stop - start, fault.cut_after)
        is_cut = left < stop - start
        with path.open("rb") as file:
            file.seek(start)
            while left:
                if fault.pause is not None:
                    fault.pause()
                piece = file.read(min(CHUNK_BYTES, left))
                self.hub.wait_for_room(len(piece))
                self.wfile.write(piece)
                self.request_log.num_bytes += len(piece)
                left -= len(piece)
        if is_cut:
            self.wfile.flush()
            self.close_connection = True


class _Hub(_Handler):
    def route(self) -> str:
        if self.url_path.startswith("/api/"):
            return "api"
        first = self.url_path.split("/")[1]
        return first if first in ("plain", "s3") else "resolve"

    def handle_route(self) -> None:
        path = self.url_path
        if path.startswith("/plain/"):
            self._plain(path.removeprefix("/plain/"))
        elif path.startswith("/s3/"):
            self._s3(*path.removeprefix("/s3/").partition("/")[::2])
        elif path == "/api/models":
            wanted = self.query.get("search", [""])[0]
            names = [name for name in self.hub.repositories if set(wanted) <= set(name)]
            self.answer_json([{"id": name} for name in names])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|refs|paths-info)(?:/(.+))?)?", path):
            self._api(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/\w+/\d+|[^/]+)/(.+)", path):
            self._resolve(*found.groups())
        else:
            self.refuse(404, "")

    def _opened(self, name: str, *, reads: bool) -> Repository | None:
        repository = self.hub.repositories.get(name)
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if "Authorization" in self.headers and not is_known:
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return None
        if repository is None or (repository.private and not is_known):
            self.refuse(404 if is_known else 401, "RepoNotFound", "Repository not found")
            return None
        if reads and repository.gated and not is_known:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
            return None
        return repository

    def _commit(self, repository: Repository, revision: str) -> str | None:
        commit = repository.refs.get(revision, revision if revision in repository.refs.values() else None)
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _api(self, name: str, route: str | None, rest: str | None) -> None:
        repository = self._opened(name, reads=False)
        if repository is None:
            return
        if route == "refs":
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": to} for ref, to in repository.refs.items()
            ]
            self.answer_json({"branches": branches, "tags": [], "converts": []})
            return
        revision = rest or "main"
        if route == "tree" and "/" in revision and not revision.startswith("refs/"):
            revision = revision.partition("/")[0]
        commit = self._commit(repository, revision)
        if commit is None:
            return
        if route == "tree":
            self.answer_json([self._entry(repository, path) for path in self._files(repository)])
        elif route == "paths-info":
            wanted = set(parse_qs(self.posted.decode()).get("paths", []))
            entries = [self._entry(repository, path) for path in self._files(repository)]
            self.answer_json([entry for entry in entries if entry["path"] in wanted])
        else:
            siblings = [self._sibling(repository, path) for path in self._files(repository)]
            self.answer_json({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings})

    def _files(self, repository: Repository) -> list[Path]:
        return sorted(path for path in repository.folder.rglob("*") if path.is_file())

    def _entry(self, repository: Repository, path: Path) -> dict:
        etag, is_lfs = self.hub.etag(repository, path)
        size = path.stat().st_size
        entry = {"type": "file", "path": path.relative_to(repository.folder).as_posix(), "size": size, "oid": etag[:40]}
        if is_lfs:
            entry["lfs"] = {"oid": etag, "size": size, "pointerSize": 134}
            if repository.xet:
                entry["xetHash"] = hashlib.sha256(etag.encode()).hexdigest()
        return entry

    def _sibling(self, repository: Repository, path: Path) -> dict:
        entry = self._entry(repository, path)
        sibling = {"rfilename": entry["path"]}
        if "blobs" in self.query:
            sibling |= {"size": entry["size"], "blobId": entry["oid"]}
            if "lfs" in entry:
                sibling["lfs"] = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 134}
        return sibling

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._opened(name, reads=True)
        commit = None if repository is None else self._commit(repository, revision)
        if repository is None or commit is None:
            return
        path = repository.folder / file
        if not path.is_file():
            self.head(404, {"Content-Length": 0, "X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag, is_lfs = self.hub.etag(repository, path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Content-Type": "application/octet-stream"}
        if not is_lfs:
            self.send_file(path, headers)
            return
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": path.stat().st_size}
        if repository.xet:
            headers["X-Xet-Hash"] = hashlib.sha256(etag.encode()).hexdigest()
        signed = quote(self.headers.get("Range", ""), safe="")
        address = f"{self.hub.cdn_url}/{name}/{quote(file)}?range={signed}&Signature=secret"
        self.answer(302, b"", {**headers, "Location": address})

    def _s3(self, bucket: str, key: str) -> None:
        """Answer as S3 does where buckets are in the path: ListObjectsV2, GetObject with If-Match, HeadObject."""
        root = self.hub.folders.get(bucket)
        if self.hub.key not in self.headers.get("Authorization", ""):
            self._s3_error(403, "AccessDenied")
        elif root is None:
            self._s3_error(404, "NoSuchBucket")
        elif not key:
            prefix = self.query.get("prefix", [""])[0]
            listing = self._azure_listing if "comp" in self.query else self._s3_listing
            self.answer(200, listing(root, prefix).encode(), {"Content-Type": "application/xml"})
        elif not (root / key).is_file():
            self._s3_error(404, "NoSuchKey")
        else:
            etag = self._s3_etag(root / key)
            if self.headers.get("If-Match", etag) != etag:
                self._s3_error(412, "PreconditionFailed")
            else:
                self.send_file(root / key, {"ETag": etag, "Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT"})

    def _s3_error(self, status: int, code: str) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>said by the server</Message></Error>'
        self.answer(status, body.encode(), {"Content-Type": "application/xml"})

    def _s3_etag(self, path: Path) -> str:
        status = path.stat()
        return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'

    def _s3_listing(self, root: Path, prefix: str) -> str:
        """Return all keys in one page, in the order of their bytes; Google's listing has the same form."""
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{path.stat().st_size}</Size>"
            f"<LastModified>2026-11-22T10:00:00.000Z</LastModified><ETag>{escape(self._s3_etag(path))}</ETag>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, path in self._keys(root, prefix)
        )
        return f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>'

    def _azure_listing(self, root: Path, prefix: str) -> str:
        entries = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Content-Length>{path.stat().st_size}</Content-Length>"
            "<Last-Modified>Sun, 22 Nov 2026 10:00:00 GMT</Last-Modified><Content-Type>x/y</Content-Type>"
            f"<Etag>{escape(self._s3_etag(path))}</Etag></Properties></Blob>"
            for key, path in self._keys(root, prefix)
        )
        return f'<?xml version="1.0"?><EnumerationResults><Blobs>{entries}</Blobs><NextMarker/></EnumerationResults>'

    def _keys(self, root: Path, prefix: str) -> list[tuple[str, Path]]:
        files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        return [(key, files[key]) for key in sorted(files) if key.startswith(prefix)]

    def _plain(self, name: str) -> None:
        folder, _, file = name.partition("/")
        path = self.hub.folders.get(folder, Path("/nonexistent")) / file
        if not path.is_file():
            self.answer(404)
            return
        status = path.stat()
        self.send_file(path, {"ETag": f'"{status.st_size:x}-{status.st_mtime_ns:x}"'})


class _Cdn(_Handler):
    def route(self) -> str:
        return "cdn"

    def handle_route(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/(.+)", self.url_path)
        if found is None or self.query.get("range", [""])[0] != self.headers.get("Range", ""):
            self.answer(403, b"invalid range")  # an address is signed for one range
            return
        path = self.hub.repositories[found[1]].folder / found[2]
        self.send_file(path, {"ETag": '"of-the-content-network"'})


@contextmanager
def served_hub(monkeypatch, cache: Path, *, sleep=None):
    """Start a Hub that this process takes for the real one, with caches in `cache`.

    Pauses take no time: they call `sleep`, or else let the clock go forward.
    """
    from huggingface_hub import constants

    from bigload.checkpoint import byte_source
    from bigload.checkpoint.sources import http_requests, ranged_source, whole_files
    from bigload.checkpoint.sources import hub as hub_source

    if sleep is None:
        pauses = []
        sleep = pauses.append
        monkeypatch.setattr(http_requests, "_now", lambda: time.monotonic() + sum(pauses))
    for module in (http_requests, ranged_source):
        monkeypatch.setattr(module, "_sleep", sleep)
    monkeypatch.setattr(hub_source, "_listings", {})
    monkeypatch.setattr(byte_source, "_WARNED", set())  # what is known of servers: a port may be given again
    whole_files.SERVERS_WITHOUT_RANGES.clear()
    hub = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub:
        yield hub
