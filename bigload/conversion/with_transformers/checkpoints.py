"""Conversions of checkpoints whose model transformers builds from their config, to its form in memory and back."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import PiecedTensor
from bigload.conversion.with_transformers.models import conversion_for, torch_dtype_of
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.errors import NamesUnknownError

_turns = threading.Lock()
"""Held while a model is built: what transformers puts in the place of functions of torch meanwhile, two threads at once
would leave there.
"""


def conversion_by_transformers(checkpoint: Checkpoint) -> Conversion:
    """Return what the tensors in memory are made of."""
    return conversion_for(_skeleton_of(checkpoint), checkpoint.tensors)


def original_by_transformers(checkpoint: Checkpoint) -> Conversion:
    """Return what the original tensors are made of, of a checkpoint that stores those in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = _skeleton_of(checkpoint)
    known = model.state_dict().keys()
    recorded = {
        name: RecordedTensor(as_stored(tensor), torch_dtype_of(tensor))
        for name, tensor in checkpoint.tensors.items()
        if name in known
    }
    try:
        made = revert_weight_conversion(model, recorded)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise NamesUnknownError(f"transformers cannot revert the conversion of {checkpoint.name}: {reason}") from error
    tensors: dict[str, PiecedTensor] = {name: tensor.origin for name, tensor in made.items()}
    return Conversion(tensors=tensors)


def _skeleton_of(checkpoint: Checkpoint) -> nn.Module:
    """Return the model without memory."""
    import transformers
    from transformers.initialization import meta_device_safe_creation_ops, no_init_weights

    try:
        config: Any = _config_of(checkpoint)
        names = config.architectures or []
        kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
        with _turns, torch.device("meta"), no_init_weights(), meta_device_safe_creation_ops():
            model: nn.Module = kind(config)
    except StopIteration:
        reason = f"it has no class {', '.join(names) or 'for a config.json without architectures'}"
        raise _unbuilt(checkpoint, reason) from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unbuilt(checkpoint, reason) from error
    return model


def _config_of(checkpoint: Checkpoint) -> Any:  # noqa: ANN401
    """Return the config as an object of its class, without a request: that of a remote checkpoint has been read."""
    from transformers import AutoConfig

    options = {"local_files_only": True, "trust_remote_code": False}
    if scheme_of(checkpoint.root).is_local:
        return AutoConfig.from_pretrained(checkpoint.root, **options)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, **options)


def _unbuilt(checkpoint: Checkpoint, reason: str) -> NamesUnknownError:
    import transformers

    return NamesUnknownError(
        f"transformers {transformers.__version__} does not build the model of {checkpoint.path}: {reason}",
        hint="config.json beside the weights names the class, under architectures",
    )
