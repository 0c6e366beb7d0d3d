"""The model inside the wrappers of torch: data parallelism, FSDP and `torch.compile`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS = (
    ("torch.nn.parallel", "DataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model within `DistributedDataParallel`, `DataParallel`, FSDP and `torch.compile`.

    Name and signature are those of accelerate 1.15.

    Args:
        model: A model, wrapped or not. A compiled one stays as it is, unlike with accelerate.
        keep_fp32_wrapper: Leave the forward that accelerate has put around the model's for mixed precision.
        keep_torch_compile: Return a compiled model compiled: a new one if there were wrappers within.
        recursive: Unwrap modules inside as well.
    """
    wrappers = tuple(kind for module, name in _WRAPPERS if (kind := _imported_class(module, name)) is not None)
    compiled: Any = None
    inner: Any = model
    while (is_compiled := "_orig_mod" in inner._modules) or isinstance(inner, wrappers):
        if is_compiled and compiled is None:
            compiled = inner
        inner = inner._orig_mod if is_compiled else inner.module
    if recursive:
        inner = _unwrap_children(inner)
    if not keep_fp32_wrapper and (own := inner.__dict__.pop("_original_forward", None)) is not None:
        inner.forward = own
    found: nn.Module = inner
    if compiled is not None and keep_torch_compile:
        found = compiled if compiled._orig_mod is inner else type(compiled)(inner, compiled.dynamo_ctx)
    return found


def _imported_class(module: str, name: str) -> type | None:
    """Return a class if its module is imported: else it has no instances."""
    found = sys.modules.get(module)
    return None if found is None else getattr(found, name)


def _unwrap_children(module: Any) -> Any:  # noqa: ANN401 - whatever a wrapper holds
    while hasattr(module, "module"):
        module = module.module
    for name, child in module.named_children():
        setattr(module, name, _unwrap_children(child))
    return module
