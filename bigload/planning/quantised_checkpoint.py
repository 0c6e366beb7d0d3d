"""Checkpoint as it would be if its weights were quantised: what `bigload reshard --quantize` would write of it."""

from __future__ import annotations

from dataclasses import replace

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.quantisation import quantisation_of
from bigload.conversion.computed_tensor import form_of
from bigload.conversion.quantised_tensors import quantised
from bigload.errors import OptionError


def as_quantised(checkpoint: Checkpoint, scheme: str) -> Checkpoint:
    """Return `checkpoint` with the tensors and the config that it would have; spans of those not written are empty."""
    method = quantisation_of(checkpoint)
    if method is not None:
        raise OptionError.of("dtype", scheme, f"plain weights; these are {method}")
    try:
        found = quantised(checkpoint.stored, checkpoint.config, scheme)
    except OptionError as error:
        raise OptionError.of("dtype", scheme, error.expected, hint=error.hint) from None
    tensors = {tensor.name: form_of(tensor) for tensor in found.tensors}
    return replace(checkpoint, tensors=tensors, config=found.config, assembled={})
