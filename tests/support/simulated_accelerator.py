"""Accelerators in plain Python: `sim:0` to `sim:3` are devices of torch, on its key for backends of third parties.

Tensors on them are plain `torch.Tensor`s; parameters, views and state dicts behave as on any accelerator. What is
simulated is what goes wrong on real ones now and then, made to go wrong always:

* A copy that does not block runs at the last moment that is legal: when the host waits, or when a kernel behind it in
  its stream needs the result. Who reads early gets poison, who reuses a host block early sends the new bytes.
* Fresh memory is poisoned by its stream's own queue, as kernels of its last user would still write there.
* Every access to device memory is held against all others by vector clocks: what no wait orders is noted in `races`,
  whether or not it happened to go well. So is memory freed while another stream may use it.
* Each device counts its memory, may have a limit, and raises torch's own error past it. Copies across are logged.

Kernels are the CPU's, through one boxed fallback that runs on aliases of the arguments. An op that makes views, or
wants its own rule, is one more entry in `_kernels`.

The key can be taken once per process, and from then on torch says that this is the machine's accelerator: no pinned
memory for CUDA, other answers from `torch.accelerator`. So tests run in a process of their own; see `simulated/`.
"""

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils import _pytree as pytree
from torch.utils import dlpack

NAME = "sim"
NUM_DEVICES = 4
POISON = 0xFF  # NaN in every float format
ALIGNMENT = 512  # of all memory, as torch's allocators for devices have it

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One copy from device to device, the host being one."""

    source: torch.device
    destination: torch.device
    num_bytes: int
    is_blocking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Bytes `start` to `stop` of a memory were read or written by `stream` at its `position`."""

    start: int
    stop: int
    stream: "Stream"
    position: int
    is_write: bool


