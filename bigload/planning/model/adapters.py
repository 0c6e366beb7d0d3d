"""Bytes of LoRA adapters beside the tensors of the model that they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bigload.checkpoint.adapter import Adapter, fit_of, matrices_of, weight_of
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.derived import renamed_by_transformers
from bigload.errors import AdapterError
from bigload.planning.load_dtype import CASTABLE
from bigload.planning.model.ties import TiedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """Bytes of an adapter, in the dtypes that its files have.

    Attributes:
        name: Of its folder.
        by_tensor: By the stored tensor of the model that they are beside.
    """

    name: str
    by_tensor: Mapping[str, int]


def adapter_bytes(adapter: Adapter, checkpoint: Checkpoint, ties: Sequence[TiedGroup]) -> AdapterBytes:
    """Return the bytes of `adapter` by the stored tensor of its base.

    Weights that are quantised, or stored in another form than that of transformers' model, are matched by the name of
    their module; shapes of all others are compared.

    Raises:
        AdapterError: the adapter is for another base; `details` name what does not fit.
    """
    base = _Base(checkpoint)
    problems: list[str] = []
    found: dict[str, int] = {}
    shared = {name: tie.stored[0] for tie in ties for name in (*tie.copies, *tie.absent_modules)}

    def count(name: str, *tensors: TensorInfo) -> None:
        stored = shared.get(name, name)  # a copy takes no memory, and what is beside it is on the same device
        found[stored] = found.get(stored, 0) + sum(tensor.num_bytes for tensor in tensors)

    for name, tensor in adapter.saved.items():
        stored = base.stored(name) or shared.get(name.rpartition(".")[0])  # a head that is not stored is tied
        if stored is None:
            problems.append(f"{name} is missing: the adapter replaces it")
        elif not base.is_like(stored, tensor.shape):
            shape = list(checkpoint.tensors[stored].shape)
            problems.append(f"{name} is {list(tensor.shape)} in the adapter, {shape} in the base")
        else:
            count(stored, tensor)
    for path, parts in adapter.modules.items():
        try:
            count(_stored_weight(adapter, path, base, shared), *parts.values())
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
    def _renamed(self) -> Mapping[str, str]:
        return renamed_by_transformers(self.checkpoint)

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
        return name if name in self.checkpoint.tensors else self._renamed.get(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.stored(name)
        return None if stored is None else self.checkpoint.tensors[stored].shape

    def is_like(self, stored: str, shape: tuple[int, ...]) -> bool:
        tensor = self.checkpoint.tensors[stored]
        return tensor.dtype.name not in CASTABLE or tensor.shape == shape


def _stored_weight(adapter: Adapter, path: str, base: _Base, shared: Mapping[str, str]) -> str:
    """Return the stored tensor that the module `path` of the adapter is beside.

    Raises:
        AdapterError: the base has none, or its shape is another.
    """
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
    tensor = base.checkpoint.tensors[stored]
    if tensor.dtype.name in CASTABLE:
        fit_of(adapter, path, stored, tensor.shape, (base.checkpoint.config or {}).get("model_type"))
    return stored
