"""A transform: from the tensors that are to be written to others, as a value; it moves no byte."""

from __future__ import annotations

from typing import Protocol

from bigload.layouts.tensors_to_write import TensorsToWrite


class Transform(Protocol):
    """What happens to tensors on their way; a frozen value whose text names it in reports and in the manifest."""

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return what is to be written in place of `found`; names, shapes and dtypes are known from here on."""
        ...
