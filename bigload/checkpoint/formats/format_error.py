"""Errors inside a header reader, which knows no path; the reader raises them again as bigload's own."""

from __future__ import annotations


class FormatError(Exception):
    """A file breaks its format, or holds what is not read: a stable `code` and one sentence, as in a `Problem`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class LegacyFileError(Exception):
    """The file is a bare pickle, as torch before 1.6 wrote them: valid, but its parts cannot be read by themselves."""
