"""`bigload plan`: placement of a checkpoint's modules on devices."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigload.planning.choices import Attention, Balance, Experts, NameScheme, Order, Policy
from bigload.planning.policy_registry import POLICIES
from bigload_cli.commands import parallel_plans, predictions, questions
from bigload_cli.failures import AnswerIsNoError, named_as_options
from bigload_cli.options import (
    CheckpointArgument,
    ColorMode,
    ColorOption,
    JsonOption,
    MaxMemoryOption,
    PpOption,
    QuietOption,
    TpOption,
    TpRulesOption,
)

if TYPE_CHECKING:
    from bigload.planning.budget.budget import MemoryBudget
    from bigload.planning.plan import Plan
    from bigload.planning.planner import PlanDetails
    from bigload.planning.timing.predict import Prediction

EPILOG = """\b
Examples:
  bigload plan ./llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m cpu=64GiB -o plan.json
  bigload plan ./llama-70b -m auto --context 8192 --explain layers.37
  bigload plan ./llama-70b -m 0=22GiB,1=22GiB,cpu=128GiB --no-disk --html plan.html
  bigload plan ./llama-70b --fits --context 8192
  bigload plan x.gguf -m 0=22GiB,cpu=64GiB --emit llama.cpp | xargs llama-server -m x.gguf
  bigload plan ./llama-70b -m 0=80GiB,cpu=256GiB --profile h100
  bigload plan ./llama-70b -m 0=80GiB,1=80GiB --context 131072 --fit --fail-if offload
  bigload plan ./llama-70b -m 0=80GiB,1=80GiB --context 65536 --target 8tok/s --profile a100
  bigload plan ./deepseek-v3 --tp 8 --pp 2 --hosts 2 -m 80GiB --context 131072 -o plan.json

\b
-q prints the name of the file that -o or --html wrote; without one the bytes
of weights on each device, as cuda:0=20930740224,cpu=66749005824.
"""


class Emit(StrEnum):
    """Other programs whose arguments `--emit` prints."""

    LLAMA_CPP = "llama.cpp"


class FailIf(StrEnum):
    """Conditions of `--fail-if`."""

    DISK = "disk"
    OFFLOAD = "offload"


class Offload(StrEnum):
    """Values of `--offload`: the part on the card at a time, as in diffusers' `enable_*_offload`."""

    MODEL = "model"
    SEQUENTIAL = "sequential"
    GROUP = "group"


