"""`bigload plan --tp --pp --hosts`: plans for ranks, and questions about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from bigload.errors import OptionError
from bigload_cli.commands.questions import PlanAnswer, PlanQuestion
from bigload_cli.options import is_given, size_option
from bigload_cli.output import AnswerForm, open_shown, say_warnings
from bigload_cli.plan_answers import deliver

if TYPE_CHECKING:
    from bigload.checkpoint.model import Checkpoint
    from bigload.planning.model_parallel.parallel_planner import ParallelRequest
    from bigload.planning.options import PlanOptions


_ASKS = frozenset(("tp", "tp_rules", "pp", "hosts", "gpu_bandwidth", "host_bandwidth"))
_TAKEN = _ASKS | {
    *("path", "max_memory", "out", "context", "batch", "kv_dtype", "attention", "dtype", "overhead", "mtp"),
    *("explain", "fits", "max_context", "as_json", "quiet", "color"),
}


def asked(ctx: typer.Context) -> bool:
    """Return whether the options given ask for a plan for ranks."""
    given = [name for name in ctx.params if is_given(ctx, name)]
    if not _ASKS.intersection(given):
        return False
    options = {param.name: param.opts[0] for param in ctx.command.params}
    if others := [str(options[name]) for name in given if name not in _TAKEN]:
        asks = [str(options[name]) for name in given if name in _ASKS]
        verb = "is" if len(others) == 1 else "are"
        raise OptionError(
            f"{', '.join(others)} {verb} for plans of one machine; {asks[0]} asks for ranks",
            hint="leave out one or the other",
        )
    return True


def run(given: Mapping[str, Any], options: PlanOptions, question: PlanQuestion, form: AnswerForm) -> None:
    """Plan for ranks by the parameters of the command that are `given`; show the plan, or answer `question`."""
    from bigload.planning.model_parallel.parallel_planner import ParallelRequest, plan_parallel
    from bigload.planning.model_parallel.rank_grid import GPU_BANDWIDTH, HOST_BANDWIDTH, Links, RankGrid
    from bigload.planning.tensor_parallel.rules import read_tp_rules

    rules, gpu, host = map(given.get, ("tp_rules", "gpu_bandwidth", "host_bandwidth"))
    request = ParallelRequest(
        grid=RankGrid(**{name: given.get(name, 1) for name in ("tp", "pp", "hosts")}),
        options=options,
        tp_rules={} if rules is None else read_tp_rules(rules),
        links=Links(
            gpu=GPU_BANDWIDTH if gpu is None else size_option("--gpu-bandwidth", gpu),
            host=HOST_BANDWIDTH if host is None else size_option("--host-bandwidth", host),
        ),
    )
    limits = given.get("max_memory")
    gpu_bytes = None if question.needs_no_budget and not limits else _gpu_bytes(limits)
    checkpoint = open_shown(given["path"], quiet=not form.is_for_people)
    say_warnings(checkpoint)
    if question.asked:
        _answer(question, checkpoint, gpu_bytes, request).print(form)
        return
    assert gpu_bytes is not None, "a plan has a limit"
    made = plan_parallel(checkpoint, gpu_bytes, request)
    deliver(made, form, out=given.get("out"), value=str(max(use.used_bytes for use in made.ranks)))


def _gpu_bytes(max_memory: list[str] | None) -> int:
    """Return the limit of each GPU, which are alike."""
    hint = "one size for every GPU, for example: -m 80GiB"
    if not max_memory:
        raise OptionError("no memory limit", hint=hint)
    if len(max_memory) > 1 or "=" in max_memory[0] or "," in max_memory[0]:
        raise OptionError.of("--max-memory", ",".join(max_memory), "one size, as GPUs of ranks are alike", hint=hint)
    return size_option("--max-memory", max_memory[0])


def _answer(
    question: PlanQuestion, checkpoint: Checkpoint, gpu_bytes: int | None, request: ParallelRequest
) -> PlanAnswer:
    from bigload.planning.model_parallel import parallel_questions
    from bigload.planning.model_parallel.parallel_plan import what_fits
    from bigload.planning.model_parallel.parallel_planner import plan_parallel
    from bigload_cli.views import parallel_plans as view
    from bigload_cli.views.questions import longest_context, of_longest_context

    if question.fits:
        # With a limit it is also asked whether that does: a plan says so, or raises.
        fitting = [] if gpu_bytes is None else [what_fits(plan_parallel(checkpoint, gpu_bytes, request))]
        least = parallel_questions.least_memory(checkpoint, request)
        return PlanAnswer(
            shown=[*fitting, *view.least_memory(least)],
            value=str(least.asked.gpu_bytes),
            document=view.of_least_memory(least, checkpoint.path, request.options.workload),
        )
    assert gpu_bytes is not None, "these questions have a limit"
    if question.explain is not None:
        why = parallel_questions.explain_rank(checkpoint, gpu_bytes, request, question.explain)
        return PlanAnswer(
            shown=view.explanation(why),
            value=" ".join(map(str, why.ranks)) or "none",
            document=view.of_explanation(why, checkpoint.path),
        )
    longest = parallel_questions.largest_context(checkpoint, gpu_bytes, request)
    return PlanAnswer(
        shown=longest_context(longest),
        value="unlimited" if longest.most_tokens is None else str(longest.most_tokens),
        document=of_longest_context(longest, checkpoint.path),
    )
