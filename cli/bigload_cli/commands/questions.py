"""Questions about plans that `bigload plan` answers instead of showing one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bigload.checkpoint.model import Checkpoint
    from bigload.planning.budget import MemoryBudget
    from bigload.planning.options import PlanOptions
    from bigload_cli.options import ColorMode

ExplainOption = Annotated[
    str | None, typer.Option("--explain", metavar="MODULE", help="Say why a module is where it is.")
]
CompareOption = Annotated[
    str | None, typer.Option("--compare", metavar="POLICIES", help="One line for each: sequential,balanced.")
]
FitsOption = Annotated[bool, typer.Option("--fits", help="Least memory of 1, 2, 4 and 8 GPUs that hold everything.")]
GpusOption = Annotated[str | None, typer.Option("--gpus", metavar="SIZE", help="How many GPUs of that size it takes.")]
MaxContextOption = Annotated[bool, typer.Option("--max-context", help="The largest context that the memory holds.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """At most one of the questions."""

    explain: str | None = None
    compare: str | None = None
    fits: bool = False
    gpus: str | None = None
    max_context: bool = False

    @classmethod
    def of(
        cls, *, explain: str | None, compare: str | None, fits: bool, gpus: str | None, max_context: bool
    ) -> Question:
        """Return the question that was asked."""
        return cls(explain=explain, compare=compare, fits=fits, gpus=gpus, max_context=max_context)

    @property
    def asked(self) -> list[str]:
        """The options that ask."""
        named = {
            "--explain": self.explain is not None,
            "--compare": self.compare is not None,
            "--fits": self.fits,
            "--gpus": self.gpus is not None,
            "--max-context": self.max_context,
        }
        return [name for name, is_asked in named.items() if is_asked]

    @property
    def is_any(self) -> bool:
        """Whether anything is asked."""
        return bool(self.asked)

    @property
    def needs_no_budget(self) -> bool:
        """Whether the answer is about memory that one would need, not about memory that there is."""
        return self.fits or self.gpus is not None

    def check(self, *, writes: bool, fail_if: bool) -> None:
        """Raise if options contradict each other.

        Raises:
            typer.BadParameter: two questions, or a question beside what only a plan can do.
        """
        if len(self.asked) > 1:
            raise typer.BadParameter(f"{' and '.join(self.asked)} are two questions; ask one at a time")
        if self.asked and (writes or fail_if):
            other = "--fail-if" if fail_if else "-o or --html"
            raise typer.BadParameter(f"{self.asked[0]} answers a question and makes no plan; leave out {other}")


def answer(
    question: Question,
    checkpoint: Checkpoint,
    budget: MemoryBudget | None,
    options: PlanOptions,
    *,
    as_json: bool,
    quiet: bool,
    color: ColorMode,
) -> None:
    """Print the answer."""
