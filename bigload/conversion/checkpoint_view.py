"""The tensors of a checkpoint under the names of whoever wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from bigload.checkpoint.model import Checkpoint, StoredTensor, TensorInfo
from bigload.conversion.conversion import Conversion

if TYPE_CHECKING:
    from torch import nn


class CheckpointView(NamedTuple):
    """The tensors of `checkpoint` as it stores them; or, with a `conversion`, those of a model that they make.

    Where the files of `checkpoint` hold parts of tensors, `tensors` has the whole ones.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, StoredTensor]
    conversion: Conversion | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointView:
        return cls(checkpoint=checkpoint, tensors=checkpoint.stored)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that the tensor `name` is made of."""
        return (name,) if self.conversion is None else self.conversion.tensors[name].sources

    def stored(self, name: str) -> TensorInfo | None:
        """Return the stored tensor that the tensor `name` is; `None` if it is made of several, or a part of one."""
        stored, tensor = self.checkpoint.tensors[self.sources(name)[0]], self.tensors[name]
        return stored if replace(stored, name=name) == tensor else None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Stored tensors that the model has no place for, as far as its conversion tells."""
        return () if self.conversion is None else self.conversion.unexpected

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why tensors of the model cannot be made, a sentence each."""
        return () if self.conversion is None else self.conversion.problems


def view_for(
    model: nn.Module, checkpoint: Checkpoint | CheckpointView, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> CheckpointView:
    """Return the tensors of `checkpoint` under the names of `model`; as stored, if it is none of transformers.

    `shapes` are those of whole tensors of which `model` has a part.
    """
    from bigload.conversion.with_transformers.models import conversion_for, is_of_transformers

    stored = checkpoint if isinstance(checkpoint, CheckpointView) else CheckpointView.of(checkpoint)
    if not is_of_transformers(model):
        return stored
    conversion = conversion_for(model, stored.tensors, shapes)
    return stored._replace(tensors=conversion.made_of(stored.tensors), conversion=conversion)
