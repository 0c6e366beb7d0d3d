"""Answers of a loaded model as they come: text, lines of JSON, a conversation. Only answers go to stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from bigload.checkpoint.model import Checkpoint
from bigload.errors import OptionError
from bigload.generation.folder_tokenizer import FolderTokenizer
from bigload.generation.planned_model import PlannedModel, stats_of
from bigload.generation.prompts import ChatMessage, Prompt, room_for_answer
from bigload.generation.report import Answer, Finish, RunReport, answer_document
from bigload.generation.text_generator import Sampling, TextGenerator
from bigload.machine.memory.process_memory import MemorySampler
from bigload.planning.plan import Plan
from bigload.runtime.streaming.run_log import RunStats
from bigload.units import counted, format_size
from bigload_cli.chat import stopped_by_ctrl_c, typed_lines
from bigload_cli.failures import INTERRUPTED, StoppedError
from bigload_cli.options import ColorMode
from bigload_cli.output import can_draw, print_piece, say, say_table, status_line


class Question(NamedTuple):
    """A prompt in tokens, and how many its answer can have."""

    tokens: list[int]
    max_new_tokens: int
    label: object = None


class AnswerWishes(NamedTuple):
    """Options of `bigload run` that are about answers, by the names of the command line.

    `prompts` are those known before; `as_lines` makes each answer a line of JSON; `measures` asks for statistics.
    """

    prompts: Sequence[Prompt]
    is_chat: bool
    as_lines: bool
    random_tokens: int | None
    repeat: int
    system: str | None
    is_raw: bool
    temperature: float | None
    top_p: float | None
    seed: int | None
    context: int
    longest_context: int | None
    max_new_tokens: int | None
    prefetch_bytes: int | None
    resident_bytes: int | None
    measures: bool
    as_json: bool
    stats: bool
    quiet: bool
    color: ColorMode

    @property
    def is_brief(self) -> bool:
        """Whether the model answers once."""
        return not self.is_chat and max(len(self.prompts), self.repeat) == 1

    def tokenizer(self, planned: PlannedModel) -> FolderTokenizer | None:
        """Return the tokenizer, which random tokens need not."""
        if self.random_tokens is not None:
            return None
        tokenizer = FolderTokenizer.of(
            planned.checkpoint,
            asked_by="run",
            vocabulary=planned.maker.vocabulary,
            placeholders=planned.maker.placeholders,
            is_raw=self.is_raw,
            system=self.system,
        )
        if self.is_chat:
            tokenizer.check_template("a conversation")
        return tokenizer

    def question(self, prompt: Prompt, tokenizer: FolderTokenizer, *, max_new_tokens: int | None) -> Question:
        """Return a prompt in tokens."""
        tokens = tokenizer.tokens_of(prompt)
        if not tokens:
            raise OptionError(f"{prompt.where} has no tokens")
        room = room_for_answer(
            len(tokens),
            wanted=max_new_tokens,
            context=self.context,
            longest=self.longest_context,
            where=prompt.where,
        )
        return Question(tokens=tokens, max_new_tokens=room, label=prompt.label)


@dataclass(slots=True, kw_only=True)
class Answering:
    """A model that answers one prompt after another; `tokenizer` is `None` for random ones.

    `load_seconds` are those from the empty model to the dispatched one.
    """

    wishes: AnswerWishes
    planned: PlannedModel
    tokenizer: FolderTokenizer | None
    questions: Sequence[Question]
    answers: list[Answer] = field(default_factory=list)
    model: nn.Module = field(init=False)
    generator: TextGenerator = field(init=False)
    load_seconds: float = 0.0

    @classmethod
    def of(cls, checkpoint: Checkpoint, plan: Plan | None, wishes: AnswerWishes) -> Answering:
        """Check everything that can be checked before weights are loaded."""
        planned = PlannedModel.open(
            checkpoint,
            plan,
            asked_by="run",
            keeps_cache=True,
            prefetch_bytes=wishes.prefetch_bytes,
            resident_bytes=wishes.resident_bytes,
        )
        tokenizer = wishes.tokenizer(planned)
        questions: list[Question] = []
        if tokenizer is not None:
            planned.maker.check_generates()
            wanted = wishes.max_new_tokens
            questions = [wishes.question(each, tokenizer, max_new_tokens=wanted) for each in wishes.prompts]
            if (kinds := list(planned.maker.placeholders.values())) and not wishes.quiet:
                name = planned.maker.model_class.__name__
                say(f"note: {name} takes {' and '.join(kinds)} input too; this is text alone")
        return cls(wishes=wishes, planned=planned, tokenizer=tokenizer, questions=questions)

    @property
    def first_prompt_tokens(self) -> int | None:
        """Length of the first prompt; `None` in a conversation, before it begins."""
        return self.wishes.random_tokens or (len(self.questions[0].tokens) if self.questions else None)

    def run(self) -> RunReport:
        """Load the model and have it answer."""
        with ExitStack() as sampled:
            memory = sampled.enter_context(MemorySampler()) if self.wishes.measures else None
            try:
                self._load()
                self._answer_all()
            except KeyboardInterrupt:
                raise StoppedError(INTERRUPTED, self._what_is_answered()) from None
        return self._report(None if memory is None else memory.peak.private_bytes)

    @property
    def stats(self) -> RunStats | None:
        """Statistics of streaming so far; `None` where nothing streams."""
        return stats_of(self.model)

    def _answer_all(self) -> None:
        if self.wishes.random_tokens is not None:
            self._time_random(self.wishes.random_tokens, self.wishes.max_new_tokens or 1)
        elif self.wishes.is_chat and self.tokenizer is not None:
            self._chat(self.tokenizer)
        elif self.wishes.as_lines:
            self._answer_lines()
        else:
            self._answer_text(self.questions[0])

    def _what_is_answered(self) -> str:
        if not self.load_seconds:
            return "the model was not loaded yet"
        if self.wishes.as_lines:
            return f"{len(self.answers)} of {len(self.questions)} prompts are answered"
        return "the conversation has ended" if self.wishes.is_chat else "the answer is not complete"

    def _load(self) -> None:
        with self._status(is_shown=sys.stderr.isatty()) as status:
            status(f"loading {format_size(self.planned.checkpoint.stored_bytes)}")
            empty = self.planned.empty()
            began = time.perf_counter()
            self.model = self.planned.dispatched(empty, is_brief=self.wishes.is_brief)
            self.load_seconds = time.perf_counter() - began
        wishes = self.wishes
        self.generator = TextGenerator(
            self.planned,
            self.model,
            sampling=Sampling(temperature=wishes.temperature, top_p=wishes.top_p, seed=wishes.seed),
            decode=None if self.tokenizer is None else self.tokenizer.decode,
            keeps_cache=wishes.is_chat,
            measures=wishes.measures,
        )

    def _report(self, peak_bytes: int | None) -> RunReport:
        planned, stats = self.planned, self.stats
        return RunReport(
            path=planned.checkpoint.path,
            model_class=planned.maker.model_class.__name__,
            total_bytes=planned.checkpoint.total_bytes,
            disk_bytes=sum(planned.checkpoint.tensors[name].num_bytes for name in planned.on_disk),
            num_threads=torch.get_num_threads(),
            device=str(planned.device),
            context=self.wishes.context,
            seed=self.generator.seed,
            load_seconds=self.load_seconds,
            peak_private_bytes=peak_bytes,
            answers=tuple(self.answers),
            whole_experts=() if stats is None else stats.whole_experts,
        )

    def _status(self, *, is_shown: bool = True) -> AbstractContextManager[Callable[[str], None]]:
        return status_line(quiet=self.wishes.quiet or not is_shown)

    def _answer_text(self, question: Question, *, is_stopped: Callable[[], bool] = lambda: False) -> Answer:
        """Answer a prompt; its text is printed as it comes, and ends in a line feed."""
        last = "\n"

        def show(piece: str) -> None:
            nonlocal last
            waiting.close()
            if not self.wishes.as_json:
                last = piece
                print_piece(piece)

        with ExitStack() as waiting:
            status = waiting.enter_context(self._status(is_shown=sys.stderr.isatty()))
            status("reading the prompt")
            try:
                answer = self._answer(question, on_text=show, is_stopped=is_stopped)
            finally:
                if not last.endswith("\n"):
                    print_piece("\n")
        if answer.finish is Finish.LENGTH and not self.wishes.quiet:
            count = len(answer.tokens)
            why = "--max-new-tokens" if count == self.wishes.max_new_tokens else "the context is full"
            say(f"note: the answer is cut off after {counted(count, 'token')} ({why})")
        return answer

    def _answer_lines(self) -> None:
        """Answer prompts by a line of JSON each."""
        with self._status() as status:
            for number, question in enumerate(self.questions, start=1):
                status(f"prompt {number} of {len(self.questions)}")
                answer = self._answer(question)
                if not self.wishes.as_json:
                    document = answer_document(answer)
                    print_piece(json.dumps(document, ensure_ascii=not can_draw(sys.stdout)) + "\n")

    def _time_random(self, count: int, max_new_tokens: int) -> None:
        """Time a prompt of `count` random tokens and its answer; a model that generates none runs forward."""
        tokens = self.planned.random_tokens(count)
        with self._status() as status:
            for number in range(self.wishes.repeat):
                status(f"run {number + 1} of {self.wishes.repeat}")
                if self.planned.maker.generates:
                    self._answer(Question(tokens=tokens, max_new_tokens=max_new_tokens))
                else:
                    self.answers.append(self.generator.forward(count))

    def _chat(self, tokenizer: FolderTokenizer) -> None:
        """Answer line by line; each prompt is the conversation so far."""
        said: tuple[ChatMessage, ...] = ()
        for line in typed_lines():
            if line.strip() == "/clear":
                said = ()
                continue
            now = (*said, ChatMessage(role="user", content=line))
            with stopped_by_ctrl_c() as is_stopped:
                try:
                    question = self.wishes.question(Prompt(messages=now), tokenizer, max_new_tokens=None)
                except OptionError as error:
                    hints = filter(None, (error.hint, "/clear forgets the conversation"))
                    say(f"error: {error.message}\nhint: {'; '.join(hints)}")
                    continue
                room = min(question.max_new_tokens, self.wishes.max_new_tokens or question.max_new_tokens)
                answer = self._answer_text(question._replace(max_new_tokens=room), is_stopped=is_stopped)
            said = (*now, ChatMessage(role="assistant", content=answer.text))
            if self.wishes.stats:
                from bigload_cli.views.run import steps

                say_table(steps([answer]), color=self.wishes.color)

    def _answer(
        self,
        question: Question,
        *,
        on_text: Callable[[str], object] = lambda _text: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        answer = self.generator.answer(
            question.tokens,
            max_new_tokens=question.max_new_tokens,
            on_text=on_text,
            is_stopped=is_stopped,
            label=question.label,
        )
        self.answers.append(answer)
        return answer
