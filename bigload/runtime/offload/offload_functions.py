"""Functions of `accelerate.utils.offload` 1.15, with its names, signatures and semantics.

A folder has a `.dat` file per tensor and an `index.json`; `layouts/formats/dat.py` describes the format, and
`offload_writer.py` what is written beside it and in which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

import torch

from bigload.errors import OptionError
from bigload.layouts.formats.dat import Entry
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.memory.huge_pages import allocate
from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.modules.module_tensors import data_address
from bigload.runtime.offload.offload_writer import (
    StrPath,
    checked_entry,
    index_of,
    offload_writer,
    open_dat,
    write_dat,
    write_index,
)
from bigload.runtime.offload.offloaded_weights_loader import OffloadedWeightsLoader


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: StrPath, index: MutableMapping[str, Entry] | None = None
) -> MutableMapping[str, Entry] | None:
    """Write `weight` into `offload_folder` as `weight_name`, enter its form in `index` if given, and return that.

    Raises:
        AbsentWeightError: the tensor has no values.
        OptionError: it has no form that a `.dat` file has, or the name cannot be a file's.
        WriteError: the system refused to write.
    """
    entry = checked_entry(weight_name, weight)
    write_dat(Path(offload_folder), weight_name, [weight])
    if index is not None:
        index[weight_name] = entry
    return index


def load_offloaded_weight(weight_file: StrPath, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Return the tensor in `weight_file`, whose entry in the index is `weight_info`, in memory of its own.

    Raises:
        InvalidCheckpointError: no such dtype or shape, or the file has another size.
        ReadError: the file cannot be read.
    """
    with open_dat(Path(weight_file), weight_info) as (file, form):
        dtype, num_bytes = torch_dtype(form.dtype), form.num_bytes
        assert dtype is not None, "numpy and torch call it the same"
        if not num_bytes:
            return torch.empty(form.shape, dtype=dtype, device="cpu")
        memory = allocate(num_bytes)
        file.read_into([memoryview(memory)[:num_bytes]], 0)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(dtype).view(form.shape)


def save_offload_index(index: Mapping[str, Entry] | None, offload_folder: StrPath) -> None:
    """Add `index` to the `index.json` of `offload_folder`; nothing is done without entries.

    Raises:
        InvalidCheckpointError: there is one that is none.
        WriteError: the system refused to write.
    """
    if index:
        folder = Path(offload_folder)
        write_index(folder, {**index_of(folder), **index})


def offload_state_dict(save_dir: StrPath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Bring the folder `save_dir` to hold the tensors of `state_dict`; it is made where there is none.

    What it holds already, by name, form and digest, is not written again, and other names in it stay. Tensors that are
    one in memory are one file with several names. Of a tensor on the meta device nothing is known but its shape: it
    has to be in the folder.

    Raises:
        AbsentWeightError: a tensor on the meta device is not in the folder.
        OptionError: see `offload_weight`.
        WriteError: the system refused to write. The folder then has no index, or the one from before.
    """
    offloaded(save_dir, state_dict)


def offloaded(
    save_dir: StrPath, state_dict: Mapping[str, torch.Tensor], in_memory: Mapping[str, torch.Tensor] | None = None
) -> OffloadedWeightsLoader:
    """Do what `offload_state_dict` does, and return what gives the weights in the folder and those `in_memory`.

    That is opened before another writer has its turn, so it never gives weights of others.
    """
    with offload_writer(save_dir) as writer:
        first: dict[object, str] = {}
        for name, tensor in state_dict.items():
            if not isinstance(tensor, torch.Tensor):
                found = type(tensor).__name__
                raise OptionError(
                    f"cannot write an offload folder: {name} is no tensor but a {found}",
                    hint="leave it out of the state dict",
                )
            if tensor.is_meta:
                writer.keep(name, tensor.shape)
            elif (same := first.setdefault(_memory(name, tensor), name)) != name and isinstance(state_dict, dict):
                writer.link(name, same)  # only a dict holds its tensors, so that equal addresses are one memory
            else:
                writer.add(name, tensor)
        writer.finish()
        return OffloadedWeightsLoader(state_dict=in_memory, save_folder=save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return what of `state_dict` belongs to modules in `submodule_names`, or bears such a name; `""` is all of it.

    In the order of the modules. Names that only begin alike are no part of each other: `layers.1` and `layers.10`.

    >>> extract_submodules_state_dict({"a.1.w": 0, "a.10.w": 1, "b": 2}, ["b", "a.1"])
    {'b': 2, 'a.1.w': 0}
    """
    found: dict[str, list[str]] = {name: [] for name in submodule_names}
    for key in state_dict:
        for prefix in prefixes(key):
            if prefix in found:
                found[prefix].append(key)
    return {key: state_dict[key] for keys in found.values() for key in keys}


def _memory(name: str, tensor: torch.Tensor) -> object:
    """Return what tensors have in common that are one in memory, down to their shape."""
    if not tensor.numel() or tensor.layout is not torch.strided or not data_address(tensor):
        return name
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags
