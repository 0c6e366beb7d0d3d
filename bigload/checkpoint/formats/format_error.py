"""What the parts of a reader say to each other when a file is wrong; it never leaves `bigload.checkpoint`."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - the reader that knows the file's name turns it into an error
    """A file will not be read: a stable `code` and one sentence, as a `Problem` has them."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class LegacyFile(Exception):  # noqa: N818 - no fault of the file
    """The file is a bare pickle, as torch before 1.6 wrote them."""
