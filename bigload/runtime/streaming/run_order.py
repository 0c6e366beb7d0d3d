"""The order in which blocks run: guessed from a list, corrected by what is seen, going round."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

BlockT = TypeVar("BlockT", bound=Hashable)


class _LastTwo(threading.local, Generic[BlockT]):
    """The last two blocks that ran in each thread."""

    blocks: tuple[BlockT | None, BlockT | None] = (None, None)


class RunOrder(Generic[BlockT]):
    """Tells which blocks come next, from the last two that ran.

    What followed these two the last time is expected to follow again, else what followed the last one, else the next
    of the first guess, whose end is followed by its beginning: a loop of decoding runs the model again and again. So a
    block that runs several times in a pass, an encoder that runs once and a pass that ends early each cost one wrong
    guess at most. May be used from several threads: each has a place of its own, and all learn together.
    """

    def __init__(self, guess: Sequence[BlockT]) -> None:
        self._after: dict[BlockT, BlockT] = dict(zip(guess, [*guess[1:], *guess[:1]], strict=True))
        self._after_two: dict[tuple[BlockT, BlockT], BlockT] = {}
        self._here: _LastTwo[BlockT] = _LastTwo()

    def entered(self, block: BlockT) -> None:
        """Note that `block` runs now, in this thread."""
        before, last = self._here.blocks
        if last is not None:
            self._after[last] = block
            if before is not None:
                self._after_two[before, last] = block
        self._here.blocks = last, block

    def forward_aborted(self) -> None:
        """Note that the pass of this thread ended in an error: what it runs next does not follow from it."""
        self._here.blocks = None, None

    def ahead(self) -> Iterator[BlockT]:
        """Yield what this thread is expected to run next, without end where blocks go round."""
        before, last = self._here.blocks
        while last is not None:
            following = self._after_two.get((before, last)) if before is not None else None
            following = following if following is not None else self._after.get(last)
            if following is None:
                return
            yield following
            before, last = last, following
