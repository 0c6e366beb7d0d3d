"""Layers of the libraries that quantise models in the places of plain ones, as transformers makes them by a config."""

from __future__ import annotations

from collections.abc import Callable, Container
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigload.errors import LoadError, abridged
from bigload.extras import require
from bigload.runtime.modules.passing_forward import is_of_gptqmodel
from bigload.units import counted

_ON_ACCELERATORS = frozenset(
    {"CompressedTensorsFP8Linear", "FP8Embedding", "FP8Experts", "FP8GroupedLinear", "FP8Linear", "Mxfp4GptOssExperts"}
)
"""Layers of transformers whose kernels are for accelerators only."""

_ACCELERATORS = frozenset({"cuda", "xpu"})


_KERNELS_TO_OFFLOAD = {"gptq": "torch", "awq": "torch_awq"}
"""Backends of gptqmodel whose layers keep their weights as they are stored."""


def prepare_quantised(model: nn.Module, *, is_offloaded: bool = False) -> nn.Module:
    """Give `model` the layers in which its config says that its weights are quantised, and return it.

    A model of transformers without values, as `from_config` makes it under `init_empty_weights`, has plain layers, also
    where its checkpoint is quantised. One whose config names no quantisation stays as it is, and so does one that
    transformers has prepared. If weights will be offloaded, as `is_offloaded` says, gptqmodel computes by a kernel that
    takes them as they are stored, unless the config names another.

    Raises:
        LoadError: the method's library is not installed, or it cannot compute on this machine and transformers would
            unpack the weights while it loads them.
        MissingPackageError: transformers is not installed.
    """
    config: Any = getattr(model, "config", None)
    settings = _settings(config)
    if settings is None or getattr(model, "hf_quantizer", None) is not None:
        return model
    require("transformers", asked_by="bigload.prepare_quantised", extra="run")
    method = str(_said(settings, "quant_method"))
    method = getattr(_said(settings, "quant_method"), "value", method)
    wants_plain = bool(_said(settings, "dequantize"))
    if is_offloaded and method in _KERNELS_TO_OFFLOAD and _said(settings, "backend") in (None, "auto"):
        _say(settings, "backend", _KERNELS_TO_OFFLOAD[method])
    try:
        auto = import_module("transformers.quantizers.auto")
        quantizer, model.config, _ = auto.get_hf_quantizer(config, None, {"": "cpu"}, True, {})  # noqa: FBT003
    except (ImportError, RuntimeError, ValueError) as error:
        raise _cannot(method, str(error).strip().splitlines()[0]) from error
    if quantizer is None:
        raise _cannot(method, "the installed transformers does not know it")
    if not wants_plain:
        _refuse_unpacking(quantizer, method)
    of_transformers: Any = model
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=of_transformers.dtype, device_map={"": "cpu"}, use_kernels=False)
    if not wants_plain:
        _refuse_unpacking(quantizer, method)
    of_transformers.hf_quantizer = quantizer
    for module in model.modules():
        if is_of_gptqmodel(module):
            _make_ready(module, _said(settings, "checkpoint_format") or _said(settings, "format") or "gptq")
    return model


def _make_ready(layer: Any, stored_format: str) -> None:
    """Give a layer of gptqmodel the buffers that no checkpoint holds, which are to have memory."""
    is_for_version_2 = getattr(layer, "REQUIRES_FORMAT_V2", False)
    layer.has_zeros_of_version_1 = is_for_version_2 and stored_format == "gptq"
    if hasattr(layer, "_init_wf_unsqueeze_buffers"):
        for name in ("wf_unsqueeze_zero", "wf_unsqueeze_neg_one"):
            layer._buffers.pop(name, None)
        layer._wf_device = lambda: torch.device("cpu")
        layer._init_wf_unsqueeze_buffers()
        del layer._wf_device


def check_computable(model: nn.Module, runs_on: Callable[[str], torch.device]) -> None:
    """Raise if quantised layers of `model` cannot compute where they are to run: `runs_on` the device, by name."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        kinds = _kinds_of_devices(module)
        if kinds is not None and (kind := runs_on(name).type) not in kinds:
            found.setdefault((type(module).__name__, kind), []).append(name)
    if found:
        (layer, kind), names = next(iter(found.items()))
        where = f"{kind}, where {counted(len(names), 'layer')} of {type(model).__name__} would run"
        raise LoadError(
            f"{layer} does not compute on {where}",
            details=abridged(names),
            hint="take an accelerator, or a checkpoint of another method; docs/running.md lists them",
        )


def _kinds_of_devices(module: nn.Module) -> Container[str] | None:
    """Return the kinds of devices that a quantised layer computes on; `None` for any."""
    if type(module).__name__ in _ON_ACCELERATORS:
        return _ACCELERATORS
    supported = getattr(module, "SUPPORTS_DEVICES", None) if is_of_gptqmodel(module) else None
    names = {str(getattr(each, "value", each)) for each in supported or ()}
    return None if not names or "all" in names else names | ({"cuda"} if "rocm" in names else set())


def _settings(config: Any) -> Any:
    """Return what a config says about quantisation, a dict or an object of transformers; `None` if nothing."""
    if config is None or not hasattr(config, "get_text_config"):
        return None
    return getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )


def _said(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)


def _say(settings: Any, name: str, value: object) -> None:
    if isinstance(settings, dict):
        settings[name] = value
    else:
        setattr(settings, name, value)


def _refuse_unpacking(quantizer: Any, method: str) -> None:
    if getattr(quantizer.quantization_config, "dequantize", False):
        reason = "its layers compute on accelerators only; transformers would unpack all weights instead"
        raise _cannot(
            method, reason, "bigload reshard MODEL OUT --dequantize bf16 writes plain weights, which run here"
        )


def _cannot(method: str, reason: str, hint: str = "docs/running.md lists what each method needs") -> LoadError:
    return LoadError(
        f"weights quantised by {method} cannot be used on this machine: {reason}", hint=f"{hint}; nothing was loaded"
    )
