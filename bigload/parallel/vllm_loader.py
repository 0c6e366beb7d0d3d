"""vLLM's load format `bigload`: each rank reads its part of an ordinary checkpoint by bigload's engine.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Names and fusions are those of
`--layout vllm`, so models, versions and refusals are the same.

    vllm serve CHECKPOINT --load-format bigload --tensor-parallel-size 4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigload.checkpoint.model import AssembledTensor, Checkpoint, StoredTensor
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.conversion import Conversion
from bigload.distributed.host_share import HostShare
from bigload.errors import OptionError, StateDictMismatchError
from bigload.layouts.kinds.vllm_shards import VllmModel
from bigload.loading.settings import settings
from bigload.units import format_size

if TYPE_CHECKING:
    import torch
    from torch import nn

LOAD_FORMAT = "bigload"


@cache  # vLLM may call it again, and warns of a format that is registered twice
def register() -> None:
    """Make `load_format="bigload"` known to the vLLM of this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class BigloadModelLoader(BaseModelLoader):  # type: ignore[misc] # without types where vLLM is not installed
        def download_model(self, model_config: Any) -> None:  # noqa: ANN401 - vLLM's
            """Do nothing: each rank reads its bytes from where the checkpoint is."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:  # noqa: ANN401 - vLLM's
            load_weights(model, _checkpoint_of(model_config))


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill `model`, which vLLM made for this process' rank, from the files of `checkpoint`.

    Bytes are read into the model's own memory, and cast on the way to the dtype that it has.

    Raises:
        OptionError: this version of vLLM is not known, or models are divided in other ways than by tensors.
        PartitionError: the checkpoint is of no known family, or its tensors are others, or do not divide.
        StateDictMismatchError: vLLM's model has other tensors than expected. Nothing was read.
        ReadError: a file could not be read to the end, or changed meanwhile.
    """
    import torch
    from vllm import __version__
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    from bigload.loading.scheduling.piece_copies import whole_spec
    from bigload.parallel.sharded_loading.local_model import check_parts
    from bigload.parallel.sharded_loading.local_reads import fill_local
    from bigload.parallel.sharded_loading.local_tensors import LocalPart, local_tensors

    if get_pp_group().world_size > 1:
        raise OptionError.of("pipeline_parallel_size", get_pp_group().world_size, f"1 with load_format={LOAD_FORMAT!r}")
    ranks, version = get_tp_group(), ".".join(__version__.split(".")[:2])
    divided = VllmModel.of(checkpoint, tp=ranks.world_size, version=version)
    pieces = divided.tensors(ranks.rank_in_group)
    made = Conversion(tensors=pieces).of(checkpoint)
    state = ShardedStateLoader._filter_subtensors(model.state_dict())
    for scale in divided.scales():  # 1.0 already
        state.pop(scale, None)
    _check(type(model).__name__, state, made, padded=divided.vocabulary)
    parts = []
    for name, tensor in made.items():
        whole, target = AssembledTensor.of(tensor), state[name].detach()
        rows = target[: whole.shape[0]]
        target[len(rows) :].zero_()  # padding of the vocabulary
        is_shared = any(divided.is_shared(source) for source in pieces[name].sources)
        parts.append(
            LocalPart(
                stored=whole,
                spec=whole_spec(whole.shape),
                dtype=rows.dtype,
                device=rows.device,
                existing=rows,
                is_shared=is_shared,
            )
        )
    check_parts(parts)
    loaded = local_tensors(checkpoint.name, checkpoint.path, parts)
    # Ranks of one tensor are expected on one host, as vLLM advises; on several, each has fewer threads than it could.
    alone = HostShare.of_process_alone()
    share = HostShare(processes=ranks.world_size, cores=alone.cores / ranks.world_size)
    _, read_bytes = fill_local(checkpoint, settings()._replace(share=share), loaded)
    with torch.no_grad():
        for each in loaded:
            if each.part.existing is not None and not each.part.is_in_place:
                each.part.existing.copy_(each.tensor)
    init_logger("vllm.bigload").info(  # below vLLM's own, whose messages it shows
        "rank %d of %d has read %s of %s",
        ranks.rank_in_group,
        ranks.world_size,
        format_size(read_bytes),
        format_size(sum(tensor.num_bytes for tensor in checkpoint.tensors.values())),
    )


def _checkpoint_of(model_config: Any) -> Checkpoint:  # noqa: ANN401 - vLLM's
    where = str(model_config.model_weights or model_config.model)
    is_on_the_hub = "://" not in where and not Path(where).exists()
    return open_checkpoint(f"{where}@{model_config.revision}" if is_on_the_hub and model_config.revision else where)


def _check(
    model: str, state: Mapping[str, torch.Tensor], made: Mapping[str, StoredTensor], *, padded: Iterable[str]
) -> None:
    """Raise StateDictMismatchError unless `made` fills `state`; those in `padded` may have fewer rows."""
    misshapen = []
    for name in made.keys() & state.keys():
        found, expected = tuple(made[name].torch_shape), tuple(state[name].shape)
        if name in padded and found[0] < expected[0]:
            expected = (found[0], *expected[1:])
        if found != expected:
            misshapen.append(f"{name} {list(found)}, expected {list(expected)}")
    missing, unexpected = sorted(state.keys() - made.keys()), sorted(made.keys() - state.keys())
    if missing or unexpected or misshapen:
        hint = "let vLLM load it itself: leave --load-format out; nothing was assigned"
        raise StateDictMismatchError(
            f"vLLM's {model}", missing=missing, unexpected=unexpected, misshapen=sorted(misshapen), hint=hint
        )
