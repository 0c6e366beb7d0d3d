"""Tokenizer of a GGUF file as the files that transformers keeps beside a model, made by transformers' own reader."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from bigload.errors import install_command
from bigload.extras import installed_version, release_of

_LEAST_TRANSFORMERS = (5, 23)
"""Older ones split words into other tokens: those of Llama 3 and Tekken, which ignore merges, and of SentencePiece."""


class TokenizerUnreadError(Exception):
    """There are no files for the tokenizer; the text says why."""


def tokenizer_files(gguf: Path) -> dict[str, bytes]:
    """Return tokenizer.json and what belongs to it, by name, for the tokenizer in the local file `gguf`.

    Raises:
        TokenizerUnreadError: transformers is not installed, is one that misreads tokenizers, or does not read it.
    """
    missing = next((package for package in ("transformers", "gguf") if find_spec(package) is None), None)
    if missing is not None:
        raise TokenizerUnreadError(f"{missing} is not installed ({install_command('gguf')})")
    version = installed_version("transformers") or ""
    if release_of(version) < _LEAST_TRANSFORMERS:
        least = ".".join(map(str, _LEAST_TRANSFORMERS))
        raise TokenizerUnreadError(f"transformers {version} reads other tokens from some files, {least} does not")
    with TemporaryDirectory() as folder:
        link, out = Path(folder, "model.gguf"), Path(folder, "out")
        link.symlink_to(gguf.absolute())  # alone: transformers would prefer what lies beside it, code included
        try:
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(
                folder, gguf_file=link.name, local_files_only=True, trust_remote_code=False
            )
            found.save_pretrained(out)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise TokenizerUnreadError(
                f"transformers does not read it: {type(error).__name__}: {reason:.300}"
            ) from error
        return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}