def plan(
    ctx: typer.Context,
    path: CheckpointArgument,
    max_memory: MaxMemoryOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan file; - is stdout.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with a picture, in which to ask what if."),
    ] = None,
    emit: Annotated[
        Emit | None,
        typer.Option("--emit", help="Print only the arguments that have llama.cpp place tensors as the plan does."),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", metavar="TOKENS", help="Leave room for a KV cache of so many tokens.")
    ] = 0,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences that are run together.")] = 1,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", metavar="DTYPE", help="Of the KV cache: fp8.")] = None,
    attention: Annotated[
        Attention | None,
        typer.Option(
            "--attention",
            help="Count eager attention or a fused kernel. Default: what transformers runs for the model.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Load weights as bf16, fp16 or fp32; or what if: fp8-block, fp8-channel, int8, int4-g128.",
        ),
    ] = None,
    overhead: Annotated[
        str | None,
        typer.Option("--overhead", metavar="SIZE", help="Taken on every GPU besides. Default: 0.5GiB on CUDA."),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar=f"<{'|'.join(POLICIES)}>", help="How devices are filled.")
    ] = Policy.OPTIMAL,
    offload: Annotated[
        Offload | None,
        typer.Option(
            "--offload", help="Keep weights off GPUs; one model, one block or a window of two comes at a time."
        ),
    ] = None,
    balance: Annotated[
        Balance, typer.Option("--balance", help="Share what fits among GPUs, or fill the first ones.")
    ] = Balance.SPREAD,
    order: Annotated[Order, typer.Option("--order", help="Use GPUs as named, or in any order.")] = Order.KEEP,
    experts: Annotated[
        Experts, typer.Option("--experts", help="Place routed experts with their block, or apart.")
    ] = Experts.AUTO,
    expert_stats: Annotated[
        Path | None,
        typer.Option(
            "--expert-stats",
            metavar="FILE",
            help="Keep the experts resident that bigload run --experts found most used.",
        ),
    ] = None,
    lora: Annotated[
        list[Path] | None,
        typer.Option("--lora", metavar="DIR", help="Count a LoRA adapter of PEFT beside the model. Repeat for more."),
    ] = None,
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Keep room for a second streamed module, to arrive meanwhile.")
    ] = False,
    no_split: Annotated[
        list[str] | None,
        typer.Option("--no-split", metavar="PATTERN", help="Modules to keep whole, not the blocks: 'model.layers.*'."),
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="Place layers that only predict further tokens, too.")] = False,
    names: Annotated[
        NameScheme, typer.Option("--names", help="Whose module names the device map speaks.")
    ] = NameScheme.CHECKPOINT,
    disk_bandwidth: Annotated[
        str | None,
        typer.Option("--disk-bandwidth", metavar="SIZE", help="Bytes per second from disk. Default: 3GiB."),
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        typer.Option("--link-bandwidth", metavar="SIZE", help="Bytes per second from RAM to a GPU. Default: 24GiB."),
    ] = None,
    tp: TpOption = None,
    tp_rules: TpRulesOption = None,
    pp: PpOption = None,
    hosts: parallel_plans.HostsOption = None,
    gpu_bandwidth: parallel_plans.GpuBandwidthOption = None,
    host_bandwidth: parallel_plans.HostBandwidthOption = None,
    profile: predictions.ProfileOption = None,
    measure: predictions.MeasureOption = False,
    fit: predictions.FitOption = False,
    target: predictions.TargetOption = None,
    min_context: predictions.MinContextOption = None,
    use_disk: Annotated[
        bool, typer.Option("--disk/--no-disk", help="Let what finds no room stay on disk. Bound it by -m disk=SIZE.")
    ] = True,
    fail_if: Annotated[
        FailIf | None, typer.Option("--fail-if", help="Exit with 3 if weights are on disk, or anywhere but on GPUs.")
    ] = None,
    explain: questions.ExplainOption = None,
    compare: questions.CompareOption = None,
    fits: questions.FitsOption = False,
    gpus: questions.GpusOption = None,
    max_context: questions.MaxContextOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Decide which device holds which module.

    Works from the names and sizes in the headers alone: no model code, no torch, no weights. With --tp, --pp or
    --hosts: which rank holds which part, one GPU of -m SIZE each.
    """
    from bigload.errors import OptionError
    from bigload.planning.options import options_of
    from bigload.planning.planner import plan_details
    from bigload_cli.output import open_shown, say_warnings

    is_for_ranks = parallel_plans.asked(ctx)
    if offload is not None:
        policy, prefetch, no_split = _offload(offload, policy, prefetch=prefetch, no_split=no_split)
    options = options_of(
        policy=policy,
        context=context,
        batch=batch,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        overhead=overhead,
        **{} if disk_bandwidth is None else {"disk_bandwidth": disk_bandwidth},
        **{} if link_bandwidth is None else {"link_bandwidth": link_bandwidth},
        balance=balance,
        order=order,
        experts=experts,
        prefetch=prefetch,
        no_split=no_split or (),
        mtp=mtp,
        names=names,
        expert_stats=expert_stats,
        lora=lora or (),
    )
    asked = questions.PlanQuestion(explain=explain, compare=compare, fits=fits, gpus=gpus, max_context=max_context)
    asked.check(writes=out is not None or html is not None, fail_if=fail_if is not None)
    if is_for_ranks:
        parallel_plans.run(
            path,
            max_memory,
            options,
            asked,
            tp=tp,
            pp=pp,
            hosts=hosts,
            tp_rules=tp_rules,
            gpu_bandwidth=gpu_bandwidth,
            host_bandwidth=host_bandwidth,
            out=out,
            as_json=as_json,
            quiet=quiet,
            color=color,
        )
        return
    budget = None if asked.needs_no_budget else _budget(max_memory, use_disk=use_disk)
    if offload is not None and budget is not None and not budget.accelerators:
        raise OptionError(f"--offload {offload} without a GPU", hint="name one to bring weights to: -m cuda:0=8GiB")
    checkpoint = open_shown(path, quiet=quiet or as_json)
    say_warnings(checkpoint)
    if asked.asked:
        questions.answer(asked, checkpoint, budget, options, as_json=as_json, quiet=quiet, color=color)
        return
    assert budget is not None, "a plan has one"
    machine = predictions.predictor(
        path,
        profile,
        measure=measure,
        disk_bandwidth=None if disk_bandwidth is None else options.bandwidth.disk,
        link_bandwidth=None if link_bandwidth is None else options.bandwidth.link,
        quiet=quiet or as_json,
    )
    if fit or target is not None:
        made = predictions.plan_that_does(
            checkpoint,
            budget,
            options,
            machine,
            target=None if target is None else predictions.tokens_per_second(target),
            check=partial(_check, tier=fail_if),
            least_context=min_context,
        )
    else:
        made = plan_details(checkpoint, budget, options)
        _check(made, fail_if)
    if emit is not None:
        from bigload.planning.llama_cpp import llama_cpp_arguments
        from bigload_cli.output import print_text

        if out is not None:
            from bigload.planning.plan_file import write_plan

            write_plan(made.plan, out)
        with named_as_options({}):
            text = llama_cpp_arguments(made.plan, checkpoint)
        print_text(text)
        return
    prediction = None if machine is None else machine.of(made.plan, made.structure)
    _deliver(made, prediction, machine, out, html, as_json=as_json, quiet=quiet, color=color)


def _offload(
    offload: Offload, policy: str, *, prefetch: bool, no_split: list[str] | None
) -> tuple[str, bool, list[str] | None]:
    """Return the policy, whether two units are in flight, and what stays whole."""
    from bigload.errors import OptionError

    contradicting = {"--policy": policy != Policy.OPTIMAL, "--prefetch": prefetch, "--no-split": bool(no_split)}
    if given := [name for name, is_given in contradicting.items() if is_given]:
        raise OptionError(
            f"--offload {offload} decides {' and '.join(given)} itself", hint="leave out one or the other"
        )
    whole = ["*"] if offload is Offload.MODEL else None  # modules of the first level: the components of a pipeline
    return Policy.STREAMED, offload is Offload.GROUP, whole


def _budget(max_memory: list[str] | None, *, use_disk: bool) -> MemoryBudget:
    from bigload.errors import OptionError
    from bigload.planning.budget import budget

    if not max_memory:
        raise OptionError(
            "no memory limits", hint="add them, for example: -m cuda:0=22GiB -m cpu=64GiB, or -m auto for this machine"
        )
    return budget.MemoryBudget.parse(max_memory, use_disk=use_disk)


def _deliver(
    made: PlanDetails,
    prediction: Prediction | None,
    machine: predictions.Predictor | None,
    out: Path | None,
    html: Path | None,
    *,
    as_json: bool,
    quiet: bool,
    color: ColorMode,
) -> None:
    """Write the files that were asked for, show the plan, and say what comes next."""
    from bigload.documents import is_stream
    from bigload_cli.output import print_text, say
    from bigload_cli.result_files import answers_on_stdout, is_stdout, say_written, write_result

    # --json and `-o -` are the same document, but for the prediction: a plan file says nothing about machines.
    on_stdout = answers_on_stdout((out, html), as_json=as_json and not is_stdout(out))
    if out is not None:
        from bigload.planning.plan_file import plan_to_json, write_plan

        if is_stdout(out):
            write_result(out, plan_to_json(made.plan))
        else:
            write_plan(made.plan, out)
    if html is not None:
        from bigload_cli.views.plan_page.html_report import write_report

        profile = machine.counted if machine is not None and prediction is not None else None
        write_report(made, html, plan_file=None if is_stdout(out) else out, prediction=prediction, profile=profile)
    if quiet and not as_json and not on_stdout:
        print_text(str(out or html or _weights_by_device(made.plan)))
    elif not on_stdout:
        show(made.plan, prediction, as_json=as_json, quiet=False, color=color)
    if quiet:
        return
    say_written([path for path in (html, out) if path is not None])
    if out is not None and not on_stdout and not is_stream(out):
        from bigload_cli.views.text import next_command

        say(next_command(made.plan, out))


def _weights_by_device(plan: Plan) -> str:
    """Return the bytes of weights on each device in the form of -m: `cuda:0=5242880,cpu=8388608,disk=1048576`."""
    return ",".join(f"{use.device}={use.weights_bytes}" for use in plan.used_devices)


def show(made: Plan, prediction: Prediction | None = None, *, as_json: bool, quiet: bool, color: ColorMode) -> None:
    """Print a plan in the form that was asked for."""
    from bigload_cli import output

    if as_json:
        from bigload.planning.plan_file import plan_document
        from bigload_cli.views.prediction import of_prediction

        found = None if prediction is None else of_prediction(prediction)
        output.print_json({**plan_document(made), "prediction": found})
    elif quiet:
        output.print_text(str(made.total_bytes))
    else:
        from bigload.planning.plan import closing_lines, device_table, headline

        output.print_text(headline(made) + "\n")
        output.print_table(device_table(made, blocks=output.can_draw_on_stdout()), color=color)
        output.print_text("\n".join(["", *closing_lines(made, None if prediction is None else str(prediction))]))


def _check(made: PlanDetails, tier: FailIf | None) -> None:
    if tier is None:
        return
    from bigload.units import format_size

    offloaded = {str(use.device): use.weights_bytes for use in made.plan.devices if not use.device.is_accelerator}
    if tier is FailIf.DISK:
        offloaded = {device: size for device, size in offloaded.items() if device == "disk"}
    found = {device: size for device, size in offloaded.items() if size}
    if found:
        words = ", ".join(f"{format_size(size)} on {device}" for device, size in found.items())
        raise AnswerIsNoError(f"--fail-if {tier}: the plan puts {words}")
