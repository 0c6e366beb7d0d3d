"""Files of torch before 1.6: bare pickles, which torch alone can read, and only as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from bigload.checkpoint.refusal import Refusal
from bigload.checkpoint.state_dict import find_state_dict
from bigload.errors import InvalidCheckpointError, Problem, ReadError

if TYPE_CHECKING:
    import torch


def load_legacy(paths: Iterable[str | Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of all files in `paths`, in RAM, by `torch.load(..., weights_only=True)`.

    `paths` are those of a `LegacyPickleError`; files in today's form among them are read as well. Tensors come as torch
    makes them: those that share memory in a file share it here. Values that are no tensors are left out.

    Raises:
        InvalidCheckpointError: a file asks for more than weights, is damaged, or holds no tensors by name; or two files
            hold a tensor of one name.
        ReadError: a file cannot be opened or read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in map(Path, paths):
        for name, tensor in _load(path).items():
            if name in tensors:
                raise _invalid(path, "tensor-twice", f"tensor {name!r} is also in a file before this one")
            tensors[name] = tensor
    return tensors


def _load(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ReadError(path, error.strerror or str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # torch lets whatever a broken pickle causes through: KeyError, AttributeError, ...
        reason = _reason(error)
        if "global" in reason.lower():
            text = f"torch refuses to load it as weights only, and nothing was executed: {reason}"
            raise _invalid(path, "forbidden-global", text) from error
        raise _invalid(path, "bad-pickle", f"torch cannot load it: {type(error).__name__}, {reason}") from error

    def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor)

    try:
        return dict(find_state_dict(loaded, is_tensor).tensors)
    except Refusal as refusal:
        raise _invalid(path, refusal.code, refusal.text) from None


def _reason(error: Exception) -> str:
    """Return torch's reason in its first sentence, without the advice to load the file unsafely."""
    words = str(error)
    words = " ".join((words.partition("WeightsUnpickler error:")[2] or words).split())
    return f"{words.partition('. ')[0].removesuffix('.'):.300}" or "no reason given"


def _invalid(path: Path, code: str, text: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code=code, file=path.name, text=text)])
