"""Loaders that `bench-load --peers` leaves out, because they need a model tree or files in a format of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.peers import PEERS, SAFETENSORS, Load, Peer, PeerTarget, Tensors, merged
from bigload.checkpoint.model import Checkpoint
from bigload.loading.tensors.views import torch_dtype, torch_shape
from bigload.units import MIB
from harness import folder_beside

_SPARE_BYTES = 64 * MIB


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """Return a module tree with the names of `checkpoint` and meta parameters of its shapes and dtypes."""
    model = nn.Module()
    for tensor in checkpoint.tensors.values():
        *path, leaf = tensor.name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        empty = torch.empty(torch_shape(tensor.dtype, tensor.shape), dtype=torch_dtype(tensor.dtype), device="meta")
        module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return model


def _accelerate(target: PeerTarget) -> Load:
    load_checkpoint = import_module("accelerate").load_checkpoint_in_model

    def load() -> Tensors:
        model = empty_model(target.checkpoint)
        load_checkpoint(model, str(target.checkpoint.root), device_map={"": target.device})
        return dict(model.state_dict())

    return load


def _fastsafetensors(target: PeerTarget) -> Load:
    library = import_module("fastsafetensors")

    def load() -> Tensors:
        loader = library.SafeTensorsFileLoader(library.SingleGroup(), device=target.device, nogds=True)
        loader.add_filenames({0: target.files})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        return _TensorsOfBuffers(tensors, buffers, loader)

    return load


class _TensorsOfBuffers(dict[str, Any]):
    """Tensors, with the buffers that have to outlive them."""

    def __init__(self, tensors: Tensors, buffers: Any, loader: Any) -> None:  # noqa: ANN401 - another library's
        super().__init__(tensors)
        self._buffers, self._loader = buffers, loader

    def __del__(self) -> None:
        self.clear()
        self._buffers.close()
        self._loader.close()


def _tensorizer(target: PeerTarget) -> Load:
    """Write the checkpoint once in tensorizer's own format, on the same disk, and load that."""
    library = import_module("tensorizer")
    safetensors = import_module("safetensors.torch")
    needed = target.checkpoint.total_bytes + _SPARE_BYTES
    folder = folder_beside(target.checkpoint.root, ".bigload-tensorizer-", needed, target.opened)
    file = str(folder / "model.tensors")
    serializer = library.TensorSerializer(file)
    serializer.write_state_dict(merged(safetensors.load_file(shard) for shard in target.files))
    serializer.close()

    def load() -> Tensors:
        with library.TensorDeserializer(file, device=target.device) as deserializer:
            return dict(deserializer.items())

    return load


ALL_PEERS = (
    *PEERS,
    Peer("accelerate", "accelerate", MemoryKind.FILE, SAFETENSORS, _accelerate),  # meta models get safetensors' maps
    Peer("fastsafetensors", "fastsafetensors", MemoryKind.PRIVATE, SAFETENSORS, _fastsafetensors),
    Peer("tensorizer", "tensorizer", MemoryKind.PRIVATE, SAFETENSORS, _tensorizer),
)
