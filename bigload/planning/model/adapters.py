"""Bytes of LoRA adapters beside the tensors of the model that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bigload.checkpoint.adapter import Adapter, fit_of, matrices_of, weight_of
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.derived import derived_conversion
from bigload.conversion.strided_pieces import PiecedTensor
from bigload.dtypes import DTYPES, DType
from bigload.errors import AdapterError, NamesUnknownError
from bigload.planning.load_dtype import CASTABLE, loaded_dtype
from bigload.planning.model.ties import TiedGroup

_LOW_RANK = DTYPES["F32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """Bytes of an adapter in the dtypes that PEFT 0.21 gives it, by the stored tensor that they are beside.

    Low-rank parts are in float32 (`autocast_adapter_dtype`), whole tensors in the dtype of those that they replace,
    whatever the files have.
    """

    name: str
    by_tensor: Mapping[str, int]


def adapter_bytes(
    adapter: Adapter, checkpoint: Checkpoint, ties: Sequence[TiedGroup], dtype: DType | None = None
) -> AdapterBytes:
    """Return the bytes of `adapter` by the stored tensor of its base, whose weights are converted to `dtype`.

    Weights that are quantised, or stored in another form than that of transformers' model, are matched by the name of
    their module; shapes of all others are compared.
    """
    base = _Base(checkpoint)
    problems: list[str] = []
    found: dict[str, int] = {}
    shared = {name: tie.stored[0] for tie in ties for name in (*tie.copies, *tie.absent_modules)}

    def count(name: str, num_bytes: int) -> None:
        stored = shared.get(name, name)  # a copy takes no memory, and what is beside it is on the same device
        found[stored] = found.get(stored, 0) + num_bytes

    for name, tensor in adapter.saved.items():
        stored = base.stored(name) or shared.get(name.rpartition(".")[0])  # a head that is not stored is tied
        if stored is None:
            problems.append(f"{name} is missing: the adapter replaces it")
        elif not base.is_like(stored, name, tensor.shape):
            shape = list(checkpoint.tensors[stored].shape)
            problems.append(f"{name} is {list(tensor.shape)} in the adapter, {shape} in the base")
        elif adapter.is_beside_base(name):
            replaced = checkpoint.tensors[stored].dtype
            held = loaded_dtype(stored, replaced, dtype) if replaced.name in CASTABLE else tensor.dtype
            count(stored, tensor.num_elements * held.bits // 8)
    for path, parts in adapter.modules.items():
        try:
            num_bytes = sum(part.num_elements for part in parts.values()) * _LOW_RANK.bits // 8
            count(_stored_weight(adapter, path, base, shared), num_bytes)
        except AdapterError as error:
            problems.append(error.message)
    if problems:
        raise adapter.does_not_fit(checkpoint.name, problems, hint="plan {base} with it")
    return AdapterBytes(name=adapter.name, by_tensor=found)


def with_bytes_beside(tensors: Mapping[str, TensorInfo], adapters: Sequence[AdapterBytes]) -> Mapping[str, TensorInfo]:
    """Return `tensors` as large as they are together with what adapters have beside them; shapes stay."""
    larger: dict[str, TensorInfo] = {}
    for adapter in adapters:
        for name, num_bytes in adapter.by_tensor.items():
            tensor = larger.get(name, tensors[name])
            span = tensor.span._replace(stop=tensor.span.start + tensor.num_bytes + num_bytes)
            larger[name] = replace(tensor, span=span, strides=None)
    return {**tensors, **larger} if larger else tensors


class _Base:
    """Stored tensors by their own names and those of transformers' modules."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def _made(self) -> Mapping[str, PiecedTensor]:
        """The tensors of transformers' model; none where the conversion is not known."""
        try:
            return derived_conversion(self.checkpoint).tensors
        except NamesUnknownError:
            return {}

    @cached_property
    def first_of(self) -> Mapping[str, str]:
        """The first stored tensor of each module that has some, also below it."""
        first: dict[str, str] = {}
        for name in self.checkpoint.tensors:
            module = name.rpartition(".")[0]
            while module and module not in first:
                first[module] = name
                module = module.rpartition(".")[0]
        return first

    def stored(self, name: str) -> str | None:
        """Return the stored tensor of that name, or the first one that the tensor of that name is made of."""
        if name in self.checkpoint.tensors:
            return name
        return self._made[name].sources[0] if name in self._made else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.checkpoint.tensors.get(name) or self._made.get(name)
        return None if stored is None else stored.shape

    def is_like(self, stored: str, name: str, shape: tuple[int, ...]) -> bool:
        if self.checkpoint.tensors[stored].dtype.name not in CASTABLE:
            return True
        return shape == (self.shape(name) or self.checkpoint.tensors[stored].shape)


def _stored_weight(adapter: Adapter, path: str, base: _Base, shared: Mapping[str, str]) -> str:
    """Return the stored tensor that the module `path` of the adapter is beside."""
    matrices_of(path, adapter.modules[path])
    try:
        name = weight_of(adapter, path, base.shape)
    except AdapterError:
        module = path.removesuffix(".base_layer")
        if module in shared:
            return shared[module]
        if module in base.first_of and f"{module}.weight" not in base.checkpoint.tensors:
            return base.first_of[module]  # packed integers of a quantised layer, or experts that are stored apart
        raise
    stored = base.stored(name) or name
    shape = base.shape(name)
    if shape is not None and base.checkpoint.tensors[stored].dtype.name in CASTABLE:
        fit_of(adapter, path, stored, shape, (base.checkpoint.config or {}).get("model_type"))
    return stored
