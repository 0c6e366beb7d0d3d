"""Source files of a reshard: opened when needed, few at a time, and checked for changes."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Self

from bigload.checkpoint.byte_source import ByteSource, PositionalReader, SourceIdentity, scheme_of
from bigload.checkpoint.model import Checkpoint, Span
from bigload.checkpoint.records.fingerprint import changes, fingerprint
from bigload.checkpoint.sources.listings import identities_now
from bigload.errors import ReadError, StalePlanError
from bigload.layouts.writing.recent_bytes import RecentBytes, RecentReader
from bigload.loading.checks import current_fingerprints
from bigload.loading.readers.direct import CacheFirstReader, direct_alignment
from bigload.loading.source_pool import MAX_OPEN_FILES, SourcePool
from bigload.machine.files.sparse_files import data_extents
from bigload.machine.threads.activities import NO_RECORDER
from bigload.machine.threads.core_permits import CorePermits
from bigload.machine.threads.inflight_pool import BlockPool


class SourceFiles:
    """Readers for the files of `checkpoint`, lent to threads, which may share them.

    Args:
        checkpoint: Checkpoint whose files are read.
        files: Files to read, if not its shards. An absolute path is that of a file of this machine: of an adapter.
        pool: Memory for direct reads.

    Attributes:
        is_local: They are files of this machine.
        permits: Permits to compute, which threads that read from the disk give back meanwhile.
        recorder: Recorder of the reads of files that are opened from now on.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, files: Iterable[str] | None = None, pool: BlockPool | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._files = tuple(shard.file for shard in checkpoint.shards) if files is None else tuple(files)
        self._scheme = scheme_of(checkpoint.root)
        self.is_local = self._scheme.is_local
        self.permits = CorePermits()
        self.recorder = NO_RECORDER
        self._pool = pool
        limit = MAX_OPEN_FILES // 2 if self.is_local else len(self._files)  # those of two pools, and those written
        self._past_cache = SourcePool(self._open_past_cache, limit)
        self._through_cache = SourcePool(self._open, limit)
        self._recent: RecentBytes | None = None
        self._extents: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._opened.callback(self._past_cache.close)
        self._opened.callback(self._through_cache.close)

    @contextmanager
    def past_cache(self, file: str) -> Iterator[ByteSource]:
        """Lend a reader that uses cached pages and reads the rest directly, without filling the page cache."""
        with (
            self._past_cache.lend(file) as reader,
            nullcontext() if isinstance(reader, CacheFirstReader) else self.permits.waiting(),
        ):
            yield reader

    @contextmanager
    def through_cache(self, file: str) -> Iterator[ByteSource]:
        """Lend a reader for bytes that are read again soon."""
        pool = self._through_cache if self.is_local else self._past_cache
        with pool.lend(file) as reader, self.permits.waiting():
            yield reader

    @contextmanager
    def keeping_recent(self, file: str) -> Iterator[ByteSource]:
        """Lend a reader of a remote file that keeps what each thread has last received."""
        if self._recent is None:
            with self._lock:
                if self._recent is None:
                    self._recent = RecentBytes()
                    self._opened.callback(self._recent.close)
        with self.past_cache(file) as reader:
            yield RecentReader(reader, self._recent)

    @contextmanager
    def descriptor(self, file: str) -> Iterator[int]:
        with self.through_cache(file) as reader:
            assert isinstance(reader, PositionalReader)
            yield reader.descriptor

    def extents(self, span: Span) -> Sequence[tuple[int, int]]:
        """Return the parts of `span` that hold data; the rest are holes. Only local files have any."""
        if not self.is_local:
            return [(span.start, span.stop)]
        if span.file not in self._extents:
            with self.descriptor(span.file) as descriptor:
                size = os.fstat(descriptor).st_size
                self._extents[span.file] = size, list(data_extents(descriptor, 0, size))
        size, found = self._extents[span.file]
        if size < span.stop:
            raise ReadError(span.file, f"the file ended at byte {size}, {span.stop - size} bytes too early")
        first = bisect_right(found, span.start, key=itemgetter(1))
        last = bisect_left(found, span.stop, lo=first, key=itemgetter(0))
        return [(max(start, span.start), min(stop, span.stop)) for start, stop in found[first:last]]

    def identities(self) -> dict[str, SourceIdentity]:
        identity_of = identities_now(self._checkpoint.root, self._files)
        return {file: identity_of(file) for file in self._files}

    def check_available(self) -> None:
        """Raise ReadError, before anything is read, if some files are out of reach: in offline mode, not cached."""
        self._scheme.check_available(
            self._checkpoint.root, [file for file in self._files if self.is_local or not self.is_here(file)]
        )

    def is_here(self, file: str) -> bool:
        return scheme_of(self._checkpoint.root / file).is_local

    def check_headers(self) -> None:
        """Raise StalePlanError unless the files have the headers and sizes that the checkpoint was opened with."""
        now = current_fingerprints(self._checkpoint, self._files)
        differences = changes([shard for shard in fingerprint(self._checkpoint) if shard.file in self._files], now)
        if differences:
            hint = "something replaced them since they were opened; make a new plan"
            raise StalePlanError("the plan", self._checkpoint.path, differences, hint=hint)

    def changed_since(self, before: Mapping[str, SourceIdentity]) -> Path | None:
        """Return a file that has changed since `before`, if there is one."""
        identity_of = identities_now(self._checkpoint.root, before)
        changed = (file for file, identity in before.items() if identity_of(file) != identity)
        file = next(changed, None)
        return None if file is None else self._checkpoint.root / file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open_past_cache(self, file: str) -> ByteSource:
        path = self._checkpoint.root / file
        if self.is_local and direct_alignment(path) is not None:
            return CacheFirstReader(path, pool=self._pool, waiting=self.permits.waiting)
        return self._open(file)

    def _open(self, file: str) -> ByteSource:
        path = self._checkpoint.root / file
        return scheme_of(path).open(path, self.recorder)
