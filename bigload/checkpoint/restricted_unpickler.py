"""Read the pickle of a state dict without running it.

A pickle is a program for a stack machine (the module pickletools describes its opcodes) that may import anything and
call it. This machine knows the opcodes that pickles of plain data and tensors consist of (protocols 2 to 5), a list of
globals that are here nothing but names, and calls nothing: what `torch._utils._rebuild_tensor_v2` would build is
written down as a `TensorRef`. The forms are those of torch 2.13 (`torch/_utils.py`, `torch/serialization.py`).

It is a machine of its own, and no `pickle.Unpickler` with a `find_class`, because that one lets a file of a few bytes
fill the memory (memo places, numbers of any length) or never end (hashes of tuples in tuples). Here every step costs a
bounded amount of time and memory, and the steps are counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from bigload.checkpoint.refusal import Refusal

MAX_PICKLE_BYTES = 64 * 2**20
MAX_STEPS = 4_000_000
"""Steps of one pickle. A tensor takes about 33, so this is more than 100 000 tensors; they fill some 300 MB at most."""

MAX_KEY = 2**60
"""Larger whole numbers are no keys of dicts: their hashes can be made to collide."""

MAX_KEY_LENGTH = 100
"""Of storages, whose keys are numbers in practice; and what an error shows of a key. A text can be used many times."""

MAX_TOLD_KEYS = 5


@dataclass(frozen=True, slots=True)
class Global:
    """The name of something that could be imported; it never is."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class StorageRef:
    """The storage that tensors are views of: record `key`, `num_elements` elements of torch's storage class `kind`."""

    kind: str
    key: str
    num_elements: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as its pickle describes it; nothing of it is checked. `dtype` is `None` where the storage decides."""

    storage: object
    offset: object
    shape: object
    strides: object
    dtype: object = None
    flags: object = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object that is known to be harmless and not looked into; `tensor_kind` says so if it would be a tensor."""

    tensor_kind: str | None = None


def unpickle(data: bytes) -> object:
    """Return what the pickle `data` describes: plain values, with `TensorRef`s for tensors and `Opaque`s for the rest.

    Dicts have keys of text or whole numbers; attributes of dicts (`_metadata`) are dropped.

    Raises:
        Refusal: it asks for a global that is not listed, uses an opcode that state dicts do not, is broken or too
            large.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise Refusal("pickle-too-large", f"its pickle has {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read")
    machine = _Machine(data)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        raise Refusal("bad-pickle", f"its pickle is broken at byte {machine.position}{machine.place()}") from None


class _Machine:
    """The stack, the memo, and what lies below each mark."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        data, steps = self.data, _STEPS
        for _ in range(MAX_STEPS):
            opcode = data[self.position]
            self.position += 1
            step = steps[opcode]
            if step is None:
                if opcode == _STOP:
                    return self.stack[-1]
                text = (
                    f"its pickle uses opcode {bytes((opcode,))!r} at byte {self.position - 1}, which no state dict does"
                )
                raise Refusal("bad-pickle", text + self.place())
            step(self)
        raise Refusal("pickle-too-large", f"its pickle takes more than {MAX_STEPS} steps")

    def take(self, count: int) -> bytes:
        data = self.data[self.position : self.position + count]
        if len(data) != count:
            raise IndexError
        self.position += count
        return data

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + 1000)
        if end < 0:
            raise IndexError
        return self.take(end + 1 - self.position)[:-1].decode()

    def number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return int(value)

    def above_mark(self) -> list[object]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def place(self) -> str:
        """Return words for the last keys under which the machine is at work, as far as the stack tells."""
        keys = []
        frames = [*self.below, self.stack][-MAX_TOLD_KEYS - 1 :]
        for lower, frame in pairwise(frames):
            key = next((item for item in reversed(frame[::2]) if isinstance(item, str)), None)
            if lower and isinstance(lower[-1], dict) and key is not None:
                keys.append(key[:MAX_KEY_LENGTH])
        return f" (below {'.'.join(keys)!r:.200})" if keys else ""


def _refuse_global(machine: _Machine, named: str) -> Refusal:
    text = f"its pickle asks for {named!r:.200}, which is no part of a state dict; nothing was executed"
    return Refusal("forbidden-global", text + machine.place())


def _broken(machine: _Machine, text: str) -> Refusal:
    return Refusal("bad-pickle", f"its pickle is broken at byte {machine.position}: {text}{machine.place()}")


