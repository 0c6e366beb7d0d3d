"""Plans of either kind as answers: shown, written to a file, and followed by the command that carries them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.documents import is_stream
from bigload_cli.output import AnswerForm, can_draw_on_stdout, print_answer, say
from bigload_cli.result_files import answers_on_stdout, is_stdout, say_written, write_result

if TYPE_CHECKING:
    from bigload.planning.plan import PlannedCheckpoint
    from bigload.planning.timing.predict import Prediction


def show(
    made: PlannedCheckpoint,
    form: AnswerForm,
    *,
    prediction: Prediction | None = None,
    value: str | None = None,
) -> None:
    """Print a plan; a script gets `value`, or the bytes of the checkpoint."""
    times = None if prediction is None else str(prediction)
    print_answer(
        form,
        lambda: made.document() | ({} if prediction is None else {"prediction": prediction.document()}),
        value or str(made.total_bytes),
        lambda: made.shown(blocks=can_draw_on_stdout(), times=times),
    )


def deliver(
    made: PlannedCheckpoint,
    form: AnswerForm,
    *,
    out: Path | None,
    html: Path | None = None,
    write_page: Callable[[Path], None] | None = None,
    value: str,
    prediction: Prediction | None = None,
) -> None:
    """Write the files that were asked for, show the plan, and say what comes next."""
    # --json and `-o -` are the same document, but for the prediction: a plan file says nothing about machines.
    on_stdout = answers_on_stdout((out, html), as_json=form.as_json and not is_stdout(out))
    if out is not None:
        from bigload.planning.plan_file import plan_to_json, write_plan

        if is_stdout(out):
            write_result(out, plan_to_json(made))
        else:
            write_plan(made, out)
    if html is not None and write_page is not None:
        write_page(html)
    if not on_stdout:
        show(made, form, prediction=prediction, value=str(out or html or value))
    if form.quiet:
        return
    say_written([path for path in (html, out) if path is not None])
    if out is not None and not on_stdout and not is_stream(out):
        from bigload_cli.views.text import next_command

        say(next_command(made, out))
