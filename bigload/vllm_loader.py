"""vLLM's load format `bigload`: each rank reads its part of an ordinary checkpoint by bigload's engine.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Names and fusions are those of
`--layout vllm`, so models, versions and refusals are the same.

    vllm serve CHECKPOINT --load-format bigload --tensor-parallel-size 4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigload.checkpoint.model import Checkpoint, StoredTensor
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion
from bigload.errors import OptionError, StateDictMismatchError
from bigload.layouts.kinds.vllm_shards import VllmModel
from bigload.loading.load import load_selected
from bigload.loading.selection import select
from bigload.units import MIB, format_size

if TYPE_CHECKING:
    import torch
    from torch import nn

LOAD_FORMAT = "bigload"
_BATCH_BYTES = 256 * MIB
"""How much is in memory at once beside the model's own tensors, or one tensor that is larger."""


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

    if get_pp_group().world_size > 1:
        raise OptionError.of("pipeline_parallel_size", get_pp_group().world_size, f"1 with load_format={LOAD_FORMAT!r}")
    ranks, version = get_tp_group(), ".".join(__version__.split(".")[:2])
    divided = VllmModel.of(checkpoint, tp=ranks.world_size, version=version)
    made = Conversion(tensors=divided.tensors(ranks.rank_in_group)).of(checkpoint)
    state = ShardedStateLoader._filter_subtensors(model.state_dict())
    for scale in divided.scales():  # 1.0 already
        state.pop(scale, None)
    _check(type(model).__name__, state, made, padded=divided.vocabulary)
    view = CheckpointView(checkpoint=checkpoint, tensors=made)
    with torch.no_grad():
        for names in _batches(made.values()):
            selection = select(view, only=names, device={name: state[name].device for name in names})
            for name, value in load_selected(checkpoint, selection).items():
                target = state[name]
                target[: len(value)].copy_(value)
                target[len(value) :].zero_()  # padding of the vocabulary
    num_bytes = format_size(sum(tensor.num_bytes for tensor in made.values()))
    init_logger("vllm.bigload").info(  # below vLLM's own, whose messages it shows
        "rank %d of %d: %s of %s", ranks.rank_in_group, ranks.world_size, num_bytes, checkpoint.name
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


def _batches(tensors: Iterable[StoredTensor]) -> Iterator[list[str]]:
    """Yield names of tensors of at most `_BATCH_BYTES` together, a larger one by itself."""
    names: list[str] = []
    held = 0
    for tensor in tensors:
        if names and held + tensor.num_bytes > _BATCH_BYTES:
            yield names
            names, held = [], 0
        names.append(tensor.name)
        held += tensor.num_bytes
    if names:
        yield names