# Steps, each called with the machine that stands behind the opcode.


def _push_this(value: object, /) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _push_number(form: str) -> Callable[[_Machine], None]:
    compiled = struct.Struct(form)
    return lambda machine: machine.stack.append(machine.number(compiled))


def _push_byte(machine: _Machine) -> None:
    # The steps of one byte are three in four of all, so they go without struct and without a call.
    machine.stack.append(machine.data[machine.position])
    machine.position += 1


def _push_text(form: str) -> Callable[[_Machine], None]:
    length = struct.Struct(form)
    return lambda machine: machine.stack.append(machine.take(machine.number(length)).decode())


def _push_bytes(form: str) -> Callable[[_Machine], None]:
    length = struct.Struct(form)
    return lambda machine: machine.stack.append(machine.take(machine.number(length)))


def _skip(num_bytes: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.take(num_bytes)

    return step


def _remember_at_byte(machine: _Machine) -> None:
    machine.memo[machine.data[machine.position]] = machine.stack[-1]
    machine.position += 1


def _recall_at_byte(machine: _Machine) -> None:
    machine.stack.append(machine.memo[machine.data[machine.position]])
    machine.position += 1


def _remember(form: str) -> Callable[[_Machine], None]:
    index = struct.Struct(form)

    def step(machine: _Machine) -> None:
        machine.memo[machine.number(index)] = machine.stack[-1]

    return step


def _recall(form: str) -> Callable[[_Machine], None]:
    index = struct.Struct(form)
    return lambda machine: machine.stack.append(machine.memo[machine.number(index)])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _mark(machine: _Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _long(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.take(1)[0]), "little", signed=True))


def _tuple_above_mark(machine: _Machine) -> None:
    items = tuple(machine.above_mark())
    machine.stack.append(items)


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _list(machine).append(item)


def _extend(machine: _Machine) -> None:
    items = machine.above_mark()
    _list(machine).extend(items)


def _list(machine: _Machine) -> list[object]:
    found = machine.stack[-1]
    if not isinstance(found, list):
        raise _broken(machine, "appends to what is no list")
    return found


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(machine, [key, value])


def _set_items(machine: _Machine) -> None:
    _set(machine, machine.above_mark())


def _set(machine: _Machine, items: list[object]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
        raise _broken(machine, "sets items of what is no dict")
    for key in items[::2]:
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < MAX_KEY):
            raise _broken(machine, "a key of a dict that is neither text nor a whole number")
    target.update(zip(items[::2], items[1::2], strict=True))


