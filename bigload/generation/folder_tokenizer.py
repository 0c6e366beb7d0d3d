"""The tokenizer and chat template in a model's folder, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from bigload.checkpoint.model import Checkpoint
from bigload.errors import OptionError
from bigload.extras import require
from bigload.generation.prompts import ChatMessage, Prompt
from bigload.units import counted

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""One of them is in a folder with a tokenizer; without any, transformers makes an empty tokenizer up."""

_NO_TEXT = "--random-tokens 128 runs the model without text"


class FolderTokenizer(NamedTuple):
    """A tokenizer of transformers for a folder, which errors name.

    Attributes:
        vocabulary: The number of tokens that the model takes, `None` if unknown: tokenizers can have more.
        placeholders: Tokens that stand for an image or other input that is no text, and which.
        is_raw: Whether texts go to the model as they are, although the folder has a chat template.
        system: What conversations begin with.
    """

    tokenizer: Any
    name: str
    vocabulary: int | None = None
    placeholders: Mapping[int, str] = MappingProxyType({})
    is_raw: bool = False
    system: str | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        asked_by: str,
        vocabulary: int | None = None,
        placeholders: Mapping[int, str] = MappingProxyType({}),
        is_raw: bool = False,
        system: str | None = None,
    ) -> FolderTokenizer:
        """Read the tokenizer beside the weights. Code in the folder is never executed."""
        for package in ("transformers", "tokenizers"):
            require(package, asked_by=asked_by, extra="run")
        if not any((checkpoint.root / name).is_file() for name in _FILES):
            raise OptionError(
                f"{checkpoint.path} has no tokenizer", details=[f"none of {', '.join(_FILES)}"], hint=_NO_TEXT
            )
        try:
            tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(
                checkpoint.root, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever the libraries raise for files that they cannot read
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OptionError(
                f"transformers cannot read the tokenizer of {checkpoint.path}: {reason}", hint=_NO_TEXT
            ) from error
        read = cls(tokenizer, checkpoint.path, vocabulary, placeholders, is_raw=is_raw, system=system)
        if system is not None:
            read.check_template("a system message")
        return read

    @property
    def has_template(self) -> bool:
        """Whether the folder has a chat template, and is to be asked by it."""
        return not self.is_raw and bool(self.tokenizer.chat_template)

    def check_template(self, what: str) -> None:
        """Raise OptionError unless there is a chat template, which `what` needs."""
        if not self.has_template:
            reason = "--raw leaves it out" if self.is_raw else f"{self.name} has none: it continues text"
            raise OptionError(f"{what} needs a chat template; {reason}", hint="give the text with -p")

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt: by the chat template, or those of its text alone."""
        tokens = self._tokens_of(prompt)
        if self.vocabulary is not None and (unknown := max(tokens, default=0)) >= self.vocabulary:
            raise OptionError(
                f"{prompt.where} has token {unknown}, {self.tokenizer.convert_ids_to_tokens(unknown)!r:.60}; "
                f"the model takes {counted(self.vocabulary, 'token')}, its tokenizer has {len(self.tokenizer)}",
                hint=f"put the tokenizer of this model into {self.name}, or leave that token out of the prompt",
            )
        if (placeholder := next((token for token in tokens if token in self.placeholders), None)) is not None:
            kind, name = self.placeholders[placeholder], self.tokenizer.convert_ids_to_tokens(placeholder)
            raise OptionError(
                f"{prompt.where} has token {placeholder}, {name!r:.60}, in whose place the model takes {kind} input; "
                "only text is given here",
                hint="leave it out for an answer to the text alone, or give the model its input in a program of "
                "transformers, placed by bigload.load_and_dispatch",
            )
        return tokens

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if prompt.messages:
            self.check_template(prompt.where)
        if not self.has_template:
            ids: list[int] = self.tokenizer(prompt.text)["input_ids"]
            return ids
        messages = prompt.messages or (ChatMessage(role="user", content=prompt.text or ""),)
        if self.system is not None and messages[0].role != "system":
            messages = (ChatMessage(role="system", content=self.system), *messages)
        try:
            ids = self.tokenizer.apply_chat_template(
                [{"role": each.role, "content": each.content} for each in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # of jinja2, and whatever a template raises by itself
            raise OptionError(
                f"the chat template of {self.name} refuses {prompt.where}: {error}",
                hint="--raw gives the model the text as it is",
            ) from error
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, less the special ones."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
