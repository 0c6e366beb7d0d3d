"""Every error that bigload raises on purpose.

    BigloadError
    ├── OptionError                      an argument, option or variable that cannot be (ValueError)
    ├── CheckpointError                  what is on disk
    │   ├── CheckpointNotFoundError      nothing at that path             (FileNotFoundError)
    │   ├── InvalidCheckpointError       files that do not hold together  (ValueError)
    │   ├── UnsupportedFormatError       weights in a format that is known and not read (ValueError)
    │   └── LegacyPickleError            bare pickles, which only torch reads
    ├── PlanError                        where weights go
    │   ├── BudgetError                  a memory budget that makes no sense (ValueError)
    │   ├── DoesNotFitError              no placement keeps the limits
    │   ├── PlanNotFoundError            no file at that path             (FileNotFoundError)
    │   ├── InvalidPlanError             a plan file that is not one      (ValueError)
    │   ├── IncompleteDeviceMapError     tensors of a model without a device (ValueError)
    │   ├── NamesUnknownError            what a model calls its modules is not known
    │   ├── PartitionError               tensors that ranks cannot divide as asked (ValueError)
    │   └── StalePlanError               made for another version of the checkpoint
    ├── LayoutError                      forms on disk
    │   ├── ManifestNotFoundError        no folder that a reshard finished (FileNotFoundError)
    │   ├── InvalidManifestError         a manifest that is not one       (ValueError)
    │   ├── DamagedOutputError           files are not what was written
    │   ├── OutputExistsError            refuses to overwrite             (FileExistsError)
    │   ├── NotEnoughSpaceError          the disk is too small            (OSError)
    │   ├── NotOffloadableError          what an offload folder cannot hold (ValueError)
    │   ├── OtherWeightsError            weight files beside a checkpoint that cannot be carried along (ValueError)
    │   ├── WriteError                   the system refused a write       (OSError)
    │   └── VerificationError            a written byte differs from its source
    ├── LoadError                        bytes to tensors
    │   ├── UnknownTensorError           asked for by a name that is not there (KeyError)
    │   ├── ReadError                    a read failed or came back short (OSError)
    │   ├── DeviceNotPresentError        a map's device is not here       (RuntimeError)
    │   ├── UnsupportedDTypeError        torch has no such dtype          (TypeError)
    │   ├── UnsupportedMethodError       files cannot be read that way    (ValueError)
    │   ├── NotEnoughMemoryError         the tensors exceed free memory   (MemoryError)
    │   ├── QuantisedParameterError      a parameter that packs its values itself (TypeError)
    │   ├── StateDictMismatchError       module and checkpoint disagree   (ValueError)
    │   ├── MissingWeightsError          a model that would run without some weights (ValueError)
    │   ├── AbsentWeightError            an operation on a weight that is not there (NotImplementedError)
    │   ├── ChangedShapeError            an offloaded weight whose form was changed (ValueError)
    │   ├── MetaTensorError              an argument or output without values (NotImplementedError)
    │   ├── NoOffloadFolderError         weights for the disk, and no place there (ValueError)
    │   ├── AlreadyDispatchedError       a model that has hooks is to get others (RuntimeError)
    │   ├── DispatchedModelError         a model that hooks hold in its places (RuntimeError)
    │   ├── CompiledModuleError          torch.jit has compiled modules that hooks should serve (ValueError)
    │   ├── OffloadedEditError           values for offloaded weights, which would be lost (RuntimeError)
    │   └── OffloadedTrainingError       a gradient for a weight that does not stay (RuntimeError)
    ├── RankError                        another process of a team failed
    │   └── MainProcessFailedError       in what it does before the others
    ├── ParallelError                    a model spread over workers
    │   ├── ModelNotSendableError        workers cannot make it again     (TypeError)
    │   ├── ParallelCopyError            copied or pickled with workers   (TypeError)
    │   ├── WorkerError                  a worker raised; its traceback   (RuntimeError)
    │   ├── WorkerDiedError              a worker ended by itself         (RuntimeError)
    │   ├── WorkerTimeoutError           no answer in time                (TimeoutError)
    │   ├── WorkersDisagreeError         answers that differ              (RuntimeError)
    │   └── WorkersEndedError            called when they are gone        (RuntimeError)
    ├── ProcessControlError              processes that cannot wait for each other (RuntimeError)
    └── MissingPackageError              what was asked for needs a package that is not installed (ImportError)

Each carries its facts as fields. The text is composed here; rows and hint of `DoesNotFitError` come from
`planning/planner.py`. `str(error)` is the message, the details (one line each) and the hint; the command line prints
the same three parts.
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
        case str() | Path():
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
    """What is at `path` is known, and is no checkpoint that bigload reads; the message says what it is."""

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


class BudgetError(PlanError, ValueError):
    """A memory budget names an unknown device or a size that cannot be read."""


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
        details: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        if "total" in shortfalls:
            needed, usable = format_size(needed_bytes), format_size(usable_bytes)
            message = f"{name} does not fit: it needs {needed}, the budget has room for {usable}"
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


class IncompleteDeviceMapError(PlanError, ValueError):
    """A device map has no device for `names`, which a model has."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            "The device_map provided does not give any device for the following parameters: "
            + ", ".join(abridged(names)),
            hint='give a device for "" to cover all that no other key does; a plan covers models with the names of the '
            "checkpoint that it was made for",
        )
        self.names = tuple(names)


