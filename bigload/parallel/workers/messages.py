"""Messages between a process and its workers: pickled values and tensors over a pair of sockets of these two.

The bytes of tensors are beside the pickle, not copied into it, and a view of a tensor is sent without the rest of its
storage.

    8 bytes             number of parts, little endian
    8 bytes each        lengths of the parts
    the parts           dtypes and shapes of the tensors, pickled; the value, pickled; the bytes of each tensor

A pickle can run anything, so none is read but from a socket that this process, or the one that started it, has made.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from bigload.loading.tensors.views import bytes_of

PersistentId = Callable[[object], object | None]
"""Returns the id, made of builtins alone, of a value that stays where it is; `None` for values to pickle."""

PersistentLoad = Callable[[object], object]
"""Returns the value that has an id."""

Reduce = Callable[[object], object]
"""Returns how to pickle a value, as `pickle.Pickler.reducer_override` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A pickled value with indices in place of its tensors, which are on the CPU, dense, each once."""

    pickled: bytes
    tensors: tuple[torch.Tensor, ...]


def pack(value: object, *, persistent_id: PersistentId | None = None, reduce: Reduce | None = None) -> Message:
    """Return `value` pickled: tensors as they are now, DTensors whole, which is a collective of all their ranks.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, persistent_id, reduce)
    packer.dump(value)
    return Message(pickled=buffer.getvalue(), tensors=tuple(packer.tensors))


def unpack(
    message: Message, *, device: torch.device | None = None, persistent_load: PersistentLoad | None = None
) -> object:
    """Return the value of `message`, with its tensors on `device`."""
    tensors = message.tensors if device is None else [tensor.to(device) for tensor in message.tensors]
    return _Unpacker(message.pickled, tensors, persistent_load).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, persistent_id: PersistentId | None, reduce: Reduce | None) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, tuple[int, object]] = {}
        self._persistent_id = persistent_id
        self._reduce = reduce

    def persistent_id(self, value: object) -> object:
        stays = None if self._persistent_id is None else self._persistent_id(value)
        if stays is not None:
            return "persistent", stays
        return self._number(value) if isinstance(value, torch.Tensor) else None

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - what `__reduce__` may return
        return NotImplemented if self._reduce is None else self._reduce(value)

    def _number(self, value: torch.Tensor) -> object:
        is_parameter = isinstance(value, torch.nn.Parameter)
        if type(value) not in (torch.Tensor, torch.nn.Parameter, DTensor) or value.layout is not torch.strided:
            return None  # classes of their own, sparse and quantized tensors know how to pickle themselves
        if value.device.type == "meta" or value.is_quantized:
            return None
        if id(value) not in self._numbers:
            # The value stays beside its number: another one could get its id when it is gone.
            self._numbers[id(value)] = len(self.tensors), value
            self.tensors.append(_dense(value))
        return ("parameter" if is_parameter else "tensor"), self._numbers[id(value)][0]


def _dense(value: torch.Tensor) -> torch.Tensor:
    whole = value.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.resolve_conj().resolve_neg().cpu().contiguous()


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor], persistent_load: PersistentLoad | None) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._persistent_load = persistent_load

    def persistent_load(self, stored: object) -> object:
        kind, what = cast(tuple[str, Any], stored)  # as `persistent_id` made it
        if kind == "persistent":
            assert self._persistent_load is not None
            return self._persistent_load(what)
        tensor = self._tensors[what]
        return torch.nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor


def send(to: socket.socket, message: Message) -> None:
    """Write `message`. Waits for the reader where it is larger than the buffer of the socket.

    Raises:
        OSError: the other side is gone, or does not read within the time-out of the socket.
    """
    buffers = [bytes_of(tensor) for tensor in message.tensors]
    about = pickle.dumps([(tensor.dtype, tuple(tensor.shape)) for tensor in message.tensors], protocol=5)
    parts = [memoryview(about), memoryview(message.pickled), *buffers]
    to.sendall(struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts)))
    for part in parts:
        to.sendall(part)


def receive(sender: socket.socket) -> Message:
    """Read a message.

    Raises:
        EOFError: the other side is gone.
        OSError: the connection broke, or nothing came within the time-out of the socket.
    """
    (num_parts,) = struct.unpack("<Q", _read(sender, 8))
    lengths = struct.unpack(f"<{num_parts}Q", _read(sender, 8 * num_parts))
    about, pickled, *buffers = [_read(sender, length) for length in lengths]
    forms = pickle.loads(about)
    tensors = [_tensor(buffer, dtype, shape) for buffer, (dtype, shape) in zip(buffers, forms, strict=True)]
    return Message(pickled=bytes(pickled), tensors=tuple(tensors))


def _tensor(buffer: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not buffer:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


def _read(sender: socket.socket, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    missing = memoryview(buffer)
    while missing:
        num_read = sender.recv_into(missing)
        if not num_read:
            raise EOFError("the other side of the connection is gone")
        missing = missing[num_read:]
    return buffer
