"""Prompts of a model: a text or messages, one or a file of them, and how many tokens there is room for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bigload.errors import OptionError
from bigload.units import counted

DEFAULT_CONTEXT = 4096
"""Tokens of a prompt and its answer together, where neither the plan nor the user says more."""


class ChatMessage(NamedTuple):
    """One message of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class Prompt(NamedTuple):
    """A question: `text` or `messages`.

    Attributes:
        text: The words of a user, or what a base model is to continue.
        messages: A conversation, which only a chat template can turn into tokens.
        label: The JSON value `id` of a line of a file, `None` without one.
        line: Its number in the file, `None` where it comes from elsewhere.
    """

    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    label: object = None
    line: int | None = None

    @property
    def where(self) -> str:
        """Name the prompt in an error."""
        return "the prompt" if self.line is None else f"the prompt in line {self.line}"


def read_prompts(lines: Iterable[str], *, source: str) -> list[Prompt]:
    """Return the prompts in JSON lines such as `{"id": 1, "prompt": "..."}` or `{"messages": [...]}`.

    Empty lines are passed over, and keys that are not known. All lines that are no prompts are named at once.
    """
    found, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_prompt(json.loads(line), number))
            except (ValueError, RecursionError) as error:
                problems.append((number, str(error)))
    if problems:
        number, reason = problems[0]
        others = [f"line {other} is none: {why}" for other, why in problems[1:]]
        raise OptionError(
            f"line {number} of {source} is no prompt: {reason}",
            details=others,
            hint='a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    if not found:
        raise OptionError(f"{source} has no prompts", hint='a line of it is {"prompt": "..."}')
    return found


def chosen_context(asked: int | None, *, planned: int, trained: int | None) -> int:
    """Return the tokens of a prompt and its answer together, as asked for.

    By default as many as the plan leaves room for; where it has 0, for weights alone, `DEFAULT_CONTEXT`, or what the
    model was trained for if that is less.
    """
    if asked is None:
        return planned or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
    if planned and asked > planned:
        raise OptionError(
            f"--context {asked}: the plan leaves room for {counted(planned, 'token')}",
            hint=f"make another with bigload plan --context {asked}",
        )
    if trained is not None and asked > trained:
        raise OptionError(
            f"--context {asked}: the config says that the model was made for {counted(trained, 'token')}",
            hint=f"ask for {trained} or less",
        )
    return asked


def room_for_answer(
    prompt_tokens: int, *, wanted: int | None, context: int, longest: int | None = None, where: str = "the prompt"
) -> int:
    """Return how many tokens an answer can have: `wanted`, or all that the context leaves.

    `longest` is the longest context that can be asked for, where that is known.
    """
    room = context - prompt_tokens
    if room < (wanted or 1):
        answer = "" if wanted is None else f" and its answer {wanted}"
        raise OptionError(
            f"{where} has {counted(prompt_tokens, 'token')}{answer}; the context is {context}",
            hint=_shorter(prompt_tokens + (wanted or 1), longest, is_bounded=wanted is not None),
        )
    return room if wanted is None else wanted


def _shorter(needed: int, longest: int | None, *, is_bounded: bool) -> str:
    """Return what makes `needed` tokens fit."""
    less = "shorten the prompt" + (", or lower --max-new-tokens" if is_bounded else "")
    if longest is None or needed <= longest:
        return f"--context {needed} or more; or {less}"
    return f"{less}; plan and model allow a context of {longest} at most"


def _prompt(found: object, line: int) -> Prompt:
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise ValueError('expected an object with either "prompt" or "messages"')
    label, text = found.get("id"), found.get("prompt")
    if "prompt" not in found:
        return Prompt(messages=_messages(found["messages"]), label=label, line=line)
    if not isinstance(text, str) or not text:
        raise ValueError(f'"prompt" is {text!r:.60}, expected a text')
    return Prompt(text=text, label=label, line=line)


def _messages(found: object) -> tuple[ChatMessage, ...]:
    if not isinstance(found, list) or not found:
        raise ValueError(f'"messages" is {found!r:.60}, expected a list of them')
    for each in found:
        words = (each.get("role"), each.get("content")) if isinstance(each, Mapping) else (None,)
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f'a message is {each!r:.60}, expected an object with a text as "role" and as "content"')
    return tuple(ChatMessage(role=each["role"], content=each["content"]) for each in found)
