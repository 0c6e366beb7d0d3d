"""Transform of plain weights into quantised ones, rounded to nearest: forms that transformers and vLLM read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bigload.checkpoint.quantisation import quantisation_of
from bigload.conversion.computed_tensor import form_of
from bigload.conversion.quantised_tensors import quantised, scheme_named
from bigload.errors import OptionError
from bigload.layouts.dtype_rules import DTypeRule, matches
from bigload.layouts.tensors_to_write import TensorsToWrite


@dataclass(frozen=True)
class Quantize:
    """Write the matrices of a model's blocks in `scheme`: `fp8-block`, `fp8-channel`, `int8` or `int4-g128`.

    Attributes:
        scheme: One of `conversion.quantised_tensors.SCHEMES`.
        keep_plain: Patterns of weights that stay plain, as for `Drop`.
        also: Patterns of matrices that are quantised though they stay plain by default, such as `lm_head`.
        dtypes: Dtypes that other tensors are cast to: weights are rounded in theirs.

    Raises:
        OptionError: there is no such scheme.
    """

    scheme: str
    keep_plain: Sequence[str] = ()
    also: Sequence[str] = ()
    dtypes: DTypeRule = field(default_factory=DTypeRule)

    def __post_init__(self) -> None:
        scheme_named(self.scheme)

    def __str__(self) -> str:
        words = [f"quantize {self.scheme}", *(f"without {each}" for each in self.keep_plain)]
        return ", ".join([*words, *(f"with {each}" for each in self.also)])

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return numbers and scales in place of weights, and a config with a `quantization_config`.

        Raises:
            OptionError: weights are quantised already, none can be, or a pattern matches none.
        """
        method = quantisation_of(found.checkpoint)
        if method is not None:
            hint = f"write plain weights first: --dequantize bf16 --quantize {self.scheme}"
            raise OptionError.of("quantize", self.scheme, f"plain weights; these are {method}", hint=hint)
        _check_patterns("keep_plain", self.keep_plain, found.tensors, "a pattern that matches a tensor")
        result = quantised(
            found.tensors,
            found.checkpoint.config,
            self.scheme,
            keeps=lambda name: _any_matches(self.keep_plain, name),
            takes=lambda name: _any_matches(self.also, name),
            dtype_of=lambda tensor: self.dtypes(form_of(tensor)),
        )
        expected = "a pattern that matches a linear layer's weight, a matrix: embeddings and vectors stay plain"
        _check_patterns("quantize_also", self.also, result.weights, expected)
        written = found.with_tensors(result.tensors, notes=result.notes)
        return replace(written, checkpoint=replace(written.checkpoint, config=result.config))


def _any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def _check_patterns(option: str, patterns: Iterable[str], names: Iterable[str], expected: str) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise OptionError.of(option, pattern, expected)
