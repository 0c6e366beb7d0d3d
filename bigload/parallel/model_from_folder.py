"""The model that the config of a folder describes, without its weights: of a class that transformers has.

Code that lies in the folder is never run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from bigload.documents import MAX_CONFIG_BYTES, DocumentError, parse_json, read_file
from bigload.errors import CheckpointNotFoundError, OptionError
from bigload.extras import require
from bigload.runtime.modules.init_empty_weights import init_empty_weights

_CONFIG = "config.json"
_GENERATION = "generation_config.json"


def model_from_folder(folder: Path) -> nn.Module:
    """Return the model of `folder` with its parameters on the meta device, and its settings for generation."""
    name = _class_name(folder)
    require("transformers", asked_by="parallelize of a folder", extra="run")
    transformers = import_module("transformers")
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and hasattr(kind, "config_class")):
        raise _unknown(folder, f"one of a model whose class transformers has, not {name!r:.100}")
    made: Any = kind
    with init_empty_weights():
        model = made._from_config(made.config_class.from_pretrained(folder))  # in the dtype that the config names
    assert isinstance(model, nn.Module)
    if (folder / _GENERATION).is_file() and hasattr(model, "generation_config"):
        try:
            read_file(folder / _GENERATION, max_bytes=MAX_CONFIG_BYTES)  # transformers reads whatever size it has
        except ValueError as error:
            raise _unknown(folder, f"one with a readable {_GENERATION} ({error})") from None
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _class_name(folder: Path) -> str:
    path = folder / _CONFIG
    try:
        config = parse_json(read_file(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except OSError as error:
        raise CheckpointNotFoundError(
            folder, f"{_CONFIG}: {error.strerror or error}", hint="give the model itself, and its folder as checkpoint"
        ) from None
    except DocumentError as error:
        raise _unknown(folder, f"one with a readable {_CONFIG} ({error!s:.100})") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise _unknown(folder, f'one whose {_CONFIG} names a class under "architectures"')
    return names[0]


def _unknown(folder: Path, expected: str) -> OptionError:
    return OptionError.of(
        "model",
        str(folder),
        f"a folder, {expected}",
        hint="make the model yourself under init_empty_weights, and give the folder as checkpoint",
    )