class Simulation:
    """The state of all devices; `reset` between tests.

    Attributes:
        limits: Bytes that a device has; `None` is no limit.
        used: Bytes of the tensors that live on each device.
        peak: The most that `used` has been.
        transfers: All copies across devices, in the order in which they were asked for.
        races: What no wait ordered, one sentence each.
        hurry: Called whenever work is queued, with its stream: may `advance` streams, as real devices do on their own.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.used = [0] * NUM_DEVICES
        self.memories: dict[int, Memory] = {}
        self.streams: list[Stream] = []
        self.default_streams = {}
        self.host = Clock()
        self.here = threading.local()
        self.reset()

    def reset(self):
        """Do what is pending, then forget what was noted. Memory of tensors that still live stays counted."""
        self.synchronize()
        self.streams = list(self.default_streams.values())
        for memory in self.memories.values():
            memory.accesses.clear()  # all of them are done
        for clock in (self.host, *(stream.clock for stream in self.streams)):
            clock.seen.clear()
        self.limits: list[int | None] = [None] * NUM_DEVICES
        self.peak = list(self.used)
        self.transfers: list[Transfer] = []
        self.races: list[str] = []
        self.hurry: Callable[[Stream], None] = lambda stream: None

    @property
    def num_pending(self):
        """Return how many pieces of work no device has done yet."""
        return sum(len(stream.queue) for stream in self.streams)

    def synchronize(self):
        """Wait for all devices."""
        for stream in self.streams:
            stream.synchronize()


class Memory:
    """What one storage of a device lies in. Work that is queued keeps the bytes, but not the account."""

    def __init__(self, num_bytes, index):
        self.data = bytearray(max(num_bytes, 1) + ALIGNMENT)
        self.start = -ctypes.addressof(ctypes.c_char.from_buffer(self.data)) % ALIGNMENT
        self.num_bytes = num_bytes
        self.index = index
        self.stream = current_stream(index)
        self.accesses: list[Access] = []
        self.recorded: set[Stream] = set()

    def bytes(self):
        """Return the memory as a tensor of the CPU."""
        return torch.frombuffer(self.data, dtype=torch.uint8, count=max(self.num_bytes, 1), offset=self.start)

    def touch(self, access, what):
        """Note `access`; whatever it may not overlap has to be known as done."""
        kept = []
        for other in self.accesses:
            overlaps = other.start < access.stop and access.start < other.stop
            if overlaps and (other.is_write or access.is_write) and not access.stream.knows(other):
                done = "written" if other.is_write else "read"
                simulation.races.append(f"{what} on {access.stream}: memory may still be {done} by {other.stream}")
            is_covered = access.start <= other.start and other.stop <= access.stop
            if not (is_covered and (access.is_write or (other.stream is access.stream and not other.is_write))):
                kept.append(other)
        self.accesses = [*kept, access]

    def free(self, address):
        with simulation.lock:
            if simulation.memories.get(address) is self:
                del simulation.memories[address]
            simulation.used[self.index] -= self.num_bytes
            for access in self.accesses:
                if not self.stream.knows(access) and access.stream not in self.recorded:
                    simulation.races.append(
                        f"{self.num_bytes} bytes of {self.stream} were freed while {access.stream} may use them"
                    )


# Streams and events, in the form of torch.cuda's


class Clock:
    """How far each stream is known to have come."""

    def __init__(self, seen=()):
        self.seen = dict(seen)

    def learn(self, seen):
        for stream, position in seen.items():
            self.seen[stream] = max(position, self.seen.get(stream, 0))


class Stream:
    """Work of one device in its order. Nothing is done before `run`."""

    def __init__(self, device=None):
        self.device = torch.device(NAME, _index(device))
        self.queue: list[Callable[[], None]] = []
        self.num_queued = self.num_done = self.position = 0
        self.clock = Clock()
        with simulation.lock:
            self.number = len(simulation.streams)
            simulation.streams.append(self)

    def __repr__(self):
        return f"stream {self.number} of {self.device}"

    def knows(self, access):
        known = max(self.clock.seen.get(access.stream, 0), simulation.host.seen.get(access.stream, 0))
        return access.stream is self or access.position <= known

    def knowledge(self):
        return {**self.clock.seen, self: self.position}

    def access(self, reads, writes, what):
        """Take the next position in the stream for work that touches these tensors of devices."""
        self.clock.learn(simulation.host.seen)
        self.position += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                start = tensor.storage_offset() * tensor.itemsize
                stop = start + _num_spanned(tensor.shape, tensor.stride()) * tensor.itemsize
                access = Access(start=start, stop=stop, stream=self, position=self.position, is_write=is_write)
                _memory_of(tensor).touch(access, what)

    def enqueue(self, work):
        self.queue.append(work)
        self.num_queued += 1
        simulation.hurry(self)

    def run(self, up_to=None):
        """Do the work that was queued first, until `up_to` pieces of all that ever were are done."""
        with simulation.lock, torch.inference_mode():
            while self.queue and (up_to is None or self.num_done < up_to):
                self.num_done += 1
                self.queue.pop(0)()

    def advance(self):
        self.run(self.num_done + 1)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        with simulation.lock:
            self.run()
            simulation.host.learn(self.knowledge())

    def query(self):
        self.advance()  # a device comes on by itself, so whoever asks again and again gets there
        return not self.queue


class Event:
    """A moment of a stream. One that was never recorded has passed."""

    def __init__(self, enable_timing=False, blocking=False):
        self.stream = None

    def record(self, stream=None):
        with simulation.lock:
            self.stream = stream or current_stream()
            self.up_to = self.stream.num_queued
            self.knowledge = self.stream.knowledge()

    def wait(self, stream=None):
        with simulation.lock:
            if self.stream is not None:
                waiting, awaited, up_to = stream or current_stream(), self.stream, self.up_to
                waiting.clock.learn(self.knowledge)
                waiting.enqueue(lambda: awaited.run(up_to))

    def synchronize(self):
        with simulation.lock:
            if self.stream is not None:
                self.stream.run(self.up_to)
                simulation.host.learn(self.knowledge)

    def query(self):
        if self.stream is None:
            return True
        self.stream.advance()
        return self.stream.num_done >= self.up_to


def default_stream(device=None):
    index = _index(device)
    with simulation.lock:
        if index not in simulation.default_streams:
            simulation.default_streams[index] = Stream(index)
        return simulation.default_streams[index]


def current_stream(device=None):
    """Return the stream that this thread chose, per device as in torch.cuda."""
    index = _index(device)
    return _chosen().get(index) or default_stream(index)


@contextmanager
def use_stream(stream):
    before = _chosen().get(stream.device.index)
    _chosen()[stream.device.index] = stream
    try:
        yield
    finally:
        _chosen()[stream.device.index] = before


def _chosen():
    return simulation.here.__dict__.setdefault("streams", {})


def _index(device):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return DeviceModule.current_device() if index is None else index


class DeviceModule:
    """What torch finds under `torch.sim`."""

    Stream = Stream
    Event = Event
    default_stream = staticmethod(default_stream)
    current_stream = staticmethod(current_stream)
    stream = staticmethod(lambda stream: nullcontext() if stream is None else use_stream(stream))
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: NUM_DEVICES)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)

    @staticmethod
    def current_device():
        return getattr(simulation.here, "device", 0)

    @staticmethod
    def set_device(device):
        simulation.here.device = _index(device)

    @staticmethod
    def synchronize(device=None):
        for stream in list(simulation.streams):
            if stream.device.index == _index(device):
                stream.synchronize()

    @staticmethod
    def mem_get_info(device=None):
        """Return free and total bytes; a device without a limit has a TiB."""
        limit = simulation.limits[_index(device)]
        total = 1 << 40 if limit is None else limit
        return total - simulation.used[_index(device)], total

    @staticmethod
    def max_memory_allocated(device=None):
        return simulation.peak[_index(device)]

    @staticmethod
    def reset_peak_memory_stats(device=None):
        simulation.peak[_index(device)] = simulation.used[_index(device)]


# Memory as tensors


class _DLTensor(ctypes.Structure):
    """The first fields of DLPack's DLTensor: data, then DLDevice (dlpack.h)."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32))


