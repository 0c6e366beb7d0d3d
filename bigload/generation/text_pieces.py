"""Tokens to text, piece by piece: what is shown so far is the beginning of the whole, in whole characters."""

from __future__ import annotations

from collections.abc import Callable

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders show in place of the first bytes of a character of which others are still to come."""


class TextPieces:
    """The text of an answer while its tokens come, which `decode` turns into text.

    How a token reads can depend on its neighbours (blanks between words, bytes of a character), so a piece is what the
    last few tokens read with the new one, less what they read without it. The end compares all with the whole.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.text = ""
        self._decode = decode
        self._tokens: list[int] = []
        self._first = self._shown = 0
        """The tokens that are decoded again for a new one, and those whose text has been returned."""

    def add(self, token: int) -> str:
        """Return the text that `token` completes; none while a character is incomplete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._first : self._shown])
        now = self._decode(self._tokens[self._first :])
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._first, self._shown = self._shown, len(self._tokens)
        self.text += now[len(before) :]
        return now[len(before) :]

    def end(self) -> str:
        """Return what is left of the whole text."""
        whole = self._decode(self._tokens)
        left = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += left
        return left