class NamesUnknownError(PlanError):
    """A device map cannot be put into the names of the model in memory; the message says why."""


class PartitionError(PlanError, ValueError):
    """Tensor-parallel ranks cannot divide a checkpoint as asked, or rules that say how cannot be read.

    `message` says what, `details` name each kind of tensor that is in the way.
    """


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
        super().__init__(f"no manifest of {path}: {reason}", hint=hint or "name a folder that bigload reshard made")
        self.path = path
        self.errno, self.filename = errno.ENOENT, str(path)


class InvalidManifestError(LayoutError, ValueError):
    """A manifest cannot be read, has another major schema version, or names what lies outside of its folder."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"{path} is not a usable manifest: {reason}",
            hint="it is damaged or of a later version of bigload; the folder cannot be verified without it",
        )
        self.path = path


class DamagedOutputError(LayoutError):
    """The files of the folder at `path` are not those that were written; `problems` lists every instance found."""

    def __init__(self, path: Path | str, problems: Sequence[Problem]) -> None:
        files = len({problem.file for problem in problems})
        super().__init__(
            f"{path} is not what was written: {counted(len(problems), 'problem')} in {counted(files, 'file')}",
            details=[str(problem) for problem in problems],
            hint="fetch the named files again, or reshard again from the source",
        )
        self.path = path
        self.problems = tuple(problems)


class OutputExistsError(LayoutError, FileExistsError):
    """The output path is taken; nothing is ever overwritten."""

    def __init__(self, path: Path, reason: str, *, hint: str) -> None:
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


class NotOffloadableError(LayoutError, ValueError):
    """An offload folder cannot hold what was asked for; `details` name the tensors, if it is about some."""

    def __init__(self, reason: str, *, tensors: Sequence[str] = (), hint: str) -> None:
        super().__init__(f"cannot write an offload folder: {reason}", details=tensors, hint=hint)


class OtherWeightsError(LayoutError, ValueError):
    """The folder of a checkpoint has weight files that an output would lack: parts of the model, as far as is known.

    `named` is the index or the file of the checkpoint alone, for the hint.
    """

    def __init__(self, root: Path, problems: Sequence[str], *, named: str) -> None:
        super().__init__(
            f"{root} has weight files beside the checkpoint that cannot be carried along",
            details=problems,
            hint=f"to write the checkpoint without them, name it instead of its folder: {root / named}",
        )


class WriteError(LayoutError, OSError):
    """The system refused to create, write or flush an output file (disk full, quota, I/O error)."""

    def __init__(self, path: Path, reason: OSError) -> None:
        super().__init__(
            f"cannot write {path}: {reason.strerror or reason}",
            hint="no partial output remains; fix the cause and rerun the command",
        )
        self.path = path
        self.errno, self.filename = reason.errno, str(path)


class VerificationError(LayoutError):
    """Bytes read back differ from the bytes of the source; first at `offset` of `path`, where that is known."""

    def __init__(self, path: Path, *, offset: int | None = None, tensor: str | None = None) -> None:
        where = "" if offset is None else f" at byte {offset}"
        inside = f", in tensor {tensor}" if tensor else ""
        super().__init__(
            f"{path} differs from its source{where}{inside}",
            hint="the disk or memory altered data, or the source changed while it was read; rerun the command",
        )
        self.path = path
        self.offset = offset


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

    def __init__(self, path: Path | str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"cannot read {path}: {reason}", hint=hint)
        self.path = path


class RankError(BigloadError):
    """Another process of the team failed, or is gone; `rank` is which, `None` if that is not known."""

    def __init__(self, rank: int | None, reason: str, *, hint: str | None = None) -> None:
        who = "another process" if rank is None else f"process {rank}"
        super().__init__(
            f"{who} failed: {reason}",
            hint=hint or "its error text says why; the others stopped because of it",
        )
        self.reason = reason
        self.rank = rank


class ParallelError(BigloadError):
    """A model could not be spread over workers, or not run by them."""


class MainProcessFailedError(RankError):
    """Process `rank`, which others wait for in `function`, failed there; `reason` is what it raised.

    `traceback` has the last lines of where, as Python shows it.
    """

    def __init__(self, rank: int, reason: str, *, function: str, traceback: Sequence[str] = ()) -> None:
        message = f"process {rank} failed in {function}, where the others wait for it: {reason}"
        hint = "its error text says why; the others stopped because of it"
        BigloadError.__init__(self, message, details=[f"{rank}: {line}" for line in traceback], hint=hint)
        self.rank = rank
        self.reason = reason
        self.function = function
        self.traceback = tuple(traceback)


class ProcessControlError(BigloadError, RuntimeError):
    """Processes cannot wait for each other: they do not know each other, or would wait for ever."""


class ModelNotSendableError(ParallelError, TypeError):
    """A value, a model or an argument of a call, cannot be made again in another process; `where` says which part."""

    def __init__(self, where: str, reason: str, *, hint: str) -> None:
        super().__init__(f"workers cannot get {where}: {reason}", hint=hint)
        self.where = where


class ParallelCopyError(ParallelError, TypeError):
    """A model whose methods run in workers was to be copied or pickled, which its workers cannot be."""

    def __init__(self) -> None:
        super().__init__(
            "a model that runs in workers can be neither copied nor pickled",
            hint="call its deparallelize() before, or take its state_dict()",
        )


class WorkerError(ParallelError, RuntimeError):
    """Worker `rank` raised an exception of class `kind`; `worker_traceback` is what it would have shown.

    Where all raised the same, `is_shared`, they can be asked again. Else they have been ended.
    """

    def __init__(self, rank: int, doing: str, *, kind: str, text: str, worker_traceback: str, is_shared: bool) -> None:
        super().__init__(
            f"worker {rank} raised {kind} while {doing}: {text}",
            details=("traceback of the worker:", *worker_traceback.rstrip().splitlines()[-MAX_LISTED + 1 :]),
            hint=None
            if is_shared
            else "other workers did not raise it, so all have been ended; call parallelize again",
        )
        self.rank = rank
        self.kind = kind
        self.worker_traceback = worker_traceback
        self.is_shared = is_shared


class WorkerDiedError(ParallelError, RuntimeError):
    """Worker `rank` ended by itself; the others have been ended.

    `exit_code` is that of its process, negative for a signal, as subprocess has it; `log` is the end of what it wrote.
    """

    def __init__(self, rank: int, doing: str, *, exit_code: int, ending: str, log: str) -> None:
        written = log.rstrip().splitlines()[-MAX_LISTED + 1 :]
        super().__init__(
            f"worker {rank} ended with {ending} while {doing}",
            details=("last lines of its output:", *written) if written else ("it wrote no output",),
            hint="the kernel sends SIGKILL when memory runs out; see dmesg"
            if "SIGKILL" in ending
            else "all workers have been ended; call parallelize again",
        )
        self.rank = rank
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


class WorkersDisagreeError(ParallelError, RuntimeError):
    """Workers came to different answers where they have to have the same; `answers` says what each has, by rank."""

    def __init__(self, doing: str, answers: Sequence[str]) -> None:
        super().__init__(
            f"the workers disagree after {doing}",
            details=[f"worker {rank}: {answer:.300}" for rank, answer in enumerate(answers)],
            hint="something in the model or its arguments differs between processes: time, the order of a set, "
            "or random numbers",
        )
        self.answers = tuple(answers)


class WorkersEndedError(ParallelError, RuntimeError):
    """The workers of a model are gone, and `reason` says since when."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the workers have ended: {reason}", hint="deparallelize the model, and parallelize it again")
        self.reason = reason


