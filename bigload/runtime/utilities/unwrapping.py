"""Models within wrappers of torch, and classes of modules by their names.

Names and signatures are those of accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model within `DistributedDataParallel`, `DataParallel`, FSDP and `torch.compile`.

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: Leave the forward that accelerate has put around the model's for mixed precision.
        keep_torch_compile: Return a compiled model compiled: what was compiled then holds the model itself.
        recursive: Unwrap modules inside as well.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
    compiled: Any = model if "_orig_mod" in model._modules else None
    inner: Any = model if compiled is None else compiled._orig_mod
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        inner = _unwrapped(inner)
    if not keep_fp32_wrapper:
        own = inner.__dict__.pop("_original_forward", None)
        if own is not None:
            inner.forward = own
    if compiled is None or not keep_torch_compile:
        found: nn.Module = inner
        return found
    compiled._orig_mod = inner
    return compiled  # type: ignore[no-any-return]


def _unwrapped(module: Any) -> Any:  # noqa: ANN401 - whatever a wrapper holds
    while hasattr(module, "module"):
        module = module.module
    for name, child in module.named_children():
        setattr(module, name, _unwrapped(child))
    return module


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of `module` or of one inside, the outermost first; `None` if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
