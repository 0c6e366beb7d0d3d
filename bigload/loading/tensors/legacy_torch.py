"""Loader for files of torch before 1.6: bare pickles that only torch can read, and only as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, TypeGuard

from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.formats.state_dict import find_state_dict
from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import as_stored
from bigload.dtypes import DTYPES
from bigload.errors import InvalidCheckpointError, Problem, ReadError, UnsupportedDTypeError
from bigload.loading.memory_errors import memory_errors
from bigload.loading.scheduling.schedule import RequestedTensor

if TYPE_CHECKING:
    import torch

_BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DTYPES.values()}


def load_legacy(paths: Iterable[str | Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of all files in `paths`, in RAM, by `torch.load(..., weights_only=True)`.

    `paths` are those of a `LegacyPickleError`; files in today's form among them are read as well. Tensors come as torch
    makes them: those that share memory in a file share it here. Values that are no tensors are left out.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in map(Path, paths):
        for name, tensor in _load(path).items():
            if name in tensors:
                raise _invalid(path, "tensor-twice", f"tensor {name!r} is also in a file before this one")
            tensors[name] = tensor
    return tensors


def as_checkpoint(path: str, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Return what `tensors` would be as a checkpoint, so that what is wanted of them is chosen as of any other.

    Their spans are lengths only.
    """
    infos = {}
    for name, tensor in tensors.items():
        dtype = _BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedDTypeError(str(tensor.dtype), [name])
        infos[name] = TensorInfo(name, dtype, tuple(tensor.shape), Span("", 0, tensor.nbytes))
    return Checkpoint(path=path, root=Path(path), index_file=None, shards=(), tensors=infos, config=None)


def tensor_of(view: CheckpointView, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor `name` of `view`, made of the tensors that torch has loaded; itself where it is one of them."""
    import torch

    if view.conversion is None:
        return whole[name]
    made = view.conversion.tensors[name]
    first = whole[made.sources[0]]
    if made == as_stored(view.checkpoint.tensors[made.sources[0]]):
        return first
    tensor = torch.empty(made.shape, dtype=first.dtype)
    for piece in made.pieces:
        box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))
        tensor[box] = whole[piece.source].flatten().as_strided(piece.shape, piece.strides, piece.offset)
    return tensor


def as_requested(want: RequestedTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or the part, dtype and device of it that is wanted; itself where that is all of it."""
    from bigload.loading.tensors.views import torch_dtype

    part = want.part
    if part is not None:  # a copy, or the rest would stay in memory with it
        tensor = tensor.narrow(part.dim, part.start, part.stop - part.start).clone()
    return tensor.to(device=want.device, dtype=torch_dtype(want.dtype))


def _load(path: Path) -> dict[str, torch.Tensor]:
    import torch

    try:
        with memory_errors(str(path)):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ReadError(path, error) from error
    except MemoryError:
        raise
    except Exception as error:  # torch lets whatever a broken pickle causes through: KeyError, AttributeError, ...
        reason = _reason(error)
        if "global" in reason.lower():
            text = f"torch refuses to load it as weights only, and nothing was executed: {reason}"
            raise _invalid(path, "forbidden-global", text) from error
        raise _invalid(path, "bad-pickle", f"torch cannot load it: {reason}") from error

    def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor)

    try:
        return dict(find_state_dict(loaded, is_tensor).tensors)
    except FormatError as error:
        raise _invalid(path, error.code, error.text) from None


def _reason(error: Exception) -> str:
    """Return torch's reason in its first sentence, without the advice to load the file unsafely."""
    # That advice is what torch wraps around the error of its unpickler, which stays the context of its own.
    inner = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ is not None else error
    sentence = " ".join(str(inner).split()).partition(". ")[0].removesuffix(".")
    return f"{type(inner).__name__}: {sentence:.300}"


def _invalid(path: Path, code: str, text: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code=code, file=path.name, text=text)])
