"""Questions about plans that `bigload plan` answers instead of showing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import typer

from bigload.planning.policy_registry import POLICIES
from bigload_cli.failures import AnswerIsNoError
from bigload_cli.output import AnswerForm, print_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bigload.checkpoint.model import Checkpoint
    from bigload.plain_text import PlainTable
    from bigload.planning.budget.budget import MemoryBudget
    from bigload.planning.options import PlanOptions


class PlanQuestion(NamedTuple):
    """At most one of the questions."""

    explain: str | None = None
    compare: str | None = None
    fits: bool = False
    gpus: str | None = None
    max_context: bool = False

    @property
    def asked(self) -> list[str]:
        """The options that ask."""
        given = [name for name, value in self._asdict().items() if value is not None and value is not False]
        return [f"--{name.replace('_', '-')}" for name in given]

    @property
    def needs_no_budget(self) -> bool:
        """Whether the answer is about memory that one would need, not about memory that there is."""
        return self.fits or self.gpus is not None

    def check(self, *, writes: bool, fail_if: bool) -> None:
        """Raise if options contradict each other."""
        if len(self.asked) > 1:
            raise typer.BadParameter(f"{' and '.join(self.asked)} are two questions; ask one at a time")
        if self.asked and (writes or fail_if):
            other = "--fail-if" if fail_if else "-o or --html"
            raise typer.BadParameter(f"{self.asked[0]} answers a question and makes no plan; leave out {other}")


class PlanAnswer(NamedTuple):
    """An answer in its three forms: for people, for scripts that want one value, and for programs."""

    shown: Sequence[str | PlainTable]
    value: str
    document: dict[str, object]

    def print(self, form: AnswerForm) -> None:
        """Print the form that was asked for."""
        print_answer(form, lambda: self.document, self.value, lambda: self.shown)


def answer(
    question: PlanQuestion,
    checkpoint: Checkpoint,
    budget: MemoryBudget | None,
    options: PlanOptions,
) -> PlanAnswer:
    """Find the answer."""
    if budget is None:
        return _about_need(question, checkpoint, options)
    return _about_budget(question, checkpoint, budget, options)


def _about_need(question: PlanQuestion, checkpoint: Checkpoint, options: PlanOptions) -> PlanAnswer:
    """Answer what memory a model would need."""
    from bigload.planning.model.structure import read_structure
    from bigload.planning.questions import sizing
    from bigload_cli.options import size_option
    from bigload_cli.views import questions as view

    if question.gpus is None:
        least = sizing.fits(read_structure(checkpoint, options), options)
        return PlanAnswer(
            shown=view.least_memory(least),
            value=" ".join(str(row.gpu_bytes) for row in least.least),
            document=view.of_least_memory(least, checkpoint.path, options.workload),
        )
    size = size_option("--gpus", question.gpus)
    needs = sizing.gpus(read_structure(checkpoint, options), options, size)
    if needs.without_offload is None and not needs.with_ram:
        raise AnswerIsNoError("; ".join(view.gpu_needs(needs)))
    return PlanAnswer(
        shown=view.gpu_needs(needs),
        value="none" if needs.without_offload is None else str(needs.without_offload),
        document=view.of_gpu_needs(needs, checkpoint.path, options.workload),
    )


def _about_budget(
    question: PlanQuestion, checkpoint: Checkpoint, budget: MemoryBudget, options: PlanOptions
) -> PlanAnswer:
    """Answer what a plan for this memory does, and why."""
    from bigload.planning.model.structure import read_structure
    from bigload.planning.planner import plan_details
    from bigload.planning.questions.compare import compare
    from bigload.planning.questions.explain import explain
    from bigload.planning.questions.max_context import max_context
    from bigload_cli.views import questions as view

    if question.explain is not None:
        why = explain(plan_details(checkpoint, budget, options), question.explain)
        return PlanAnswer(
            shown=view.explanation(why),
            value=" ".join(str(home.device) for home in why.homes) or "none",
            document=view.of_explanation(why, checkpoint.path),
        )
    structure = read_structure(checkpoint, options)
    if question.compare is not None:
        outcomes = compare(structure, budget, options, _policies(question.compare))
        return PlanAnswer(
            shown=[view.comparison(outcomes)],
            value="\n".join(outcome.policy for outcome in outcomes if outcome.fits),
            document=view.of_comparison(outcomes, checkpoint.path),
        )
    longest = max_context(structure, budget, options)
    return PlanAnswer(
        shown=view.longest_context(longest),
        value="unlimited" if longest.unslowed_tokens is None else str(longest.unslowed_tokens),
        document=view.of_longest_context(longest, checkpoint.path),
    )


def _policies(text: str) -> list[str]:
    """Return the policies of a list such as `sequential,balanced`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in POLICIES]
    if unknown or not words:
        raise typer.BadParameter(
            f"--compare {text}: no policy {', '.join(unknown) or 'named'}; known are {', '.join(POLICIES)}"
        )
    return words
