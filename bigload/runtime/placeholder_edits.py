"""In-place edits of placeholders: those have no values, so what was done to them would be lost without a word."""

from __future__ import annotations

from torch import Tensor

from bigload.errors import OffloadedEditError


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor` was edited in place, 0 where torch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


class PlaceholderEdits:
    """Placeholders of one hook, by their names in the module, as they were when it put them there.

    A placeholder that somebody has replaced since is noted anew when it is seen. Copies begin without any.
    """

    def __init__(self) -> None:
        self._noted: dict[str, tuple[Tensor, int]] = {}

    def __reduce__(self) -> tuple[type[PlaceholderEdits], tuple[()]]:
        return PlaceholderEdits, ()

    def note(self, name: str, placeholder: Tensor) -> None:
        """Take `placeholder` as it is now for untouched."""
        self._noted[name] = placeholder, version_of(placeholder)

    def is_edited(self, name: str, placeholder: Tensor) -> bool:
        """Return whether `placeholder` was edited in place since it was noted."""
        noted, version = self._noted.get(name, (None, 0))
        if noted is not placeholder:
            self.note(name, placeholder)
            return False
        return version_of(placeholder) != version

    def check(self, name: str, placeholder: Tensor, *, prefix: str) -> None:
        """Raise if `placeholder` was edited.

        Raises:
            OffloadedEditError: it was; `prefix` is what comes before `name` in the model.
        """
        if self.is_edited(name, placeholder):
            raise OffloadedEditError([f"{prefix}{name}"], by="an edit in place")
