"""Forwards of layers whose library changes their weights to compute with them: the changes end with the forward.

compressed-tensors unpacks a layer for good, gptqmodel puts weights into the order of its kernel at the first forward.
Offloaded weights come as they are stored each time, so the layer has to be again what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from bigload.errors import DispatchedModelError

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")

_KERNELS_OF_TORCH = frozenset(
    {"TorchAtenLinear", "TorchAtenAwqLinear", "TorchLinear", "TorchAwqLinear", "AwqTorchLinear"}
)
"""Layers of gptqmodel that change weights at their first forward only, and nothing outside of the layer."""


class PassingForward:
    """The forward of the layer `module` after `begin`; then its attributes and tensors are again what they were.

    One runs at a time: others wait.
    """

    __slots__ = ("_begin", "_lock", "_own", "module")  # no dict: what wraps a forward takes over what that has

    def __init__(self, module: nn.Module, begin: Callable[[Any], object]) -> None:
        self.module = module
        self._begin = begin
        self._own: Any = module.__dict__.get("forward")
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.module, self._begin, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, and undo all changes."""
        own = self.module.__dict__
        with self._lock:
            attributes, tables = dict(own), {name: own[name].copy() for name in _TABLES}
            try:
                self._begin(self.module)
                if self._own is not None:
                    return self._own(*args, **kwargs)
                return type(self.module).forward(self.module, *args, **kwargs)
            finally:
                for name in own.keys() - attributes.keys():
                    del own[name]
                own.update(attributes)
                for name, table in tables.items():
                    own[name].clear()
                    own[name].update(table)


def _restored(module: nn.Module, begin: Callable[[Any], object], own: Any) -> PassingForward:
    made = PassingForward(module, begin)
    made._own = own
    return made


def ready_layers(model: nn.Module, is_offloaded: Callable[[str], bool]) -> None:
    """Have quantised layers of `model`, which gets its hooks next, compute with what they hold.

    If `is_offloaded`, by the name of the layer, it is with what a hook brings for each forward.
    """
    of_library: Any = model
    if hasattr(model, "ct_decompress_hook"):  # it would unpack all of the model at the first forward
        of_library.ct_decompress_hook.remove()
        del of_library.ct_decompress_hook
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), PassingForward):
            continue
        if getattr(module, "quantization_status", None) == "compressed":
            module.forward = PassingForward(module, _unpack)
        elif not is_of_gptqmodel(module):
            continue
        elif is_offloaded(name):
            _refuse_other_kernels(name, module)
            module.forward = PassingForward(module, _convert_zeros)
        else:
            _convert_zeros(module)
            if not module.__dict__.get("optimized"):
                module.post_init()


def is_of_gptqmodel(module: nn.Module) -> bool:
    """Return whether `module` is a layer of gptqmodel, for GPTQ or AWQ."""
    return any(kind.__name__ == "BaseQuantLinear" for kind in type(module).__mro__)


def _refuse_other_kernels(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if kind not in _KERNELS_OF_TORCH:
        raise DispatchedModelError(
            f"{kind} of gptqmodel rearranges its weights once they are loaded, and cannot have them brought for each "
            "forward",
            [name],
            hint="prepare the model by prepare_quantised(model, is_offloaded=True), or keep these layers on a device",
        )


def _unpack(module: Any) -> None:
    import_module("compressed_tensors.compressors.base").decompress_module(module)


def _convert_zeros(module: Any) -> None:
    """Have zeros of the first version of GPTQ's format as a kernel for the second one takes them."""
    if "qzeros" in module._buffers and module.__dict__.get("has_zeros_of_version_1"):
        library = import_module("gptqmodel.utils.model")
        module._buffers["qzeros"] = module.qzeros.clone()  # which may be pages of a file
        library.convert_gptq_v1_to_v2_format_module(module, bits=module.bits, pack_dtype=module.pack_dtype)
        module.has_zeros_of_version_1 = False