_DL_EXT_DEV = 12  # kDLExtDev, which torch reads as PrivateUse1

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _allocate(num_bytes, index):
    """Return a uint8 tensor on `sim:index`, in memory that its current stream has yet to leave."""
    if not 0 <= index < NUM_DEVICES:
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    with simulation.lock:
        limit, used = simulation.limits[index], simulation.used[index]
        if limit is not None and used + num_bytes > limit:
            text = f"{NAME}:{index} out of memory: {num_bytes} bytes asked for, {used} of {limit} in use"
            raise torch.OutOfMemoryError(text)
        simulation.used[index] += num_bytes
        simulation.peak[index] = max(simulation.peak[index], used + num_bytes)
        memory = Memory(num_bytes, index)
    # A CPU tensor that says it lies elsewhere. torch holds it by the capsule until the device's storage is gone.
    lent = memory.bytes()
    simulation.memories[lent.data_ptr()] = memory
    weakref.finalize(lent.untyped_storage(), memory.free, lent.data_ptr()).atexit = False
    capsule = dlpack.to_dlpack(lent)
    header = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    header.device_type, header.device_index = _DL_EXT_DEV, index
    tensor = torch._C._from_dlpack(capsule)[:num_bytes]
    with simulation.lock:
        memory.stream.access([], [tensor], "allocation")
        poisoned = memory.bytes()
        memory.stream.enqueue(lambda: poisoned.fill_(POISON))
    return tensor


def _new(shape, stride, dtype, index):
    raw = _allocate(_num_spanned(shape, stride) * dtype.itemsize, index)
    return _as_strided(raw.view(dtype), shape, stride, 0)


def _memory_of(tensor):
    return simulation.memories[tensor.untyped_storage().data_ptr()]


