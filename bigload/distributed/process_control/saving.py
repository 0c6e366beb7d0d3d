"""`save`: write a file in one process of many, whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bigload.distributed.process_control.process_index import is_local_main_process, is_main_process
from bigload.documents import atomic_file
from bigload.errors import OptionError
from bigload.extras import require

if TYPE_CHECKING:
    import torch

_WRITE_BYTES = 1 << 26
"""The most bytes of one write: a Ctrl-C is served in between."""

_log = logging.getLogger("bigload")


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write `obj` in the main process alone; the others go on at once, and `wait_for_everyone` lets them see the file.

    Args:
        obj: What to save; with `safe_serialization`, tensors by name.
        f: The file. It is there when all of it is on the disk, and until then, an older one stays. A link is followed.
            What is no ordinary file, an open file for one, is written to as it is.
        save_on_each_node: Write it in process 0 of each host, for disks that hosts do not share.
        safe_serialization: Write safetensors, else what `torch.save` writes. Names that are one tensor are written
            once, which is logged; views that only share memory are written each by itself.

    Raises:
        OptionError: `obj` cannot be written as safetensors.
        MissingPackageError: torch is not installed.
        WriteError: the system refused a write, or there is no such folder.
    """
    if not (is_local_main_process() if save_on_each_node else is_main_process()):
        return
    require("torch", asked_by="bigload.save", extra="torch")
    write = _write_safetensors if safe_serialization else _write_pickle
    if not isinstance(f, str | os.PathLike):
        write(obj, f)
        return
    with atomic_file(Path(f)) as target:
        write(obj, target)


def _write_pickle(obj: object, target: Path | IO[bytes]) -> None:
    import torch

    if not isinstance(target, Path):
        torch.save(obj, target)
        return
    with target.open("wb", buffering=0) as file:
        recording = _RecordingFile(file)
        try:
            torch.save(obj, recording)  # type: ignore[arg-type]  # all that it asks for is there
        except RuntimeError as error:
            if recording.error is None:
                raise
            raise recording.error from error


class _RecordingFile:
    """File that keeps the OSError of a failed write: torch raises a RuntimeError without it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._file = file

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _WRITE_BYTES):
                part = view[start : start + _WRITE_BYTES]
                while part:
                    part = part[self._file.write(part) :]
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def _write_safetensors(obj: object, target: Path | IO[bytes]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save as to_bytes
    from safetensors.torch import save_file

    tensors = _contiguous(_checked(obj))
    metadata = {"format": "pt"}  # by which transformers knows whose tensors they are
    if isinstance(target, Path):
        try:
            save_file(tensors, target, metadata=metadata)
        except SafetensorError as error:  # of what can be wrong, the tensors are known to be right
            raise OSError(str(error)) from error
    else:
        target.write(to_bytes(tensors, metadata=metadata))


def _checked(obj: object) -> Mapping[str, torch.Tensor]:
    import torch

    if not isinstance(obj, Mapping):
        raise OptionError.of("obj", type(obj).__name__, "tensors by name, as safetensors holds them")
    for name, value in obj.items():
        if not isinstance(name, str):
            raise OptionError.of("obj", f"a dict with the key {name!r:.60}", "names as its keys")
        if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
            kind = f"{name}: {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                kind += " on the meta device, without values" if value.is_meta else f" with the layout {value.layout}"
            raise OptionError.of("obj", kind, "dense tensors with values, as safetensors holds them")
    return obj


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` contiguous, each with a storage of its own; tied ones under their first name alone."""
    kept: dict[tuple[object, ...], str] = {}
    owners = set[tuple[object, int]]()
    contiguous = {}
    for name, tensor in tensors.items():
        view = _view(tensor)
        if view is not None and view in kept:
            _log.warning("%s is not written: it is the same tensor as %s", name, kept[view])
            continue
        value = tensor.detach().resolve_conj().resolve_neg().contiguous()
        owner = (value.device, value.untyped_storage().data_ptr())
        is_shared = view is not None and owner in owners
        contiguous[name] = value.clone() if is_shared else value
        if view is not None:
            kept[view] = name
            owners.add(owner)
    return contiguous


def _view(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors of the same bytes, `None` if there are none."""
    if not tensor.numel():
        return None
    where = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return (*where, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
