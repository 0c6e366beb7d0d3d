"""Transform that merges a LoRA adapter of PEFT into the weights: `W + scale * B @ A`, in float32, cast once.

Files and config are those of PEFT 0.21: `adapter_config.json`, and tensors named after the modules of transformers'
model (`base_model.model.PATH.lora_A.weight`). LoRA, rsLoRA, DoRA, biases, ranks and alphas by module,
`modules_to_save`, embeddings, convolutions and experts in one tensor (`target_parameters`) are merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import Checkpoint, Span, TensorInfo, name_of
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.arithmetic.low_rank import LowRankSum, ScaledSum, StackedLowRankSum
from bigload.conversion.arithmetic.unchanged import Unchanged
from bigload.conversion.computed_tensor import ComputedTensor, Operand, Operation, shape_of
from bigload.documents import MAX_CONFIG_BYTES, DocumentError, parse_json
from bigload.errors import AdapterError
from bigload.layouts.names import renamed_by_transformers
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.planning.load_dtype import CASTABLE
from bigload.units import counted

CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<path>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<leaf>weight|bias))?"
)
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT changes the base when training begins: the adapter is for that one."""

_TRANSPOSED_EXPERTS = ("gpt_oss",)
"""Model types that keep experts as [experts, in, out], marked by `is_transposed` in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """Tensors of an adapter by module path and part, and its config."""

    checkpoint: Checkpoint
    config: Mapping[str, object]
    modules: Mapping[str, Mapping[str, TensorInfo]]
    saved: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class MergeLora:
    """Add the adapter in the folder `path`, times `scale`, to the weights that it was trained for."""

    path: str | Path
    scale: float = 1.0

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
        merge = _Merge(str(self), adapter, found, self.scale)
        made = merge.tensors()
        if merge.problems:
            raise AdapterError(
                f"the adapter {self.path} does not fit {found.checkpoint.name}: "
                f"{counted(len(set(merge.problems)), 'problem')}",
                details=list(dict.fromkeys(merge.problems)),
                hint="merge it into the base that adapter_config.json names "
                f"({str(adapter.config.get('base_model_name_or_path'))!r:.200}); nothing was written",
            )
        note = f"{self}: {len(made)} of {counted(len(found.tensors), 'tensor')} changed"
        result = found.with_tensors({**found.tensors, **made}.values(), notes=[note])
        return _untied(result) if merge.unties else result

    @cached_property
    def _opened(self) -> _Adapter:
        if not scheme_of(Path(self.path)).is_local:
            raise AdapterError(
                f"the adapter {self.path} is not on this machine", hint="bigload fetch it first, then name its folder"
            )
        folder = Path(self.path)
        try:
            config = parse_json(read_beside(folder / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES))
        except (OSError, DocumentError) as error:
            raise AdapterError(
                f"{folder} is no adapter: {CONFIG_FILE} cannot be read ({error})",
                hint="name the folder that PEFT's save_pretrained wrote",
            ) from None
        if not isinstance(config, dict):
            raise AdapterError(f"{folder / CONFIG_FILE} is no JSON object")
        _check_kind(folder, config)
        return _parsed(open_checkpoint(folder), config)


def _check_kind(folder: Path, config: Mapping[str, object]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} is an adapter of type {kind!r:.100}; expected LORA, which alone can be merged")
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


def _parsed(checkpoint: Checkpoint, config: Mapping[str, object]) -> _Adapter:
    root = checkpoint.root.resolve()
    modules: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, TensorInfo] = {}
    for name, tensor in checkpoint.tensors.items():
        placed = replace(tensor, span=Span(str(root / tensor.span.file), tensor.span.start, tensor.span.stop))
        short = name.removeprefix(_PREFIX)
        part = _PART.fullmatch(short)
        if part is None:
            saved[short] = placed
            continue
        kind = part["part"] + (".bias" if part["leaf"] == "bias" else "")
        modules.setdefault(part["path"], {})[kind] = placed
    return _Adapter(checkpoint=checkpoint, config=config, modules=modules, saved=saved)


class _Merge:
    """One adapter and the tensors that it is merged into.

    Attributes:
        problems: What does not fit.
        unties: It brings an output layer of its own to a model that ties it to the embedding.
    """

    def __init__(self, text: str, adapter: _Adapter, found: TensorsToWrite, scale: float) -> None:
        self.problems: list[str] = []
        self._text = text
        self._adapter = adapter
        self._found = found
        self._tensors = found.tensors
        self._scale = scale
        self.unties = False

    def tensors(self) -> dict[str, Operand]:
        """Return the tensors that change, and those that come from the adapter, by name."""
        made: dict[str, Operand] = {}
        for name, tensor in self._adapter.saved.items():
            made.update(self._saved(name, tensor))
        self._tensors = {**self._tensors, **made}  # an embedding can be saved whole, and have matrices beside
        for path, parts in self._adapter.modules.items():
            made.update(self._merged(path, parts))
        return made

    def _merged(self, path: str, parts: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Operand]]:
        embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
        down, up = (parts.get(f"lora_embedding_{side}" if embedding else f"lora_{side}") for side in "AB")
        if down is None or up is None:
            self.problems.append(f"{path} has only {', '.join(parts)}")
            return
        target = self._target(path, down, up)
        if target is None:
            return
        base = self._tensors[target]
        if base.dtype.name not in CASTABLE:
            self.problems.append(
                f"{target} is stored as {base.dtype}: --dequantize bf16 before --lora makes plain weights of it"
            )
            return
        is_transposed = embedding or self._adapter.config.get("fan_in_fan_out") is True
        operation = self._operation(target, path, (down, up), is_transposed=is_transposed)
        if operation is None:
            return
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

    def _target(self, path: str, down: TensorInfo, up: TensorInfo) -> str | None:
        """Return the name of the weight that the module `path` has."""
        name = self._stored(f"{path}.weight")
        if name is not None:
            return name
        module = path.removesuffix(".base_layer")
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        targets = self._adapter.config.get("target_parameters")
        leaves = {str(each).rpartition(".")[2] for each in targets} if isinstance(targets, list) else set()
        found = [
            each
            for each in (f"{module}.{leaf}" for leaf in sorted(leaves))
            if each in self._tensors and _stacked_sides(shape_of(self._tensors[each]), down, up)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            self.problems.append(f"{module}: its matrices fit {' and '.join(found)} alike")
        elif leaves:
            self.problems.append(
                f"{module} has no weights of all experts in one tensor: add --names transformers where they are apart"
            )
        else:
            self.problems.append(f"{path}.weight is missing: the adapter changes it")
        return None

    def _stored(self, name: str) -> str | None:
        """Return the tensor that a model of transformers calls `name`."""
        return name if name in self._tensors else self._stored_names.get(name)

    @cached_property
    def _stored_names(self) -> Mapping[str, str]:
        """Stored names by those of transformers' modules, of tensors that are only renamed."""
        return renamed_by_transformers(self._found.checkpoint)

    def _operation(
        self, target: str, path: str, matrices: tuple[TensorInfo, TensorInfo], *, is_transposed: bool
    ) -> LowRankSum | StackedLowRankSum | None:
        base, (down, up) = self._tensors[target], matrices
        shape = shape_of(base)
        if len(shape) == 3 and len(down.shape) == 2:
            sides = _stacked_sides(shape, down, up)
            rank = down.shape[0] // shape[0] if shape[0] else 0
            # where both sides fit, only the model says which is which
            is_turned = sides == {True} or (
                len(sides) == 2 and (self._found.checkpoint.config or {}).get("model_type") in _TRANSPOSED_EXPERTS
            )
            if sides and (scale := self._scaling(path, rank)) is not None:
                return StackedLowRankSum(base, down, up, scale, is_transposed=is_turned)
        else:
            wide = (shape[-1], shape[0]) if is_transposed and len(shape) == 2 else shape
            rank = down.shape[0] if down.shape else 0
            fits = (
                len(shape) >= 2
                and down.shape[1:] == wide[1:]
                and up.shape[:2] == (wide[0], rank)
                and all(size == 1 for size in up.shape[2:])
            )
            if fits and (scale := self._scaling(path, rank)) is not None:
                return LowRankSum(base, down, up, scale, is_transposed=is_transposed)
            if fits:
                return None
        if not self.problems or not self.problems[-1].startswith(path):
            found = f"{list(down.shape)} and {list(up.shape)}"
            self.problems.append(f"{path}: matrices of {found} do not fit {target}, which has {list(shape)}")
        return None

    def _scaling(self, path: str, rank: int) -> float | None:
        """Return the factor of the product, as PEFT computes it."""
        config = self._adapter.config
        ranks, alphas = (
            _patterned(config, path, *names) for names in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        if ranks != rank or not isinstance(alphas, int | float) or not rank:
            self.problems.append(
                f"{path}: its matrices have rank {rank}, {CONFIG_FILE} says r={ranks!r}, alpha={alphas!r}"
            )
            return None
        return self._scale * alphas / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _saved(self, name: str, tensor: TensorInfo) -> dict[str, Operand]:
        """Return a tensor that the adapter brings whole (`modules_to_save`, biases), in the dtype that it has had."""
        name = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        stored = self._stored(name)
        if stored is not None:
            shape = shape_of(self._tensors[stored])
            if shape != tensor.shape:
                self.problems.append(f"{name} is {list(tensor.shape)} in the adapter, {list(shape)} in the base")
                return {}
            return {stored: self._like(stored, Unchanged(replace(tensor, name=stored)))}
        is_head = name == "lm_head.weight" and (self._found.checkpoint.config or {}).get("tie_word_embeddings") is True
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


def _stacked_sides(shape: tuple[int, ...], down: TensorInfo, up: TensorInfo) -> set[bool]:
    """Return whether matrices of all experts fit weights of `shape` as they are (False), turned (True), or neither."""
    if len(shape) != 3 or len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or not shape[0]:
        return set()
    if down.shape[0] % shape[0]:
        return set()
    sizes = {False: (shape[2], shape[1]), True: (shape[1], shape[2])}
    return {is_turned for is_turned, pair in sizes.items() if pair == (down.shape[1], up.shape[0])}


def _patterned(config: Mapping[str, object], path: str, pattern: str, default: str) -> object:
    """Return the value of the first key of `pattern` that matches the end of `path`; the default's otherwise."""
    found = config.get(pattern)
    for key, value in found.items() if isinstance(found, dict) else ():
        with suppress(re.error):
            if re.match(rf"(.*\.)?({key})$", path):
                return value
    return config.get(default)