def _alias(tensor):
    """Return the tensor of the CPU that shares the memory of `tensor`, which lies on a device."""
    raw = _memory_of(tensor).bytes()[: tensor.untyped_storage().nbytes() // tensor.itemsize * tensor.itemsize]
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _num_spanned(shape, stride):
    return 0 if 0 in shape else 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


def _contiguous_stride(shape):
    return torch.empty(shape, device="meta").stride()


def _is_on_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


# Kernels

_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _as_strided(tensor, shape, stride, offset=None):
    return aten.as_strided.default.redispatch(_CPU_KERNELS, tensor, shape, stride, offset)


def _view_kernel(op):
    """Return the CPU's kernel of `op`, which looks at shapes and strides alone, to run on the device's own tensor."""
    return lambda *args, **kwargs: op.redispatch(_CPU_KERNELS, *args, **kwargs)


def _empty(shape, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return _new(shape, _contiguous_stride(shape), dtype or torch.get_default_dtype(), _index(device))


def _empty_strided(shape, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return _new(shape, stride, dtype or torch.get_default_dtype(), _index(device))


def _copy_from(source, destination, non_blocking=False):
    """Copy in the order of the current stream, casting as `copy_` does. The host waits unless told not to."""
    on_device = [tensor for tensor in (source, destination) if _is_on_device(tensor)]
    crosses = source.device != destination.device
    with simulation.lock:
        if crosses:
            simulation.transfers.append(
                Transfer(
                    source=source.device,
                    destination=destination.device,
                    num_bytes=source.numel() * source.itemsize,
                    is_blocking=not non_blocking,
                )
            )
        stream, *others = {current_stream(tensor.device): None for tensor in on_device}
        for other in others:  # as CUDA does: on the source's stream, once the other device's is there too
            stream.wait_stream(other)
        reads = [source] if _is_on_device(source) else []
        stream.access(reads, [destination] if _is_on_device(destination) else [], "copy")
        here, there = (_alias(tensor) if _is_on_device(tensor) else tensor for tensor in (source, destination))
        stream.enqueue(lambda: there.copy_(here))
        for other in others:
            other.wait_stream(stream)
        if len(on_device) == 1 and not non_blocking:
            stream.synchronize()
    return destination


def _fallback(op, *args, **kwargs):
    """Run `op` on the CPU, at once and behind all that its stream holds, on aliases of the arguments."""
    values, form = pytree.tree_flatten((args, kwargs))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    device = _common_device(op, tensors)
    stream = current_stream(device)
    with simulation.lock:
        stream.run()
        stream.access([tensor for tensor in tensors if _is_on_device(tensor)], [], str(op))
        stream.access([], _written(op, args, kwargs), str(op))
        originals = {}

        def lower(value):
            if _is_on_device(value):
                alias = _alias(value)
                originals[id(alias)] = (alias, value)
                return alias
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

        lowered_args, lowered_kwargs = pytree.tree_unflatten([lower(value) for value in values], form)
        results, result_form = pytree.tree_flatten(op(*lowered_args, **lowered_kwargs))
        shared = {alias.untyped_storage().data_ptr() for alias, _ in originals.values() if alias.numel()}

        def lift(value):
            if not isinstance(value, torch.Tensor):
                stream.synchronize()  # a number for the host: it has waited
                return value
            if id(value) in originals:
                return originals[id(value)][1]
            if value.untyped_storage().data_ptr() in shared:
                raise NotImplementedError(f"{op} makes a view: it needs a kernel of its own")
            return _copy_from(value, _new(value.shape, _contiguous_stride(value.shape), value.dtype, device.index))

        before = len(simulation.transfers)
        lifted = [lift(value) for value in results]
        del simulation.transfers[before:]  # results were on the device all the time
    return pytree.tree_unflatten(lifted, result_form)


def _common_device(op, tensors):
    devices = {tensor.device for tensor in tensors if _is_on_device(tensor)}
    strangers = {tensor.device for tensor in tensors if not _is_on_device(tensor) and tensor.dim()}
    if len(devices) != 1 or strangers:
        found = ", ".join(sorted(map(str, devices | strangers)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found or 'none'} ({op})")
    return devices.pop()


def _written(op, args, kwargs):
    """Return the tensors that `op` says it writes."""
    written = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in pytree.tree_leaves(value) if _is_on_device(leaf)]
    return written


def _arange(start, end, step=1, *, out):
    """Count on the CPU."""
    return _put_into(out, torch.arange(start, end, step, dtype=out.dtype))


def _abs(values, *, out):
    return _put_into(out, _fallback(aten.maximum.default, values, _fallback(aten.neg.default, values)))


def _put_into(out, values):
    """Fill `out`, which torch makes empty and expects to grow: an alias on the CPU cannot."""
    if out.shape != values.shape:
        fresh = _new(values.shape, _contiguous_stride(values.shape), out.dtype, out.device.index)
        out.set_(fresh.untyped_storage(), 0, fresh.shape, fresh.stride())
    with simulation.lock:
        before = len(simulation.transfers)
        _copy_from(values, out)
        del simulation.transfers[before:]  # a real device has no need to ask the host
    return out


def _convolution(*args):
    return _fallback(aten.convolution.default, *args)


def _histc(values, bins=100, low=0, high=0):
    """Count integers too, as accelerators do and the CPU does not."""
    counted = _fallback(aten.histc.default, values.to(torch.float32), bins, low, high)
    return counted.to(values.dtype)


_kernels = {
    "abs.out": _abs,
    "arange.start_out": _arange,
    "convolution_overrideable": _convolution,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "as_strided": _view_kernel(aten.as_strided.default),
    "view": _view_kernel(aten.view.default),
    "unfold": _view_kernel(aten.unfold.default),
    "histc": _histc,
    "_reshape_alias": _view_kernel(aten._reshape_alias.default),
    "set_.source_Storage_storage_offset": _view_kernel(aten.set_.source_Storage_storage_offset),
}


def _clone_storage(storage):
    """Return a copy of a storage on its device, which torch would ask an allocator in C++ for; `deepcopy` wants it."""
    if storage.device.type != NAME:
        return _clone_elsewhere(storage)
    original, copied = (torch.empty(size, dtype=torch.uint8, device=storage.device) for size in (0, storage.nbytes()))
    return copied.copy_(original.set_(storage, 0, copied.shape, (1,))).untyped_storage()


def _apply_to_module(module, fn, recurse=True):
    """Do what `module.to` and its like do and keep parameters the same objects, so that tied ones stay tied.

    So it is on other accelerators. Between CPU and this key torch makes new ones, unless it is asked to swap contents;
    where something else holds on to a parameter it cannot, and new ones it is.
    """
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        return _apply_elsewhere(module, fn, recurse)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        future.set_swap_module_params_on_conversion(False)
        return _apply_elsewhere(module, fn, recurse)
    finally:
        future.set_swap_module_params_on_conversion(before)


def _record_stream(tensor, stream):
    """Note that `tensor` is used by a stream for which its memory has to wait when it is freed."""
    if tensor.device.type == NAME:
        with simulation.lock:
            _memory_of(tensor).recorded.add(stream)
    else:
        _record_elsewhere(tensor, stream)


_record_elsewhere = torch.Tensor.record_stream
_clone_elsewhere, _apply_elsewhere = torch.UntypedStorage.clone, torch.nn.Module._apply

simulation = Simulation()


@cache
def install():
    """Make `sim` a device type of torch, for the rest of this process; return the simulation."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    libraries[0].fallback(_fallback, "PrivateUse1")
    for name, kernel in _kernels.items():
        libraries[1].impl(name, kernel, "PrivateUse1")
    simulation.libraries = libraries  # they unregister when they are gone
    torch.UntypedStorage.clone, torch.nn.Module._apply = _clone_storage, _apply_to_module
    torch.Tensor.record_stream = _record_stream
    return simulation


@contextmanager
def watched():
    """Begin with nothing noted. At the end of the context there is no race that was not cleared, and no tensor left."""
    _free_cycles()
    simulation.reset()
    before = list(simulation.used)
    yield simulation
    simulation.synchronize()
    _free_cycles()
    deadline = time.monotonic() + 3
    while _is_more(before) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread in the background may be about to let go of what it brought for nobody any more
        gc.collect()
    assert not _is_more(before), simulation.used
    assert simulation.races == []


def _is_more(before):
    """Return whether a device holds more than `before`; less is well: a thread of an earlier test may end late."""
    return any(now > then for now, then in zip(simulation.used, before, strict=True))


def _free_cycles():
    """Free tensors that only a cycle holds, such as an error and the frames it came through: those are no leak."""
    if any(simulation.used):
        gc.collect()
