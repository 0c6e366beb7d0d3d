"""Check that ranks that load together have the same arguments, and the same tensors on each mesh.

What they tell each other for it also says which of them hold the same elements on one host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from bigload.distributed.host_share import HostShare, describe_host, share_of
from bigload.distributed.process_group import ProcessGroup
from bigload.errors import OptionError

_Mesh = str
"""The ranks of a mesh and its shape, as JSON."""

_Form = str
"""The whole shape of a tensor, its dtype and its placements."""


_AreShared = Callable[[DeviceMesh, Sequence[Placement]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeers:
    """The ranks that load on this host.

    `are_shared` tells whether another one holds the same elements of tensors with these placements on a mesh.
    """

    share: HostShare
    are_shared: _AreShared

    @classmethod
    def of_process_alone(cls) -> HostPeers:
        """Return the peers of a process that has none."""
        return cls(share=HostShare.of_process_alone(), are_shared=lambda *_: False)


def check_agreement(group: ProcessGroup, arguments: Mapping[str, object], model: nn.Module) -> HostPeers:
    """Compare, in all ranks of `group`, the `arguments` of each and the `DTensor`s that it shares with others.

    Returns the ranks of its host.

    Every rank of a mesh has to have the same tensors on it. What is on no mesh, or on another one, may differ: ranks
    can hold different stages of a model.
    """
    if group.size == 1:
        return HostPeers.of_process_alone()
    forms = _forms(model)
    digests = {mesh: sha256(repr(sorted(tensors.items())).encode()).hexdigest() for mesh, tensors in forms.items()}
    gathered: list[dict[str, Any]] = group.all_gather(
        {"arguments": dict(arguments), "digests": digests, "host": describe_host(group.rank, group.size)}
    )
    for name, value in gathered[0]["arguments"].items():
        for rank, theirs in enumerate(gathered):
            if theirs["arguments"][name] != value:
                found = f"it is {value!r:.40} in rank 0 and {theirs['arguments'][name]!r:.40} in rank {rank}"
                raise OptionError.of(name, arguments[name], f"the same in all ranks: {found}")
    for mesh in sorted({mesh for theirs in gathered for mesh in theirs["digests"]}):
        ranks, _ = json.loads(mesh)
        if len({gathered[rank]["digests"].get(mesh) for rank in ranks}) > 1:
            everybody = group.all_gather(forms.get(mesh, {}))
            _raise_difference({rank: everybody[rank] for rank in ranks})
    share = share_of(group.rank, [theirs["host"] for theirs in gathered])
    return HostPeers(share=share, are_shared=_are_shared(group.rank, gathered))


def _are_shared(own: int, gathered: Sequence[Mapping[str, Any]]) -> _AreShared:
    """Return `HostPeers.are_shared` for rank `own`.

    Meshes of other ranks with equal tensors count as replicas: of tensor parallelism, each replica has its own mesh.
    """
    host = gathered[own]["host"]["host"]
    here = {rank: theirs["digests"] for rank, theirs in enumerate(gathered) if theirs["host"]["host"] == host}

    @cache
    def are_shared(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return False
        place = tuple(
            slice(None) if isinstance(each, Replicate) else at for each, at in zip(placements, coordinate, strict=True)
        )
        digest = here[own][_key(mesh)]
        equal = {each for digests in here.values() for each, its in digests.items() if its == digest}
        alike = [(ranks, shape) for ranks, shape in map(json.loads, equal) if shape == list(mesh.shape)]
        holders = {rank for ranks, shape in alike for rank in torch.tensor(ranks).view(shape)[place].flatten().tolist()}
        return len(holders & here.keys()) > 1

    return are_shared


def _raise_difference(members: Mapping[int, Mapping[str, _Form]]) -> NoReturn:
    first = min(members)
    rank = next(rank for rank, tensors in members.items() if tensors != members[first])
    names = sorted(members[first].keys() | members[rank].keys())
    name = next(name for name in names if members[first].get(name) != members[rank].get(name))
    here, there = (members[each].get(name, "not there") for each in (first, rank))
    expected = f"the same in all ranks of its mesh: it is {here} in rank {first} and {there} in rank {rank}"
    raise OptionError.of(f"{name} of the model", here, expected)


def _forms(model: nn.Module) -> dict[_Mesh, dict[str, _Form]]:
    """Return the `DTensor`s of `model` on each mesh, by name."""
    forms: dict[_Mesh, dict[str, _Form]] = {}
    meshes: dict[DeviceMesh, _Mesh] = {}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                on = tensor.device_mesh
                if on not in meshes:
                    meshes[on] = _key(on)
                form = f"{list(tensor.shape)} {tensor.dtype} {tensor.placements}"
                forms.setdefault(meshes[on], {})[name] = form
    return forms


def _key(mesh: DeviceMesh) -> _Mesh:
    return json.dumps([mesh.mesh.flatten().tolist(), list(mesh.shape)])
