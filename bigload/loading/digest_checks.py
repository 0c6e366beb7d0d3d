"""Check of tensors against a manifest while their bytes are read.

The digest of a tensor takes its bytes in their order. So one thread reads all of a tensor, and digests each piece right
after it has come, when the processor's cache still has it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import xxhash

from bigload.checkpoint.byte_source import ByteSource
from bigload.checkpoint.records.recorded_digests import RecordedDigest, RecordedDigests
from bigload.errors import DamagedOutputError, ManifestNotFoundError, OptionError
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES, CPU, Delivery, ReadJob
from bigload.loading.scheduling.schedule import Schedule
from bigload.units import KIB, counted

STEP_BYTES = 512 * KIB
"""Of cached bytes, digested while they are in the cache of a core. Reads of a disk are not cut."""


class DigestChecks:
    """Digests of the tensors that one schedule reads, cut at the ends of tensors, and what they have to be.

    `in_steps` cuts reads into `STEP_BYTES`.
    """

    def __init__(self, recorded: RecordedDigests, schedule: Schedule, *, in_steps: bool) -> None:
        self._path = recorded.checkpoint.path
        self._in_steps = in_steps
        self._tensors: dict[str, list[_RunningDigest]] = {}
        missing, in_part = list[str](), list[str]()
        jobs: dict[str, list[ReadJob]] = {}
        for job in schedule.jobs:
            jobs.setdefault(job.file, []).append(job)
        for file, members in jobs.items():
            ranges = list(_ranges_read(recorded.by_file.get(file, []), members))
            missing += [each.name for each, _ in ranges if each.digest is None]
            in_part += [each.name for each, is_whole in ranges if not is_whole]
            missing += [] if ranges else [file]
            self._tensors[file] = [_RunningDigest(each) for each, _ in ranges]
        if missing:
            raise ManifestNotFoundError(
                self._path,
                f"it has no digest of {counted(len(missing), 'tensor')}, such as {missing[0]}",
                hint=f"bigload manifest {recorded.checkpoint.root} adds them to it",
            )
        if in_part:
            raise OptionError(
                f"verify: of {counted(len(in_part), 'tensor')} only parts are read, such as {in_part[0]}, "
                "and a manifest has digests of whole tensors",
                hint=f"load them whole, or compare all of it before: bigload verify {self._path}",
            )
        self._starts = {file: [each.wanted.start for each in found] for file, found in self._tensors.items()}

    def batches(self, jobs: Sequence[ReadJob]) -> Iterator[list[ReadJob]]:
        """Yield the jobs as threads take them: all of a tensor together."""
        batch: list[ReadJob] = []
        stop = 0
        for job in jobs:
            is_same = bool(batch) and batch[-1].file == job.file
            is_small = job.delivery is Delivery.STAGED and job.device == CPU
            may_join = is_small and sum(each.num_bytes for each in batch) + job.num_bytes <= BLOCK_BYTES
            if batch and not (is_same and (job.offset < stop or may_join)):
                yield batch
                batch = []
            stop = max(stop, self._end(job)) if batch else self._end(job)
            batch.append(job)
        if batch:
            yield batch

    def reading(self, file: str, source: ByteSource) -> ByteSource:
        """Return `source` with what it reads checked."""
        return _CheckedSource(self, file, source, STEP_BYTES if self._in_steps else None)

    def update(self, file: str, offset: int, views: Sequence[memoryview]) -> None:
        """Digest the bytes of `file` from `offset` on that lie in `views`, without those that were digested before."""
        tensors, starts = self._tensors[file], self._starts[file]
        for view in views:
            stop = offset + view.nbytes
            index = max(bisect_right(starts, offset) - 1, 0)
            while index < len(tensors) and starts[index] < stop:
                tensor = tensors[index]
                if tensor.update(offset, view) and not tensor.is_right:
                    raise self._damaged(file, tensor.wanted)
                index += 1
            offset = stop

    def _end(self, job: ReadJob) -> int:
        """Return where the last tensor ends of which a job reads something."""
        index = bisect_right(self._starts[job.file], job.offset + job.num_bytes - 1) - 1
        return self._tensors[job.file][index].wanted.stop

    def _damaged(self, file: str, wanted: RecordedDigest) -> DamagedOutputError:
        return DamagedOutputError(
            self._path,
            f"{self._path} is damaged: tensor {wanted.name!r} in {file}, somewhere in bytes {wanted.start} to "
            f"{wanted.stop}, is not what the manifest says",
            hint="nothing was loaded; bigload verify lists all that is damaged",
        )


class _RunningDigest:
    """Digest of a tensor so far."""

    __slots__ = ("_digest", "_position", "wanted")

    def __init__(self, wanted: RecordedDigest) -> None:
        self.wanted = wanted
        self._position = wanted.start
        self._digest = xxhash.xxh3_128()

    def update(self, offset: int, view: memoryview) -> bool:
        """Digest what `view`, bytes of the file from `offset` on, has next; return whether that ends the tensor."""
        stop = min(offset + view.nbytes, self.wanted.stop)
        if stop <= self._position:
            return False
        self._digest.update(view[self._position - offset : stop - offset])
        self._position = stop
        return stop == self.wanted.stop

    @property
    def is_right(self) -> bool:
        """Whether all of it is what the manifest says."""
        return self._digest.hexdigest() == self.wanted.digest


class _CheckedSource:
    """A source whose bytes are digested when they have been read."""

    def __init__(self, checks: DigestChecks, file: str, source: ByteSource, step_bytes: int | None) -> None:
        self._checks = checks
        self._file = file
        self._source = source
        self._step_bytes = step_bytes

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        for views in [buffers] if self._step_bytes is None else _steps(buffers, self._step_bytes):
            self._source.read_into(views, offset)
            self._checks.update(self._file, offset, views)
            offset += sum(view.nbytes for view in views)

    def close(self) -> None:
        """Do nothing: whoever opened the source closes it."""


def _steps(buffers: Sequence[memoryview], step_bytes: int) -> Iterator[list[memoryview]]:
    """Yield all of `buffers` in lists of at most `step_bytes`."""
    views: list[memoryview] = []
    room = step_bytes
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            view = buffer[start : start + room]
            views.append(view)
            start, room = start + view.nbytes, room - view.nbytes
            if not room:
                yield views
                views, room = [], step_bytes
    if views:
        yield views


def _ranges_read(ranges: Sequence[RecordedDigest], jobs: Sequence[ReadJob]) -> Iterator[tuple[RecordedDigest, bool]]:
    """Yield the tensors of one file of which `jobs`, in its order, read something, and whether they read all."""
    first = 0
    for each in ranges:
        while first < len(jobs) and jobs[first].offset + jobs[first].num_bytes <= each.start:
            first += 1
        position, is_read = each.start, False
        for job in jobs[first:] if first < len(jobs) else ():
            if job.offset >= each.stop:
                break
            is_read = True
            if job.offset > position:
                break
            position = max(position, job.offset + job.num_bytes)
        if is_read:
            yield each, position >= each.stop
