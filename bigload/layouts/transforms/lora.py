"""Transform that merges a LoRA adapter of PEFT into the weights: `W + scale * B @ A`, in float32, cast once.

Files and config are those of PEFT 0.21: `adapter_config.json`, and tensors named after the modules of transformers'
model (`base_model.model.PATH.lora_A.weight`). LoRA, rsLoRA, DoRA, biases, ranks and alphas by module,
`modules_to_save`, embeddings, convolutions and experts in one tensor (`target_parameters`) are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path

from bigload.checkpoint.adapter import Adapter, fit_of, matrices_of, open_adapter, weight_of
from bigload.checkpoint.model import TensorInfo, name_of
from bigload.checkpoint.quantisation import quantisation_of
from bigload.conversion.arithmetic.low_rank import LowRankSum, ScaledSum, StackedLowRankSum
from bigload.conversion.arithmetic.unchanged import Unchanged
from bigload.conversion.computed_tensor import ComputedTensor, Operand, Operation, shape_of
from bigload.conversion.derived import renamed_by_transformers
from bigload.errors import AdapterError, OptionError
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.planning.load_dtype import CASTABLE
from bigload.units import counted

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT changes the base when training begins: the adapter is for that one."""


@dataclass(frozen=True)
class MergeLora:
    """Add the adapter in the folder `path`, times `scale`, to the weights that it was trained for.

    Raises:
        OptionError: the scale is not finite.
    """

    path: str | Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise OptionError.of("lora_scale", self.scale, "a finite number")

    def __str__(self) -> str:
        return f"lora {name_of(str(self.path))}" + ("" if self.scale == 1 else f" x {self.scale:g}")

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the tensors with the adapter merged into them.

        Raises:
            AdapterError: it is no LoRA adapter, of a kind that cannot be merged, or for another base: all tensors that
                do not fit are named.
            CheckpointError, ReadError: its tensors cannot be opened.
        """
        adapter = self._opened
        merge = _Merge(adapter, found, self.scale)
        made = merge.tensors()
        if merge.problems:
            is_plain = quantisation_of(found.checkpoint) is None
            hint = "merge it into {base}" if is_plain else "make plain weights first: --dequantize bf16 --lora ..."
            raise adapter.does_not_fit(found.checkpoint.name, merge.problems, hint=f"{hint}; nothing was written")
        note = f"{self}: {len(made)} of {counted(len(found.tensors), 'tensor')} changed"
        result = found.with_tensors({**found.tensors, **made}.values(), notes=[note])
        return _untied(result) if merge.unties else result

    @cached_property
    def _opened(self) -> Adapter:
        adapter = open_adapter(self.path)
        _check_kind(adapter)
        return adapter


def _check_kind(adapter: Adapter) -> None:
    folder, config = adapter.path, adapter.config
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{folder} was trained with init_lora_weights={start!r:.100}, which changed the base",
            hint="save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        )
    for option in (
        "use_qalora",
        "alora_invocation_tokens",
        "trainable_token_indices",
        "megatron_config",
        "corda_config",
    ):
        if config.get(option):
            raise AdapterError(f"{folder} has {option}, which is not merged here", hint="merge it with PEFT")


@dataclass(eq=False)
class _Merge:
    """One adapter and the tensors that it is merged into.

    Attributes:
        unties: It brings an output layer of its own to a model that ties it to the embedding.
    """

    adapter: Adapter
    found: TensorsToWrite
    scale: float
    problems: list[str] = field(default_factory=list)
    unties: bool = False

    def __post_init__(self) -> None:
        self._tensors = self.found.tensors

    def tensors(self) -> dict[str, Operand]:
        """Return the tensors that change, and those that come from the adapter, by name."""
        made: dict[str, Operand] = {}
        for name, tensor in self.adapter.saved.items():
            made.update(self._saved(name, tensor))
        self._tensors = {**self._tensors, **made}  # an embedding can be saved whole, and have matrices beside
        for path, parts in self.adapter.modules.items():
            made.update(self._merged(path, parts))
        return made

    def _merged(self, path: str, parts: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Operand]]:
        try:
            down, up, _ = matrices_of(path, parts)
            target = self._name_of(weight_of(self.adapter, path, self._shape))
            base = self._tensors[target]
            if base.dtype.name not in CASTABLE:
                self.problems.append(
                    f"{target} is stored as {base.dtype}: --dequantize bf16 before --lora makes plain weights of it"
                )
                return
            model_type = (self.found.checkpoint.config or {}).get("model_type")
            fit = fit_of(self.adapter, path, target, shape_of(base), model_type)
        except AdapterError as error:
            self.problems.append(error.message)
            return
        form = StackedLowRankSum if fit.is_stacked else LowRankSum
        operation = form(base, down, up, self.scale * fit.alpha / fit.divisor, is_transposed=fit.is_transposed)
        magnitude = parts.get("lora_magnitude_vector")
        if magnitude is not None and isinstance(operation, LowRankSum):
            root = base
            while isinstance(root, ComputedTensor) and isinstance(root.operation, LowRankSum):
                root = root.operation.base
            operation = replace(operation, magnitude=magnitude, unmerged=None if root is base else root)
        yield target, ComputedTensor(target, base.dtype, shape_of(base), operation)
        bias = parts.get("lora_B.bias")
        if bias is not None:
            name = f"{target.removesuffix('.weight')}.bias"
            if name in self._tensors:
                yield name, self._like(name, ScaledSum(self._tensors[name], bias, operation.scale))
            else:
                self.problems.append(f"{name} is missing: the adapter adds to it")

    def _like(self, name: str, operation: Operation) -> ComputedTensor:
        old = self._tensors[name]
        return ComputedTensor(name, old.dtype, shape_of(old), operation)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored(name)
        return None if stored is None else shape_of(self._tensors[stored])

    def _name_of(self, name: str) -> str:
        return self._stored(name) or name

    def _stored(self, name: str) -> str | None:
        """Return the tensor that a model of transformers calls `name`."""
        return name if name in self._tensors else self._stored_names.get(name)

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        """Stored names by those of transformers' modules, of tensors that are only renamed."""
        return renamed_by_transformers(self.found.checkpoint)

    def _saved(self, name: str, tensor: TensorInfo) -> dict[str, Operand]:
        """Return a tensor that the adapter brings whole (`modules_to_save`, biases), in the dtype that it has had."""
        stored = self._stored(name)
        if stored is not None:
            shape = shape_of(self._tensors[stored])
            if shape != tensor.shape:
                self.problems.append(f"{name} is {list(tensor.shape)} in the adapter, {list(shape)} in the base")
                return {}
            return {stored: self._like(stored, Unchanged(replace(tensor, name=stored)))}
        is_head = name == "lm_head.weight" and (self.found.checkpoint.config or {}).get("tie_word_embeddings") is True
        if not is_head:
            self.problems.append(f"{name} is missing: the adapter replaces it")
            return {}
        self.unties = True
        alike = (each.dtype for each in self._tensors.values() if shape_of(each) == tensor.shape)  # the embedding
        dtype = next(alike, tensor.dtype)
        return {name: ComputedTensor(name, dtype, tensor.shape, Unchanged(tensor))}


def _untied(found: TensorsToWrite) -> TensorsToWrite:
    config = {**(found.checkpoint.config or {}), "tie_word_embeddings": False}
    note = "config.json: tie_word_embeddings is false now, because the adapter has an lm_head of its own"
    return replace(found, checkpoint=replace(found.checkpoint, config=config), notes=(*found.notes, note))
