"""Every error that bigload raises on purpose.

A class is for what a program would catch apart from the rest, and carries the facts as fields. `str(error)` is the
message, the details (one line each) and the hint; the command line prints the same three parts.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from bigload.plain_text import printable
from bigload.units import counted, format_size

MAX_LISTED = 20
"""Details past this number are counted, not listed: a broken download can have thousands of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong in a checkpoint: a stable `code`, the file it is in, and one sentence."""

    code: str
    file: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.text}")


class BigloadError(Exception):
    """Base of all errors raised on purpose; anything else that escapes is a bug in bigload."""

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # By its fields, not by its arguments, so that errors cross processes whatever their constructors ask for.
        return _restored, (type(self), self.message, self.__dict__)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in abridged(self.details))]
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        # Names come from strangers, and a terminal that shows a traceback obeys them. Line feeds are of tracebacks.
        return "\n".join(map(printable, "\n".join(lines).split("\n")))


def _restored(kind: type[BigloadError], message: str, fields: dict[str, object]) -> BigloadError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


def abridged(lines: Sequence[str], most: int = MAX_LISTED) -> list[str]:
    """Return at most `most` of `lines`, the last one counting what was left out."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 1], f"… and {len(lines) - most + 1} more"]


class OptionError(BigloadError, ValueError):
    """An argument, a command-line option or an environment variable has an impossible value, or excludes another.

    Attributes:
        name: The argument or variable, None where several exclude each other.
        value: What it is.
        expected: What it should be.
    """

    name: str | None = None
    value: object = None
    expected: str = ""

    @classmethod
    def of(cls, name: str, value: object, expected: str, *, hint: str | None = None) -> Self:
        """Return the error of one argument: "threads is 0; expected 1 or more"."""
        error = cls(f"{name} {_found(value)}; expected {expected}", hint=hint)
        error.name, error.value, error.expected = name, value, expected
        return error


def _found(value: object) -> str:
    match value:
        case None:
            return "is not given"
        case Path():  # whole: its end says which file it is
            return f'is "{value}"'
        case str():
            return f'is "{value!s:.80}"'
        case list() | tuple():
            return f'is "{", ".join(map(str, value)):.80}"'
    return f"is {value!r:.80}"


