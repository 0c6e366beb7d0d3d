"""LoRA adapter of PEFT: its config, its tensors by the module that they change, and the weights that they fit.

Files and config are those of PEFT 0.21: `adapter_config.json`, and tensors named after the modules of transformers'
model (`base_model.model.PATH.lora_A.weight`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import Checkpoint, Span, TensorInfo, name_of
from bigload.checkpoint.source import open_checkpoint
from bigload.documents import MAX_CONFIG_BYTES, DocumentError, parse_json
from bigload.errors import AdapterError
from bigload.units import counted

CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<path>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<leaf>weight|bias))?"
)
_TRANSPOSED_EXPERTS = ("gpt_oss",)
"""Model types that keep experts as [experts, in, out], marked by `is_transposed` in transformers."""

ShapeOf = Callable[[str], "tuple[int, ...] | None"]
"""Returns the shape of a tensor of the base by the name of transformers' model or its own; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An opened adapter.

    Attributes:
        path: Its folder, as the user named it.
        modules: Low-rank parts by the path of the module that they change, and by kind: `lora_A`, `lora_B.bias`.
        saved: Tensors that it brings whole (`modules_to_save`, biases), by the name that they have in the base.
    """

    path: str
    checkpoint: Checkpoint
    config: Mapping[str, object]
    modules: Mapping[str, Mapping[str, TensorInfo]]
    saved: Mapping[str, TensorInfo]

    @property
    def name(self) -> str:
        return name_of(self.path)

    def is_beside_base(self, name: str) -> bool:
        """Return whether PEFT keeps the base's tensor beside `name` of `saved`; others take its place."""
        modules = self.config.get("modules_to_save")
        prefixes = accumulate(name.split("."), "{}.{}".format)
        return isinstance(modules, list) and any(prefix.endswith(tuple(map(str, modules))) for prefix in prefixes)

    def does_not_fit(self, base: str, problems: list[str], *, hint: str) -> AdapterError:
        """Return the error for an adapter of another base; `problems` name what does not fit."""
        distinct = list(dict.fromkeys(problems))
        named = self.config.get("base_model_name_or_path")
        return AdapterError(
            f"the adapter {self.path} does not fit {base}: {counted(len(distinct), 'problem')}",
            details=distinct,
            hint=hint.format(
                base=f"the base of its training ({str(named)!r:.200})" if named else "the base of its training"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankFit:
    """Fit of the matrices of one module to its weight.

    Attributes:
        alpha, divisor: The product `B @ A` is scaled by `alpha / divisor`.
        is_stacked: Whether the weight holds all experts, and the matrices those of all.
        is_transposed: Whether the product is transposed before it is added.
    """

    alpha: float
    divisor: float
    is_stacked: bool
    is_transposed: bool


def open_adapter(path: str | Path) -> Adapter:
    """Open the adapter in a local folder that PEFT's `save_pretrained` wrote."""
    if not scheme_of(Path(path)).is_local:
        raise AdapterError(
            f"the adapter {path} is not on this machine", hint="bigload fetch it first, then name its folder"
        )
    folder = Path(path)
    try:
        config = parse_json(read_beside(folder / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(
            f"{folder} is no adapter: {CONFIG_FILE} cannot be read ({reason})",
            hint="name the folder that PEFT's save_pretrained wrote",
        ) from None
    if not isinstance(config, dict):
        raise AdapterError(f"{folder / CONFIG_FILE} is no JSON object")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} is an adapter of type {kind!r:.100}; expected LORA, the only type that is known")
    return _parsed(str(path), open_checkpoint(folder), config)


def _parsed(path: str, checkpoint: Checkpoint, config: Mapping[str, object]) -> Adapter:
    root = checkpoint.root.resolve()
    modules: dict[str, dict[str, TensorInfo]] = {}
    saved: dict[str, TensorInfo] = {}
    for name, tensor in checkpoint.tensors.items():
        placed = replace(tensor, span=Span(str(root / tensor.span.file), tensor.span.start, tensor.span.stop))
        short = name.removeprefix(_PREFIX)
        part = _PART.fullmatch(short)
        if part is None:
            saved[short.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = placed
            continue
        kind = part["part"] + (".bias" if part["leaf"] == "bias" else "")
        modules.setdefault(part["path"], {})[kind] = placed
    return Adapter(path=path, checkpoint=checkpoint, config=config, modules=modules, saved=saved)


def matrices_of(path: str, parts: Mapping[str, TensorInfo]) -> tuple[TensorInfo, TensorInfo, bool]:
    """Return the matrices A and B of the module `path`, and whether it is an embedding."""
    is_embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    down, up = (parts.get(f"lora_embedding_{side}" if is_embedding else f"lora_{side}") for side in "AB")
    if down is None or up is None:
        raise AdapterError(f"{path} has only {', '.join(parts)} in the adapter: its other matrix is missing")
    return down, up, is_embedding


def weight_of(adapter: Adapter, path: str, shape_of: ShapeOf) -> str:
    """Return the name of the weight that the module `path` changes."""
    if shape_of(f"{path}.weight") is not None:
        return f"{path}.weight"
    module = path.removesuffix(".base_layer")
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    targets = adapter.config.get("target_parameters")
    leaves = {str(each).rpartition(".")[2] for each in targets} if isinstance(targets, list) else set()
    down, up, _ = matrices_of(path, adapter.modules[path])
    named = ((f"{module}.{leaf}", shape_of(f"{module}.{leaf}")) for leaf in sorted(leaves))
    found = [name for name, shape in named if shape is not None and _stacked_sides(shape, down, up)]
    if len(found) == 1:
        return found[0]
    if found:
        raise AdapterError(f"{module}: its matrices fit {' and '.join(found)} alike")
    if leaves:
        raise AdapterError(
            f"{module} has no tensor of all experts, which the adapter changes: --names transformers makes one"
        )
    raise AdapterError(f"{path}.weight is missing: the adapter changes it")


def fit_of(adapter: Adapter, path: str, target: str, shape: tuple[int, ...], model_type: object) -> LowRankFit:
    """Return how the matrices of the module `path` fit the weight `target` of `shape`."""
    down, up, is_embedding = matrices_of(path, adapter.modules[path])
    if len(shape) == 3 and len(down.shape) == 2:
        if sides := _stacked_sides(shape, down, up):
            # where both sides fit, only the model says which is which
            is_turned = sides == {True} or (len(sides) == 2 and model_type in _TRANSPOSED_EXPERTS)
            alpha, divisor = _scaling(adapter, path, down.shape[0] // shape[0])
            return LowRankFit(alpha=alpha, divisor=divisor, is_stacked=True, is_transposed=is_turned)
    else:
        is_transposed = is_embedding or adapter.config.get("fan_in_fan_out") is True
        wide = (shape[-1], shape[0]) if is_transposed and len(shape) == 2 else shape
        rank = down.shape[0] if down.shape else 0
        if (
            len(shape) >= 2
            and down.shape[1:] == wide[1:]
            and up.shape[:2] == (wide[0], rank)
            and all(size == 1 for size in up.shape[2:])
        ):
            alpha, divisor = _scaling(adapter, path, rank)
            return LowRankFit(alpha=alpha, divisor=divisor, is_stacked=False, is_transposed=is_transposed)
    found = f"{list(down.shape)} and {list(up.shape)}"
    raise AdapterError(f"{path}: matrices of {found} do not fit {target}, which has {list(shape)}")


def _scaling(adapter: Adapter, path: str, rank: int) -> tuple[float, float]:
    """Return alpha, and what it is divided by, as PEFT does."""
    config = adapter.config
    ranks, alphas = (
        _patterned(config, path, *names) for names in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if ranks != rank or not isinstance(alphas, int | float) or not rank:
        raise AdapterError(f"{path}: its matrices have rank {rank}, {CONFIG_FILE} says r={ranks!r}, alpha={alphas!r}")
    return alphas, math.sqrt(rank) if config.get("use_rslora") else rank


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