def _global(machine: _Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.stack.append(_allowed(machine, module, name))


def _global_of_stack(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise _broken(machine, "a global whose name is no text")
    machine.stack.append(_allowed(machine, module, name))


def _allowed(machine: _Machine, module: str, name: str) -> Global:
    found = _GLOBALS.get((module, name))
    if found is None:
        raise _refuse_global(machine, f"{module}.{name}")
    return found


def _call(machine: _Machine) -> None:
    arguments, called = machine.stack.pop(), machine.stack.pop()
    make = _CALLS.get((called.module, called.name)) if isinstance(called, Global) else None
    if make is None or not isinstance(arguments, tuple):
        raise _broken(machine, f"calls {called!s:.100}" if isinstance(called, Global) else "calls what is no function")
    try:
        machine.stack.append(make(*arguments))
    except (TypeError, ValueError):
        raise _broken(machine, f"calls {called} with other arguments than torch does") from None


def _build(machine: _Machine) -> None:
    """Drop the attributes of an object: those of a state dict are versions of modules, and no tensors."""
    machine.stack.pop()
    if not isinstance(machine.stack[-1], dict | TensorRef):
        raise _broken(machine, "sets attributes of what has none")


def _storage(machine: _Machine) -> None:
    match machine.stack.pop():
        case ("storage", Global(name=kind), str(key), str(), int(num_elements)) if len(key) <= MAX_KEY_LENGTH:
            machine.stack.append(StorageRef(kind, key, num_elements))
        case _:
            raise _broken(machine, "a reference to something that is no storage")


_STOP = ord(".")
_BY_OPCODE: Mapping[int, Callable[[_Machine], None]] = MappingProxyType(
    {
        code[0]: step
        for code, step in (
            (b"\x80", _skip(1)),  # PROTO
            (b"\x95", _skip(8)),  # FRAME
            (b"N", _push_this(None)),
            (b"\x88", lambda machine: machine.stack.append(True)),
            (b"\x89", lambda machine: machine.stack.append(False)),
            (b")", _push_this(())),
            (b"]", lambda machine: machine.stack.append([])),
            (b"}", lambda machine: machine.stack.append({})),
            (b"J", _push_number("<i")),
            (b"K", _push_byte),
            (b"M", _push_number("<H")),
            (b"\x8a", _long),
            (b"G", _float),
            (b"X", _push_text("<I")),
            (b"\x8c", _push_text("<B")),
            (b"\x8d", _push_text("<Q")),
            (b"B", _push_bytes("<I")),
            (b"C", _push_bytes("<B")),
            (b"\x8e", _push_bytes("<Q")),
            (b"q", _remember_at_byte),
            (b"r", _remember("<I")),
            (b"\x94", _memoize),
            (b"h", _recall_at_byte),
            (b"j", _recall("<I")),
            (b"(", _mark),
            (b"t", _tuple_above_mark),
            (b"\x85", _tuple_of(1)),
            (b"\x86", _tuple_of(2)),
            (b"\x87", _tuple_of(3)),
            (b"a", _append),
            (b"e", _extend),
            (b"s", _set_item),
            (b"u", _set_items),
            (b"c", _global),
            (b"\x93", _global_of_stack),
            (b"R", _call),
            (b"b", _build),
            (b"Q", _storage),
        )
    }
)
_STEPS = tuple(_BY_OPCODE.get(opcode) for opcode in range(256))


# What the listed functions would make of their arguments; a TypeError or a ValueError when those are too few or many.


def _tensor_v2(*arguments: object) -> TensorRef:
    storage, offset, shape, strides, _, _, *flags = arguments
    return TensorRef(storage, offset, shape, strides, None, *flags)


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
            return pairs  # itself: a copy would cost more than a step
        case _:
            raise TypeError


def _size(dimensions: object) -> tuple[object, ...]:
    if not isinstance(dimensions, tuple):
        raise TypeError
    return dimensions


def _opaque(*_: object) -> Opaque:
    return Opaque()


def _opaque_tensor(kind: str) -> Callable[..., Opaque]:
    return lambda *_: Opaque(kind)


_CALLS: Mapping[tuple[str, str], Callable[..., object]] = MappingProxyType(
    {
        ("collections", "OrderedDict"): _dict,
        ("collections", "Counter"): _dict,
        ("torch", "Size"): _size,
        ("torch", "device"): _opaque,
        ("torch.serialization", "_get_layout"): _opaque,
        ("_codecs", "encode"): _opaque,  # bytes, below protocol 3
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._utils", "_rebuild_qtensor"): _opaque_tensor("quantised by torch"),
        ("torch._utils", "_rebuild_sparse_tensor"): _opaque_tensor("sparse"),
        ("torch._utils", "_rebuild_nested_tensor"): _opaque_tensor("nested"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): _opaque_tensor("on the meta device, which holds no data"),
        ("torch._utils", "_rebuild_wrapper_subclass"): _opaque_tensor("of a tensor subclass"),
        ("torch._tensor", "_rebuild_from_type_v2"): _opaque_tensor("of a tensor subclass"),
    }
)

STORAGE_DTYPES: Mapping[str, str | None] = MappingProxyType(
    {
        "DoubleStorage": "float64",
        "FloatStorage": "float32",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "LongStorage": "int64",
        "IntStorage": "int32",
        "ShortStorage": "int16",
        "CharStorage": "int8",
        "ByteStorage": "uint8",
        "BoolStorage": "bool",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
        "UntypedStorage": "uint8",
        **dict.fromkeys(("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")),
    }
)
"""The element type of each storage class, by torch's name; `None` for quantised ones, which hold no plain numbers."""

_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)
_GLOBALS: Mapping[tuple[str, str], Global] = MappingProxyType(
    {
        place: Global(*place)
        for place in (
            *_CALLS,
            *(("torch", name) for name in (*STORAGE_DTYPES, *_DTYPE_NAMES)),
            ("torch.storage", "UntypedStorage"),
            ("torch.storage", "TypedStorage"),
            ("torch.nn.parameter", "Parameter"),  # the class that _rebuild_from_type_v2 is given
            ("torch", "Tensor"),
        )
    }
)
