"""Check that ranks that load together have the same arguments, and the same tensors on each mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bigload.distributed.host_share import HostShare, describe_host, share_of
from bigload.distributed.process_group import ProcessGroup
from bigload.errors import OptionError

_Mesh = str
"""The ranks of a mesh and its shape, as JSON."""

_Form = str
"""The whole shape of a tensor, its dtype and its placements."""


def check_agreement(group: ProcessGroup, arguments: Mapping[str, object], model: nn.Module) -> HostShare:
    """Compare, in all ranks of `group`, the `arguments` of each and the `DTensor`s that it shares with others.

    Returns the share of its host that this rank has among them.

    Every rank of a mesh has to have the same tensors on it. What is on no mesh, or on another one, may differ: ranks
    can hold different stages of a model.

    Raises:
        OptionError: (in all ranks) two of them disagree; about which argument or tensor, and what they say.
    """
    if group.size == 1:
        return HostShare.of_process_alone()
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
    return share_of(group.rank, [theirs["host"] for theirs in gathered])


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
                    meshes[on] = json.dumps([on.mesh.flatten().tolist(), list(on.shape)])
                form = f"{list(tensor.shape)} {tensor.dtype} {tensor.placements}"
                forms.setdefault(meshes[on], {})[name] = form
    return forms