class DeviceNotPresentError(LoadError, RuntimeError):
    """A device map, a plan's for example, names a device that torch cannot use on this machine.

    Attributes:
        device: As the map names it.
        modules: What the map places there.
    """

    def __init__(self, device: str, modules: Sequence[str], reason: str) -> None:
        name = f"accelerator {device}" if device.isdigit() else device
        super().__init__(
            f"{counted(len(modules), 'module')} of the device map cannot go to {name}: torch cannot use it, {reason}",
            details=[module or "the whole model" for module in modules],
            hint="plan for the devices of this machine (bigload plan -m auto; bigload.plan(..., 'auto') in Python), "
            "or run on the machine that the plan is for",
        )
        self.device = device
        self.modules = tuple(modules)


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


class QuantisedParameterError(LoadError, TypeError):
    """Values cannot be put into a parameter of class `kind`, which packs them itself when it is moved."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(
            f"cannot set the values of {name}: it is a {kind}, whose values bitsandbytes packs on an accelerator",
            hint="let the library that quantised the model load its weights (from_pretrained of transformers does)",
        )
        self.name = name
        self.kind = kind


class StateDictMismatchError(LoadError, ValueError):
    """The tensors of a checkpoint and the parameters and buffers of a module do not correspond."""

    def __init__(
        self,
        module: str,
        *,
        missing: Sequence[str],
        unexpected: Sequence[str],
        misshapen: Sequence[str],
        hint: str = "strict=False loads what does match; nothing was assigned",
    ) -> None:
        super().__init__(
            f"the checkpoint does not match {module}: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(misshapen)} of another shape",
            details=[
                f"{what}: {name}"
                for what, names in (
                    ("missing from the checkpoint", missing),
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


class NoOffloadFolderError(LoadError, ValueError):
    """Weights of `modules` are to be on disk, and nothing says where."""

    def __init__(self, argument: str, modules: Sequence[str], *, reason: str) -> None:
        super().__init__(
            f"the device map has modules on disk, and no {argument} is given: {reason}",
            details=[name or "(the whole model)" for name in modules],
            hint=f"give a folder with room for their weights as {argument}; nothing was loaded or moved",
        )
        self.modules = tuple(modules)


class DispatchedModelError(LoadError, RuntimeError):
    """A model cannot be moved, or cast, by `method`: the values of `parameters` are elsewhere between forwards."""

    def __init__(
        self, model: str, method: str, parameters: Sequence[str], *, verb: Literal["move", "cast"] = "move"
    ) -> None:
        hints = {
            "move": "dispatch it anew with another device map, or take bigload.get_state_dict_offloaded_model(model)",
            "cast": "cast it before it is dispatched, or load it with bigload.load_checkpoint_and_dispatch(dtype=...)",
        }
        super().__init__(
            f"You can't {verb} a model that has some modules offloaded to cpu or disk: {model}.{method}() would have "
            f"nothing to {verb} of {counted(len(parameters), 'parameter')}, which hooks bring in for each forward",
            details=parameters,
            hint=hints[verb],
        )
        self.parameters = tuple(parameters)


class OffloadedEditError(LoadError, RuntimeError):
    """Values for `parameters`, which are offloaded, would be lost: `by` changes placeholders, which hold none."""

    def __init__(self, parameters: Sequence[str], *, by: str) -> None:
        super().__init__(
            f"{by} would change {counted(len(parameters), 'weight')} that hooks bring in for each forward, and the new "
            "values would be lost: between forwards only a placeholder without memory is in the module",
            details=parameters,
            hint="remove the hooks with bigload.remove_hook_from_submodules(model), change the model and dispatch it "
            "again; or give weights memory of their own with load_state_dict(..., assign=True)",
        )
        self.parameters = tuple(parameters)


class CompiledModuleError(LoadError, ValueError):
    """A model to be dispatched has `modules` that `torch.jit` has compiled: no hook can replace their weights."""

    def __init__(self, model: str, modules: Sequence[str]) -> None:
        super().__init__(
            f"{model} cannot be dispatched: torch.jit compiled {counted(len(modules), 'module')} of it, and no hook "
            "can replace the weights in there",
            details=modules,
            hint="dispatch the model with the plain modules in it; torch.compile works with hooks, torch.jit does not",
        )
        self.modules = tuple(modules)


class AlreadyDispatchedError(LoadError, RuntimeError):
    """A model is to be dispatched for a while, but modules of it, `hooked`, have hooks."""

    def __init__(self, model: str, hooked: Sequence[str]) -> None:
        super().__init__(
            f"{model} has hooks already, on {counted(len(hooked), 'module')}: it is dispatched, or offloaded",
            details=[name or "(the model itself)" for name in hooked],
            hint="leave the `with` statement that dispatched it, or call bigload.remove_hook_from_submodules(model)",
        )
        self.hooked = tuple(hooked)


class AbsentWeightError(LoadError, NotImplementedError):
    """`operation` needs values of the weights `names`, which are not in memory at that moment."""

    def __init__(self, names: Sequence[str], operation: str, *, reason: str, hint: str) -> None:
        super().__init__(f"cannot compute {operation} with {', '.join(abridged(names))}, which {reason}", hint=hint)
        self.names = tuple(names)
        self.operation = operation


class ChangedShapeError(LoadError, ValueError):
    """The values of the weight `name` have the shape `found`, and the module wants `expected`."""

    def __init__(self, name: str, *, expected: Sequence[int], found: Sequence[int]) -> None:
        super().__init__(
            f"{name} has the shape {list(expected)} in the model; its values have {list(found)}",
            hint="offloaded weights keep their shape: change the model (as by resize_token_embeddings) before dispatch",
        )
        self.name = name


class MetaTensorError(LoadError, NotImplementedError):
    """A tensor without values was to be sent to `device`, for `module` if that is known."""

    def __init__(self, device: str, module: str | None = None) -> None:
        what = "an argument or output" if module is None else f"an argument or output of {module}"
        super().__init__(
            f"{what} is on the meta device, where it has no values, and cannot be sent to {device}",
            hint="code such as x.to(child.weight.device) sends x to the meta device while that child is offloaded: "
            "keep the child on a device by the device map",
        )
        self.device = device
        self.module = module


class MissingWeightsError(LoadError, ValueError):
    """Tensors of a model, `missing`, are on the meta device, and nothing would bring their values when it runs."""

    def __init__(self, model: str, missing: Sequence[str], *, hint: str) -> None:
        super().__init__(
            f"{model} cannot run: no hook gives values to {counted(len(missing), 'tensor')} on the meta device",
            details=missing,
            hint=hint,
        )
        self.missing = tuple(missing)


class OffloadedTrainingError(LoadError, RuntimeError):
    """A gradient reached the weight `name`, which is offloaded and wants gradients."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a gradient has reached {name}, which is offloaded: it is there only while its module runs, and neither a "
            "gradient of it nor what an optimizer made of it would be kept",
            hint="freeze what is offloaded, with model.requires_grad_(False), and train adapters beside it; or keep "
            "what is to be trained on a device, by the device map",
        )
        self.name = name


class MissingPackageError(BigloadError, ImportError):
    """What was asked for needs `package`, an extra that is not installed."""

    def __init__(self, what: str, package: str, *, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed", hint=f"pip install 'bigload[{extra}]'")
        self.package = package


def __getattr__(name: str) -> type[BigloadError]:
    """Return the class of an error of version 0.1, which programs may catch."""
    if name not in {f"{kind}OptionError" for kind in ("Bench", "Load", "Parallel", "Plan", "Process", "Reshard")}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now OptionError", DeprecationWarning, stacklevel=2)
    return OptionError
