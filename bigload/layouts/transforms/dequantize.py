"""Transform of quantised weights into plain ones.

Fine-grained FP8 (`weight_scale_inv`, DeepSeek), FP8 and INT8 with a scale for each tensor or row (`weight_scale`,
compressed-tensors, fbgemm), `pack-quantized` integers of compressed-tensors, GPTQ, AWQ, MXFP4 of
gpt-oss, and 4 and 8 bits of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from struct import unpack
from typing import Any, TypeGuard

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.quantisation import Quantisation, quantisation_of
from bigload.conversion.arithmetic.scaled_weights import ScaledWeights
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of
from bigload.dtypes import DTYPES, DType, parse_dtype
from bigload.errors import InvalidCheckpointError, OptionError, Problem
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.layouts.transforms.bitsandbytes_modules import modules_of_bitsandbytes
from bigload.layouts.transforms.packed_modules import MisfitError, read_small_tensors, unpacked_modules
from bigload.units import counted

_STORED = ("F8_E4M3", "F8_E5M2", "I8")
_FLOATS_OF_8_BITS = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale_inv", "weight_scale")
_BESIDE = (*_SCALES, "weight_zero_point", "weight_shape", "activation_scale", "input_scale", "k_scale", "v_scale")
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
_TARGETS = ("BF16", "F16", "F32")
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Dequantize:
    """Write quantised weights as plain numbers of `dtype`, which may be given as text.

    Raises:
        OptionError: weights are not written in this dtype.
    """

    dtype: DType = DTYPES["BF16"]

    def __post_init__(self) -> None:
        given: object = self.dtype
        if isinstance(given, str):
            object.__setattr__(self, "dtype", Dequantize.parse(given).dtype)
        if self.dtype.name not in _TARGETS:
            raise OptionError.of("dequantize", self.dtype.name, "bf16, fp16 or fp32")

    @classmethod
    def parse(cls, text: str) -> Dequantize:
        """Return the transform to the dtype that `text` names.

        Raises:
            OptionError: none of that name.
        """
        try:
            return cls(parse_dtype(text))
        except ValueError as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError.of("dequantize", text, f"bf16, fp16 or fp32 ({error})") from None

    def __str__(self) -> str:
        return f"dequantize {self.dtype.name}"

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return plain weights in place of the quantised ones, and a config without `quantization_config`.

        Raises:
            OptionError: nothing is quantised, or some weights would stay so.
            UnsupportedFormatError: weights would have to be transposed.
            InvalidCheckpointError: numbers have no scale, scales of another shape, or sizes of blocks are impossible.
            ReadError: what bitsandbytes says of a weight cannot be read.
        """
        checkpoint = found.checkpoint
        tensors = found.tensors
        method = quantisation_of(checkpoint)
        problems = list(_misstated_sizes(_settings(checkpoint.config)))
        made = self._scaled(checkpoint, tensors, method, problems)
        unpacked = [
            *unpacked_modules(tensors, _settings(checkpoint.config), problems),
            *modules_of_bitsandbytes(checkpoint, tensors, problems),
        ]
        for name, shape, unpacking, parts in unpacked:
            made[parts[0]] = ComputedTensor(name, self.dtype, shape, unpacking)
        replaced = {part for each in unpacked for part in each.replaces}
        beside = [stored for stored, weight in made.items() if weight.name in tensors and weight.name != stored]
        problems += [f"{made[stored].name} is stored beside {stored}, which becomes it" for stored in beside]
        if problems:
            raise InvalidCheckpointError(
                checkpoint.path, [Problem(code="bad-scale", file=checkpoint.name, text=text) for text in problems]
            )
        if not made:
            known = "a quantised checkpoint: no weights of this one are"
            if method is not None:
                known = f"weights in forms that it knows: those of {method.method} are not among them"
            raise OptionError.of("dequantize", self.dtype.name, known)
        left = [name for name, each in tensors.items() if _is_quantised(name, each.dtype) and name not in made]
        left = [name for name in left if name not in replaced and name.rpartition(".")[2] not in _BESIDE]
        if left:  # without quantization_config, readers would take their numbers for the weights
            is_fused = not all(isinstance(tensors[name], TensorInfo) for name in left)
            raise OptionError.of(
                "dequantize",
                self.dtype.name,
                f"{'experts that are not fused yet' if is_fused else 'weights in forms that it knows'}: "
                f"{counted(len(left), 'tensor')} would stay quantised, {left[0]} ({tensors[left[0]].dtype}) for one",
                hint="fuse plain weights: reshard with --dequantize first, then --names transformers of what that wrote"
                if is_fused
                else "experts in one tensor are not dequantised, nor are tensors in several parts",
            )
        note = f"{counted(len(made), 'weight')} dequantised to {self.dtype.name}"
        result = found.with_tensors(_plain(tensors, made, replaced), notes=[note])
        config = {key: value for key, value in (checkpoint.config or {}).items() if key != "quantization_config"}
        if checkpoint.config is None:
            return result
        return replace(result, checkpoint=replace(result.checkpoint, config=config))

    def _scaled(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, Operand],
        method: Quantisation | None,
        problems: list[str],
    ) -> dict[str, ComputedTensor]:
        """Return weights that are rows of numbers with scales, by the name of what is stored."""
        block = _block_size(checkpoint.config)
        packed_bits = method.bits if method is not None and method.bits in (4, 8) else 0
        shapes = _packed_shapes(checkpoint.root, tensors, packed_bits, 0 if method is None else method.group_size)
        sizes = [] if problems else _group_sizes(_settings(checkpoint.config))
        made = {}
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf not in ("weight", "weight_packed") or not isinstance(tensor, TensorInfo):
                continue
            if f"{module}.SCB" in tensors:  # of bitsandbytes
                continue
            if tensor.dtype.name not in (_STORED if leaf == "weight" else ("I32",)):
                continue
            try:
                columns = _columns(tensor, shapes.get(module), packed_bits=packed_bits)
                operation = _operation(
                    tensors, module, tensor, columns=columns, block=block, packed_bits=packed_bits, problems=problems
                )
            except MisfitError as error:
                problems.append(f"{name} {error}")
                continue
            if operation is not None and leaf == "weight_packed" and sizes and None not in sizes:
                groups = operation.scale.shape[1]
                if groups not in {1 if size < 1 else -(-columns // size) for size in sizes}:
                    problems.append(f"{operation.scale.name} has {groups} columns for group_size {sizes} in {columns}")
            if operation is not None:
                shape = (*tensor.shape[:-1], operation.columns)
                made[name] = ComputedTensor(f"{module}.weight", self.dtype, shape, operation)
        return made


def _is_quantised(name: str, dtype: DType) -> bool:
    return dtype.name in _FLOATS_OF_8_BITS or name.endswith(".weight_packed")


def _plain(
    tensors: Mapping[str, Operand], made: Mapping[str, ComputedTensor], replaced: Container[str]
) -> Iterator[Operand]:
    """Yield all tensors but those that say how to unpack a weight, with those `made` in place of stored ones."""
    modules = {tensor.name.rpartition(".")[0] for tensor in made.values()}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if name in made:
            yield made[name]
        elif name not in replaced and (
            leaf not in _BESIDE or (module not in modules and leaf not in ("k_scale", "v_scale"))
        ):
            yield tensor


def _operation(
    tensors: Mapping[str, Operand],
    module: str,
    stored: TensorInfo,
    *,
    columns: int,
    block: tuple[int, int],
    packed_bits: int,
    problems: list[str],
) -> ScaledWeights | None:
    """Return the operation on `stored`; `None` after adding to `problems`.

    Raises:
        MisfitError: the zero points do not fit.
    """
    scale = next((found for leaf in _SCALES if isinstance(found := tensors.get(f"{module}.{leaf}"), TensorInfo)), None)
    if scale is None or scale.dtype.name not in _SCALE_DTYPES:
        why = "no scale" if scale is None else f"scales in {scale.dtype}, which is not read as one"
        problems.append(f"{stored.name} is {stored.dtype} and has {why}")
        return None
    rows, bits = _rows(stored.shape), packed_bits if stored.name.endswith(".weight_packed") else 0
    shape = _grid(scale.shape, rows)
    if len(stored.shape) != 2 or not columns or shape is None:
        problems.append(f"{stored.name} {list(stored.shape)} does not go with {scale.name} {list(scale.shape)}")
        return None
    if scale.name.endswith(".weight_scale_inv") and shape == (-(-rows // block[0]), -(-columns // block[1])):
        each = block  # the last block may be cut: two scales for 192 columns are for 128 and 64
    elif shape[0] in (1, rows) and columns % shape[1] == 0:
        each = (rows if shape[0] == 1 else 1, columns // shape[1])
    else:
        each = block
    if shape != (-(-rows // each[0]), -(-columns // each[1])):
        problems.append(f"{scale.name} is {list(shape)} for blocks of {list(each)} in {[rows, columns]}")
        return None
    zero_point = _zero_point(tensors, module, shape, rows=rows, bits=bits)
    return ScaledWeights(stored, replace(scale, shape=shape), each, columns, bits, zero_point)


def _packed_shapes(
    root: Path, tensors: Mapping[str, Operand], bits: int, group_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that `weight_shape` says, by module, of matrices whose last words may not be full.

    Where groups of the size in the config fill all words nothing is read: a Kimi has 60,000 such matrices.
    """
    said = []
    for name, packed in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_packed" or not bits or len(shape_of(packed)) != 2:
            continue
        shape, scale = tensors.get(f"{module}.weight_shape"), tensors.get(f"{module}.weight_scale")
        num_groups = shape_of(scale)[-1] if scale is not None and shape_of(scale) else 0
        is_full = num_groups * group_size * bits == shape_of(packed)[1] * 32
        if isinstance(shape, TensorInfo) and (shape.dtype.name, shape.shape) == ("I64", (2,)) and not is_full:
            said.append(shape)
    return {name.rpartition(".")[0]: unpack("<2q", text) for name, text in read_small_tensors(root, said).items()}


def _columns(stored: TensorInfo, said: tuple[int, ...] | None, *, packed_bits: int) -> int:
    """Return the columns of a stored matrix once unpacked, which its `weight_shape` may say.

    Raises:
        MisfitError: a shape of another matrix is said.
    """
    columns = stored.shape[-1] if stored.shape else 0
    if not stored.name.endswith(".weight_packed"):
        return columns
    each = 32 // packed_bits if packed_bits else 0
    if said is None:
        return columns * each
    if said[:-1] != stored.shape[:-1] or not 0 <= columns * each - said[-1] < each:
        raise MisfitError(f"{list(stored.shape)} does not go with its weight_shape, which says {list(said)}")
    return said[-1]


def _zero_point(
    tensors: Mapping[str, Operand], module: str, grid: tuple[int, int], *, rows: int, bits: int
) -> TensorInfo | None:
    """Return the zero points of a grid, in its form or packed by rows; `None` if there are none.

    Raises:
        MisfitError: they are of another form, or not those of the inputs in their order.
    """
    if f"{module}.weight_g_idx" in tensors:
        raise MisfitError(f"has inputs in another order ({module}.weight_g_idx), which is not undone here")
    found = tensors.get(f"{module}.weight_zero_point")
    if not isinstance(found, TensorInfo):
        return None
    expected = (-(-grid[0] * bits // 32), grid[1]) if bits else grid
    is_packed = found.dtype.name == "I32"
    if is_packed != bool(bits) or (found.shape if bits else _grid(found.shape, rows)) != expected:
        dtype = "I32" if bits else "I8"
        text = f"has {found.name} {list(found.shape)} in {found.dtype}, expected {list(expected)} in {dtype}"
        raise MisfitError(text)
    return replace(found, shape=expected)


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 2 else 0


def _grid(shape: tuple[int, ...], rows: int) -> tuple[int, int] | None:
    """Return the rows and columns of scales: one number, one for each row, or a matrix."""
    if len(shape) == 2:
        return shape[0], shape[1]
    if shape in ((), (1,)):
        return 1, 1
    return (rows, 1) if shape == (rows,) else None


def _settings(config: Mapping[str, object] | None) -> Mapping[str, object]:
    found = (config or {}).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _block_size(config: Mapping[str, object] | None) -> tuple[int, int]:
    size = _settings(config).get("weight_block_size")
    return (size[0], size[1]) if _is_block(size) else _DEFAULT_BLOCK


def _is_block(size: object) -> TypeGuard[list[int]]:
    return isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) and each > 0 for each in size)


def _group_sizes(settings: Mapping[str, object]) -> list[Any]:
    """Return what compressed-tensors says of each group of layers."""
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else ()
    found = [each.get("weights") for each in listed if isinstance(each, Mapping)]
    return [weights.get("group_size") for weights in found if isinstance(weights, Mapping)]


def _misstated_sizes(settings: Mapping[str, object]) -> Iterator[str]:
    block = settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        yield f"quantization_config: weight_block_size is {block!r:.40}, expected two numbers above 0"
    for size in _group_sizes(settings):
        if size is not None and (not isinstance(size, int) or (size < 1 and size != -1)):
            yield f"quantization_config: group_size is {size!r:.40}, expected a number above 0, or -1 for whole rows"
