r"""Unpickler for state dicts that imports nothing and calls only functions of this module.

A pickle is a program for a stack machine (`pickletools` describes its opcodes) that may import anything and call it.
Here the opcodes are those of plain data and tensors (protocols 2 to 5), globals come from a list, and each is inert:
instead of a tensor, `torch._utils._rebuild_tensor_v2` makes a `TensorRef`. The forms are those of torch 2.13
(`torch/_utils.py`, `torch/serialization.py`).

The base class is the stdlib's unpickler in Python, `pickle._Unpickler`, for its table of opcodes. `pickle.Unpickler`
is written in C and has none, and a few bytes make it
- fill the memory: `b"Nr\xff\xff\xff\x7f."` allocates a memo of 32 GiB;
- run without end, and without heeding Ctrl-C: `b")q\0" + b"h\0h\0\x86q\0" * 60 + b"}h\0Ns."` hashes 2^60 tuples;
- change the functions of this module: `b"c<module>\n<function>\nN}X\x0c\0\0\0__defaults__)s\x86b."`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar

from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.formats.torch_storages import STORAGE_DTYPES

MAX_PICKLE_BYTES = 16 * 2**20
"""A tensor takes about 120, so this is more than 100 000 tensors. A byte takes up to 25 bytes of memory beside objects;
a file can fill some 500 MB."""

MAX_OBJECTS = 1_500_000
"""A tensor takes about 5 of them, 12 with protocol 4. Each takes up to 250 bytes of memory."""

MAX_KEY = 2**60
"""Larger whole numbers are no keys of dicts: their hashes can be made to collide."""

MAX_KEY_LENGTH = 100
"""Of storages, whose keys are numbers in practice; and what an error shows of a key. A text can be used many times."""

MAX_SHOWN_KEYS = 5


@dataclass(frozen=True, slots=True)
class Global:
    """Name of something that could be imported; it never is."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Storage that tensors are views of: record `key`, `num_elements` elements of torch's storage class `kind`."""

    kind: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Tensor as its pickle describes it; nothing of it is checked. `dtype` is `None` where the storage decides."""

    storage: object
    offset: object
    shape: object
    strides: object
    dtype: object = None
    flags: object = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """Harmless object whose content is not kept; `tensor_kind` describes it if torch would make a tensor of it."""

    tensor_kind: str | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """Object of the class `kind` with the state that its pickle gives it, unchecked; a key of a dict by identity."""

    kind: str
    state: object = None


@dataclass(frozen=True, slots=True)
class InstanceOf:
    """Class whose objects become `Instance`s."""

    kind: str


Inert = Global | InstanceOf | Callable[..., object]
"""What stands for a global: its name, a class of `Instance`s, or a function of this module in its place."""


def unpickle(
    data: bytes,
    *,
    more: Mapping[tuple[str, str], Inert] = MappingProxyType({}),
    times: int = 1,
) -> object:
    """Return what the pickle `data` describes: plain values, with `TensorRef`s for tensors and `Opaque`s for the rest.

    Dicts have keys of text or whole numbers, or `Instance`s; attributes of dicts (`_metadata`) are dropped. `more` are
    globals that are listed beside those of state dicts, by module and name. `times` as many bytes and objects are read
    as of a state dict.

    Raises:
        FormatError: it asks for a global that is not listed, uses an opcode that state dicts do not, is broken or too
            large.
    """
    max_bytes, max_objects = times * MAX_PICKLE_BYTES, times * MAX_OBJECTS
    if len(data) > max_bytes:
        raise FormatError("pickle-too-large", f"its pickle has {len(data)} bytes, at most {max_bytes} are read")
    # These bytes occur in texts and numbers too, so they are at least as many as the objects.
    num_objects = sum(map(data.count, _OBJECT_OPCODES))
    if num_objects > max_objects:
        raise FormatError("pickle-too-large", f"its pickle makes {num_objects} objects, at most {max_objects} are made")
    file = BytesIO(data)
    unpickler = _Unpickler(file)
    unpickler.more = more
    try:
        return unpickler.load()
    except (AttributeError, EOFError, LookupError, TypeError, ValueError, OverflowError, *_PICKLE_ERRORS):
        text = f"its pickle is broken, or does what no state dict does, before byte {file.tell()}"
        raise FormatError("bad-pickle", text + unpickler.place()) from None


_PICKLE_ERRORS = (pickle.UnpicklingError, struct.error)
_OBJECT_OPCODES = (pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.MARK, pickle.TUPLE1, pickle.MEMOIZE)
"""Opcodes that take more than 25 bytes of memory for each byte of the pickle."""


def _text(length_bytes: int) -> Callable[[_Unpickler], None]:
    # The base class lets surrogates pass, which cannot be printed.
    def load(self: _Unpickler) -> None:
        self.append(self.read(int.from_bytes(self.read(length_bytes), "little")).decode())

    return load


class _Unpickler(pickle._Unpickler):
    stack: list[object]
    metastack: list[list[object]]
    append: Callable[[object], None]
    read: Callable[[int], bytes]
    _file_read: Callable[[int], bytes]
    pop_mark: Callable[[], list[object]]
    more: Mapping[tuple[str, str], Inert]

    def find_class(self, module: str, name: str) -> Inert:
        found = _GLOBALS.get((module, name)) or self.more.get((module, name))
        if found is None:
            text = f"its pickle asks for {f'{module}.{name}'!r:.200}, which is no part of a state dict"
            raise FormatError("forbidden-global", f"{text}; nothing was executed{self.place()}")
        return found

    def persistent_load(self, pid: object) -> StorageRef:
        match pid:
            case ("storage", Global(name=kind), str(key), str(), int(num_elements)) if len(key) <= MAX_KEY_LENGTH:
                return StorageRef(kind, key, num_elements)
        raise pickle.UnpicklingError

    def place(self) -> str:
        """Return words for the innermost keys of dicts whose values are incomplete."""
        keys = []
        for lower, frame in pairwise([*self.metastack, self.stack][-MAX_SHOWN_KEYS - 1 :]):
            key = next((item for item in reversed(frame[::2]) if isinstance(item, str)), None)
            if lower and isinstance(lower[-1], dict) and key is not None:
                keys.append(key[:MAX_KEY_LENGTH])
        return f" (below {'.'.join(keys)!r:.200})" if keys else ""

    def skip_version(self) -> None:
        self.read(1)
        self.read = self._file_read  # for arguments; the base class's own looks for frames first: 10% of the time

    def skip_frame(self) -> None:
        self.read(8)  # frames are a hint for readers of streams

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update_dict([key, value])

    def set_items(self) -> None:
        self.update_dict(self.pop_mark())

    def update_dict(self, items: list[object]) -> None:
        # Keys are checked before they are hashed: to hash a tuple of tuples can take forever.
        target = self.stack[-1]
        for key in items[::2]:
            if not isinstance(key, str | Instance) and not (isinstance(key, int) and abs(key) < MAX_KEY):
                raise pickle.UnpicklingError
        if not isinstance(target, dict):
            raise pickle.UnpicklingError
        target.update(zip(items[::2], items[1::2], strict=True))

    def new_instance(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        if not isinstance(made, InstanceOf) or not isinstance(arguments, tuple) or arguments:
            raise pickle.UnpicklingError
        self.append(Instance(made.kind))

    def set_state(self) -> None:
        # The attributes of a state dict are versions of modules. The base class would set them on any object.
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Instance):
            target.state = state
        elif not isinstance(target, dict | TensorRef):
            raise pickle.UnpicklingError

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{
            code[0]: pickle._Unpickler.dispatch[code[0]]
            for code in (
                *(pickle.STOP, pickle.MARK, pickle.BINPERSID, pickle.GLOBAL, pickle.STACK_GLOBAL),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
                *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
                *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
                *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
                *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.REDUCE),
                *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
            )
        },
        pickle.PROTO[0]: skip_version,
        pickle.FRAME[0]: skip_frame,
        pickle.SHORT_BINUNICODE[0]: _text(1),
        pickle.BINUNICODE[0]: _text(4),
        pickle.BINUNICODE8[0]: _text(8),
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.BUILD[0]: set_state,
        pickle.NEWOBJ[0]: new_instance,
    }


# Inert functions under the names of those that a pickle calls.


def _tensor_v2(
    storage: object, offset: object, shape: object, strides: object, _grad: object, _hooks: object, flags: object = None
) -> TensorRef:
    return TensorRef(storage, offset, shape, strides, None, flags)


def _tensor_v3(*arguments: object) -> TensorRef:
    storage, offset, shape, strides, _, _, dtype, *flags = arguments
    return TensorRef(storage, offset, shape, strides, dtype, *flags)


def _parameter(tensor: object, _grad: object, _hooks: object, _state: object = None) -> object:
    return tensor


def _dict(*arguments: object) -> dict[object, object]:
    match arguments:
        case ():
            return {}
        case (dict(pairs),):
            return pairs  # itself: a copy of a large dict could be asked for many times
        case _:
            raise TypeError


def _size(dimensions: object) -> tuple[object, ...]:
    if not isinstance(dimensions, tuple):
        raise TypeError
    return dimensions


def opaque(tensor_kind: str | None = None) -> Callable[..., Opaque]:
    """Return a function that takes anything and returns an `Opaque`."""
    return lambda *_: Opaque(tensor_kind)


_NAMES = (
    *STORAGE_DTYPES,
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    *("per_channel_affine_float_qparams", "Tensor"),
)
_CLASSES = (
    *(("torch", name) for name in _NAMES),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.nn.parameter", "Parameter"),  # the class that _rebuild_from_type_v2 is given
)
_GLOBALS: Mapping[tuple[str, str], Global | Callable[..., object]] = MappingProxyType(
    {
        **{place: Global(*place) for place in _CLASSES},
        ("collections", "OrderedDict"): _dict,
        ("collections", "Counter"): _dict,
        ("torch", "Size"): _size,
        ("torch", "device"): opaque(None),
        ("torch.serialization", "_get_layout"): opaque(None),
        ("_codecs", "encode"): opaque(None),  # bytes, below protocol 3
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._utils", "_rebuild_qtensor"): opaque("quantised by torch"),
        ("torch._utils", "_rebuild_sparse_tensor"): opaque("sparse"),
        ("torch._utils", "_rebuild_nested_tensor"): opaque("nested"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): opaque("on the meta device, which holds no data"),
        ("torch._utils", "_rebuild_wrapper_subclass"): opaque("of a tensor subclass"),
        ("torch._tensor", "_rebuild_from_type_v2"): opaque("of a tensor subclass"),
    }
)
