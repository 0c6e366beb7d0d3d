"""The tensors of a checkpoint as they are to be written: stored ones, and what is assembled or computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from bigload.checkpoint.model import AssembledTensor, Checkpoint, TensorInfo
from bigload.conversion.computed_tensor import ComputedTensor, Operand, form_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsToWrite:
    """The tensors of a checkpoint as they are to be written.

    Attributes:
        checkpoint: The checkpoint with the tensors and the config to write in place of its own. Spans of those in
            `sources` are empty.
        sources: What those are made of that are no stored tensor: pieces of some, or what is computed from some.
        is_changed: Names, forms or values differ from the stored ones.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, AssembledTensor | ComputedTensor] = field(default_factory=dict)
    documents: Mapping[str, bytes] = field(default_factory=dict)
    is_changed: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def stored_in(cls, checkpoint: Checkpoint, *, notes: tuple[str, ...] = ()) -> Self:
        return cls(checkpoint=checkpoint, sources=checkpoint.assembled, notes=notes)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        tensors: Iterable[Operand],
        *,
        documents: Mapping[str, bytes] | None = None,
        notes: Iterable[str] = (),
    ) -> Self:
        """Return `tensors` in place of those of `checkpoint`."""
        tensors = list(tensors)
        return cls(
            checkpoint=replace(checkpoint, tensors={each.name: form_of(each) for each in tensors}, assembled={}),
            sources={tensor.name: tensor for tensor in tensors if not isinstance(tensor, TensorInfo)},
            documents=documents or {},
            is_changed=True,
            notes=tuple(notes),
        )

    @property
    def tensors(self) -> Mapping[str, Operand]:
        """All of them by name, with what they are made of."""
        return {**self.checkpoint.tensors, **self.sources}

    def with_tensors(self, tensors: Iterable[Operand], *, notes: Iterable[str] = ()) -> Self:
        """Return `tensors` in place of these, and further notes, each once."""
        noted = dict.fromkeys([*self.notes, *notes])
        return self.of(self.checkpoint, tensors, documents=self.documents, notes=noted)