class CheckpointError(BigloadError):
    """Something is wrong with the files of a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at `path`."""

    def __init__(self, path: Path | str, reason: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(f"no checkpoint at {path}: {reason}", details=details, hint=hint)
        self.path = path
        self.errno, self.filename = errno.ENOENT, str(path)


class AccessDeniedError(CheckpointError, PermissionError):
    """A service refuses `path` to this user: a gated or private repository, or a token that is missing or too weak."""

    def __init__(self, path: Path | str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"no access to {path}: {reason}", hint=hint)
        self.path = path
        self.errno, self.filename = errno.EACCES, str(path)


class InvalidCheckpointError(CheckpointError, ValueError):
    """The files at `path` break the format or contradict each other; `problems` lists every instance found."""

    def __init__(self, path: Path | str, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.path = path
        self.problems = tuple(problems)
        details: tuple[str, ...] = ()
        if len(problems) == 1:
            message = f"{path} is not a valid checkpoint: {problems[0]}"
        else:
            files = len({problem.file for problem in problems})
            message = f"{path} is not a valid checkpoint: {len(problems)} problems in {counted(files, 'file')}"
            details = tuple(str(problem) for problem in problems)
        super().__init__(message, details=details, hint=hint or _download_hint(problems))


def _download_hint(problems: Sequence[Problem]) -> str | None:
    codes = {problem.code for problem in problems}
    if "unsafe-path" in codes:
        return "an index may only name files inside its own folder; look at where this checkpoint comes from"
    if codes & {"file-truncated", "missing-shard", "file-empty", "bad-checksum"}:
        return "download the named files again; a download was probably cut off"
    if "forbidden-global" in codes:
        return "if you trust where it comes from, load it with torch and save its state_dict() alone"
    return None


class UnsupportedFormatError(CheckpointError, ValueError):
    """The file at `path` is of a known kind that bigload does not read; the message names it."""

    def __init__(self, path: Path | str, reason: str, *, hint: str) -> None:
        super().__init__(f"{path} cannot be read: {reason}", hint=hint)
        self.path = path


class LegacyPickleError(CheckpointError):
    """The checkpoint at `path` is stored as torch before 1.6 did; `paths` are all its files, in order.

    Such a file is one pickle, data included: where a tensor lies is not known before torch has run through all of it.
    """

    def __init__(self, path: Path | str, paths: Sequence[Path], *, legacy: Sequence[str]) -> None:
        super().__init__(
            f"{path} is stored in the form of torch before 1.6, a pickle whose parts cannot be read by themselves",
            details=legacy,
            hint="bigload.load reads it through torch.load(weights_only=True); for everything else save it again: "
            'torch.save(torch.load(FILE, weights_only=True), "new.bin")',
        )
        self.path = path
        self.paths = tuple(paths)


class PlanError(BigloadError):
    """A plan cannot be made, read or carried out."""


class DoesNotFitError(PlanError):
    """No assignment keeps every device within its budget.

    `shortfalls` maps a device to the bytes it lacks: a device that cannot hold the workspace it needs, or `"total"`
    for what found no device at all, which is `needed_bytes - usable_bytes`.
    """

    def __init__(
        self,
        name: str,
        *,
        needed_bytes: int,
        usable_bytes: int,
        shortfalls: dict[str, int],
        where: str = "",
        details: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        if "total" in shortfalls:
            needed, usable = format_size(needed_bytes), format_size(usable_bytes)
            message = f"{name} does not fit: it needs {needed}{where}, the budget has room for {usable}"
        else:
            verb = "is" if len(shortfalls) == 1 else "are"
            message = f"{name} does not fit: {' and '.join(shortfalls)} {verb} too small for the workspace to run it"
        short = tuple(
            f"short by {format_size(lacking)}" if device == "total" else f"{device} is short by {format_size(lacking)}"
            for device, lacking in shortfalls.items()
        )
        super().__init__(message, details=(*details, *short), hint=hint)
        self.needed_bytes = needed_bytes
        self.usable_bytes = usable_bytes
        self.shortfalls = shortfalls


class PlanNotFoundError(PlanError, FileNotFoundError):
    """There is no plan file at that path, or it cannot be read."""


class InvalidPlanError(PlanError, ValueError):
    """A plan file cannot be read, has another major schema version, or contradicts itself."""


class DeviceMapError(PlanError, ValueError):
    """A device map has no device for `names`, tensors of the model, or one for them that torch cannot use here."""

    def __init__(self, message: str, names: Sequence[str], *, details: Sequence[str] = (), hint: str) -> None:
        super().__init__(message, details=details, hint=hint)
        self.names = tuple(names)


class NamesUnknownError(PlanError):
    """Tensors or a device map cannot be put into the names of the model in memory, or back; the message says why."""


class PartitionError(PlanError, ValueError):
    """Tensor-parallel ranks cannot divide a checkpoint as asked, or rules that say how cannot be read.

    `message` says what, `details` name each kind of tensor that is in the way.
    """


class AdapterError(PlanError, ValueError):
    """An adapter is of a kind that cannot be merged, or for another base; `details` name what does not fit."""


class StalePlanError(PlanError):
    """The checkpoint is not the one that the plan was made for; `changes` says what differs, a line per file."""

    def __init__(self, plan: str, checkpoint: str, changes: Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(f"{plan} was made for another version of {checkpoint}", details=changes, hint=hint)
        self.plan = plan
        self.checkpoint = checkpoint
        self.changes = tuple(changes)


class LayoutError(BigloadError):
    """Files could not be written in the form that was asked for."""


class ManifestNotFoundError(LayoutError, FileNotFoundError):
    """The folder at `path` has no manifest to be checked against: bigload has not written it, or not to the end."""

    def __init__(self, path: Path | str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(
            f"no manifest of {path}: {reason}", hint=hint or "name a folder that bigload reshard or fetch made"
        )
        self.path = path
        self.errno, self.filename = errno.ENOENT, str(path)


class DamagedOutputError(LayoutError, ValueError):
    """Files in the folder `path` are not what was written, or its manifest cannot be used.

    Attributes:
        path: Folder, or the one file that is wrong.
        problems: Every instance found, where several were looked for.
        offset: First byte of `path` that differs, where that is known.
    """

    def __init__(self, path: Path | str, message: str, *, problems: Sequence[Problem] = (), hint: str) -> None:
        super().__init__(message, details=[str(problem) for problem in problems], hint=hint)
        self.path = path
        self.problems = tuple(problems)
        self.offset: int | None = None

    @classmethod
    def while_writing(cls, path: Path, *, offset: int | None = None, tensor: str | None = None) -> Self:
        """Return the error for bytes read back that differ from those of the source."""
        where = "" if offset is None else f" at byte {offset}"
        inside = f", in tensor {tensor}" if tensor else ""
        error = cls(
            path,
            f"{path} differs from its source{where}{inside}",
            hint="the disk or memory altered data, or the source changed while it was read; rerun the command",
        )
        error.offset = offset
        return error


class OutputExistsError(LayoutError, FileExistsError):
    """The output path is taken, or no folder can be made there; nothing is ever overwritten."""

    def __init__(self, path: Path | str, reason: str, *, hint: str) -> None:
        super().__init__(f"will not write to {path}: {reason}", hint=hint)
        self.path = path
        self.errno, self.filename = errno.EEXIST, str(path)


class NotEnoughSpaceError(LayoutError, OSError):
    """The file system of the output has too little room; raised before the first byte is written."""

    def __init__(self, path: Path, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"not enough space for {path}: {format_size(needed_bytes)} to write, {format_size(free_bytes)} free",
            details=(f"short by {format_size(needed_bytes - free_bytes)}",),
            hint="free some space, or choose an output folder on another disk",
        )
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.errno, self.filename = errno.ENOSPC, str(path)


class WriteError(LayoutError, OSError):
    """The system refused to create, write or flush an output file (disk full, quota, I/O error)."""

    def __init__(self, path: Path, reason: OSError, *, hint: str | None = None) -> None:
        super().__init__(
            f"cannot write {path}: {reason.strerror or reason}",
            hint=hint or "no partial output remains; fix the cause and rerun the command",
        )
        self.path = path
        self.errno, self.filename = reason.errno, str(path)


class LoadError(BigloadError):
    """Tensors could not be brought into memory."""


class UnknownTensorError(LoadError, KeyError):
    """The checkpoint has no tensor of that name; `names` are those it lacks."""

    def __init__(self, checkpoint: str, names: Sequence[str]) -> None:
        super().__init__(
            f"{checkpoint} lacks {counted(len(names), 'tensor')} that were asked for",
            details=names,
            hint="bigload inspect --tensors lists what there is",
        )
        self.names = tuple(names)


class ReadError(LoadError, OSError):
    """A read from a checkpoint file failed, or the file ended before the tensor did."""

    def __init__(
        self, path: Path | str, reason: str | OSError, *, details: Sequence[str] = (), hint: str | None = None
    ) -> None:
        text = (reason.strerror or str(reason)) if isinstance(reason, OSError) else reason
        super().__init__(f"cannot read {path}: {text}", details=details, hint=hint)
        self.path = path


class RankError(BigloadError):
    """Another process of the group failed, or is gone.

    Attributes:
        rank: Which one, None if that is not known.
        reason: What it raised, or how it ended.
        function: Call such as `main_process_first` in which the others waited for it, if it was in one.
        traceback: Last lines of its traceback, if it was in such a call.
    """

    def __init__(
        self,
        rank: int | None,
        reason: str,
        *,
        function: str | None = None,
        traceback: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        who = "another process" if rank is None else f"process {rank}"
        where = "" if function is None else f" in {function}, where the others wait for it"
        super().__init__(
            f"{who} failed{where}: {reason}",
            details=[f"{rank}: {line}" for line in traceback],
            hint=hint or "its error text says why; the others stopped because of it",
        )
        self.reason = reason
        self.rank = rank
        self.function = function
        self.traceback = tuple(traceback)


class ParallelError(BigloadError):
    """A model could not be spread over workers, or not run by them."""


class ProcessControlError(BigloadError, RuntimeError):
    """Processes cannot wait for each other: they do not know each other, or would wait for ever."""


class ModelNotSendableError(ParallelError, TypeError):
    """A model, or an argument of a call, cannot be made again in another process, or copied with its workers."""


class WorkerError(ParallelError, RuntimeError):
    """A worker raised or ended, the answers of workers differ, or they have been ended before.

    Attributes:
        reason: Which of these.
        rank: Worker that raised or ended.
        kind: Class of the exception that it raised.
        worker_traceback: Text of that exception's traceback.
        is_shared: All workers raised the same, so they can be asked again. In all other cases they have been ended.
        exit_code: Exit code of the worker's process, negative for a signal, as in subprocess.
        log: End of what the worker wrote.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["raised", "died", "disagreed", "ended"],
        rank: int | None = None,
        kind: str = "",
        worker_traceback: str = "",
        is_shared: bool = False,
        exit_code: int | None = None,
        log: str = "",
        details: Sequence[str] = (),
        hint: str | None = "all workers have been ended; call parallelize again",
    ) -> None:
        super().__init__(message, details=details, hint=hint)
        self.reason = reason
        self.rank = rank
        self.kind = kind
        self.worker_traceback = worker_traceback
        self.is_shared = is_shared
        self.exit_code = exit_code
        self.log = log


class WorkerTimeoutError(ParallelError, TimeoutError):
    """Workers `ranks` did not answer within `seconds`; all have been ended. `stacks` says where each was, by rank."""

    def __init__(self, ranks: Sequence[int], doing: str, *, seconds: float, stacks: dict[int, str]) -> None:
        who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
        super().__init__(
            f"no answer of {who} within {seconds:g} s while {doing}",
            details=[line for rank, text in stacks.items() for line in (f"worker {rank} was at:", *text.splitlines())],
            hint="all workers have been ended; give a longer time-out if the work takes longer",
        )
        self.ranks = tuple(ranks)
        self.seconds = seconds
        self.stacks = stacks


class UnsupportedDTypeError(LoadError, TypeError):
    """The installed torch has no counterpart of a dtype in the checkpoint."""

    def __init__(self, dtype: str, tensors: Sequence[str]) -> None:
        super().__init__(
            f"torch has no dtype for {dtype}, the type of {counted(len(tensors), 'tensor')}",
            details=tensors,
            hint="load the other tensors only (only=...), or use a torch release that knows this dtype",
        )
        self.dtype = dtype
        self.tensors = tuple(tensors)


class UnsupportedMethodError(LoadError, ValueError):
    """The file at `path` cannot be read by the `method` that was asked for."""

    def __init__(self, path: Path | str, method: str, reason: str) -> None:
        super().__init__(
            f"cannot read {path} by the method {method}: {reason}",
            hint='leave the choice to "auto", or take "read"; every file system offers that',
        )
        self.path = path
        self.method = method


class NotEnoughMemoryError(LoadError, MemoryError):
    """The tensors are larger than the free memory, which is found before anything is read, or the system refused it."""

    def __init__(self, name: str, *, needed_bytes: int, available_bytes: int, hint: str) -> None:
        needed = f"{format_size(needed_bytes)} to load, " if needed_bytes else ""
        super().__init__(
            f"{name} does not fit into memory: {needed}{format_size(available_bytes)} available", hint=hint
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


_OF_CONTRADICTIONS = (
    "download files again that are incomplete or of several versions of the checkpoint, and make the model by the "
    "config.json beside them"
)


class StateDictMismatchError(LoadError, ValueError):
    """The tensors of a checkpoint and the parameters and buffers of a module do not correspond."""

    def __init__(
        self,
        module: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[str] = (),
        problems: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        if hint is None:
            hint = f"{_OF_CONTRADICTIONS if problems else 'strict=False loads what does match'}; nothing was assigned"
        super().__init__(
            f"the checkpoint does not match {module}: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(misshapen)} of another shape"
            + (f", {counted(len(problems), 'problem')} of conversion" if problems else ""),
            details=[
                f"{what}: {name}"
                for what, names in (
                    ("conversion", problems),
                    (f"missing from the checkpoint{', or not converted' if problems else ''}", missing),
                    ("not in the module", unexpected),
                    ("other shape", misshapen),
                )
                for name in abridged(names, MAX_LISTED // 3)  # so that there is room for each kind
            ],
            hint=hint,
        )
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshapen = tuple(misshapen)
        self.problems = tuple(problems)

    @classmethod
    def of_shape(cls, name: str, *, expected: Sequence[int], found: Sequence[int]) -> Self:
        """Return the error for the offloaded weight `name`, whose values have another shape than it has."""
        return cls(
            "the model",
            misshapen=[f"{name} has the shape {list(expected)} in the model; its values have {list(found)}"],
            hint="offloaded weights keep their shape: change the model (as by resize_token_embeddings) before dispatch",
        )


class DispatchedModelError(LoadError, RuntimeError):
    """Hooks bring the weights of a model for each forward, which excludes what was asked for.

    Such a model cannot be moved, cast, edited, trained or dispatched again. `names` are the weights or modules
    concerned.
    """

    def __init__(self, message: str, names: Sequence[str], *, hint: str) -> None:
        super().__init__(message, details=[name or "(the model itself)" for name in names], hint=hint)
        self.names = tuple(names)


class AbsentWeightError(LoadError, NotImplementedError, ValueError):
    """Values are needed that are not in memory: of the weights `names`, or of another tensor on the meta device."""

    def __init__(self, message: str, names: Sequence[str] = (), *, details: Sequence[str] = (), hint: str) -> None:
        super().__init__(message, details=details, hint=hint)
        self.names = tuple(names)


def install_command(extra: str) -> str:
    """Return the command that adds the packages of `extra`; pip leaves an installed bigload as it is, also a clone."""
    return f"pip install 'bigload[{extra}]'"


class MissingPackageError(BigloadError, ImportError):
    """A call needs `package`, an extra that is not installed."""

    def __init__(self, what: str, package: str, *, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed", hint=install_command(extra))
        self.package = package


_RENAMED = {
    **{f"{kind}OptionError": OptionError for kind in ("Bench", "Load", "Parallel", "Plan", "Process", "Reshard")},
    "AlreadyDispatchedError": DispatchedModelError,
    "BudgetError": OptionError,
    "ChangedShapeError": StateDictMismatchError,
    "IncompleteDeviceMapError": DeviceMapError,
    "InvalidManifestError": DamagedOutputError,
    "MainProcessFailedError": RankError,
    "MetaTensorError": AbsentWeightError,
    "MissingWeightsError": AbsentWeightError,
    "NoOffloadFolderError": OptionError,
    "NotOffloadableError": OptionError,
    "OffloadedTrainingError": DispatchedModelError,
    "ParallelCopyError": ModelNotSendableError,
    "QuantisedParameterError": LoadError,
    "VerificationError": DamagedOutputError,
    "WorkerDiedError": WorkerError,
    "WorkersDisagreeError": WorkerError,
    "WorkersEndedError": WorkerError,
}
"""Classes by former names, which programs may catch."""


def __getattr__(name: str) -> type[BigloadError]:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now {_RENAMED[name].__name__}", DeprecationWarning, stacklevel=2)
    return _RENAMED[name]
