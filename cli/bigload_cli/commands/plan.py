"""`bigload plan`: placement of a checkpoint's modules on devices."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bigload.errors import OptionError
from bigload.planning.choices import Attention, Balance, Experts, NameScheme, Order, Policy
from bigload.planning.policy_registry import POLICIES
from bigload_cli.commands import parallel_plans, predictions, questions
from bigload_cli.failures import AnswerIsNoError, named_as_options
from bigload_cli.options import (
    CHECKPOINT,
    COLOR,
    JSON,
    MAX_MEMORY,
    PP,
    QUIET,
    TP,
    TP_RULES,
    ColorMode,
    is_given,
    option,
)
from bigload_cli.output import AnswerForm, open_shown, print_text, say, say_warnings
from bigload_cli.plan_answers import deliver
from bigload_cli.result_files import is_stdout

if TYPE_CHECKING:
    from bigload.machine.profiles.machine_profile import MachineProfile
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
    path: str = CHECKPOINT,
    max_memory: list[str] | None = MAX_MEMORY,
    out: Path | None = option(None, "--out -o", "FILE", "Write the plan file; - is stdout."),
    html: Path | None = option(None, "--html", "FILE", "Write a page with a picture, in which to ask what if."),
    emit: Emit | None = option(
        None, "--emit", "Print only the arguments that have llama.cpp place tensors as the plan does."
    ),
    context: int = option(0, "--context", "TOKENS", "Leave room for a KV cache of so many tokens."),
    batch: int = option(1, "--batch", "N", "Sequences that are run together."),
    kv_dtype: str | None = option(None, "--kv-dtype", "DTYPE", "Of the KV cache: fp8."),
    attention: Attention | None = option(
        None, "--attention", "Count eager attention or a fused kernel. Default: what transformers runs for the model."
    ),
    dtype: str | None = option(
        None,
        "--dtype",
        "DTYPE",
        "Load weights as bf16, fp16 or fp32; or what if: fp8-block, fp8-channel, int8, int4-g128.",
    ),
    overhead: str | None = option(None, "--overhead", "SIZE", "Taken on every GPU besides. Default: 0.5GiB on CUDA."),
    policy: str = option(Policy.OPTIMAL, "--policy", f"<{'|'.join(POLICIES)}>", "How devices are filled."),
    offload: Offload | None = option(
        None, "--offload", "Keep weights off GPUs; one model, one block or a window of two comes at a time."
    ),
    balance: Balance = option(Balance.SPREAD, "--balance", "Share what fits among GPUs, or fill the first ones."),
    order: Order = option(Order.KEEP, "--order", "Use GPUs as named, or in any order."),
    experts: Experts = option(Experts.AUTO, "--experts", "Place routed experts with their block, or apart."),
    expert_stats: Path | None = option(
        None, "--expert-stats", "FILE", "Keep the experts resident that bigload run --experts found most used."
    ),
    lora: list[Path] | None = option(
        None, "--lora", "DIR", "Count a LoRA adapter of PEFT beside the model. Repeat for more."
    ),
    prefetch: bool = option(False, "--prefetch", "Keep room for a second streamed module, to arrive meanwhile."),
    no_split: list[str] | None = option(
        None, "--no-split", "PATTERN", "Modules to keep whole, not the blocks: 'model.layers.*'."
    ),
    mtp: bool = option(False, "--mtp", "Place layers that only predict further tokens, too."),
    names: NameScheme = option(NameScheme.CHECKPOINT, "--names", "Whose module names the device map speaks."),
    disk_bandwidth: str | None = option(None, "--disk-bandwidth", "SIZE", "Bytes per second from disk. Default: 3GiB."),
    link_bandwidth: str | None = option(
        None, "--link-bandwidth", "SIZE", "Bytes per second from RAM to a GPU. Default: 24GiB."
    ),
    tp: int | None = TP,
    tp_rules: Path | None = TP_RULES,
    pp: int | None = PP,
    hosts: int | None = option(None, "--hosts", "N", "Hosts that the ranks of --tp and --pp are on.", min=1),
    gpu_bandwidth: str | None = option(
        None, "--gpu-bandwidth", "SIZE", "Bytes per second between the GPUs of a host. Default: 450GB."
    ),
    host_bandwidth: str | None = option(
        None, "--host-bandwidth", "SIZE", "Bytes per second from a GPU to other hosts. Default: 50GB."
    ),
    profile: str | None = option(
        None,
        "--profile",
        "NAME|FILE",
        "Predict times on a known machine, such as h100, or by a file of bigload measure -o. Default: what was "
        "measured on this machine.",
    ),
    measure: bool = option(False, "--measure", "Measure this machine first: a minute."),
    fit: bool = option(
        False,
        "--fit",
        "If the plan does not fit, or --fail-if objects: reduce the context, then the batch, then the KV cache to "
        "8 bits, then weights of 32 bits to BF16.",
    ),
    target: str | None = option(
        None, "--target", "SPEED", "Reduce as --fit does, until each sequence gets SPEED, such as 5tok/s."
    ),
    min_context: int | None = option(
        None, "--min-context", "TOKENS", "Shorten no further than this. Default: 4096.", min=1
    ),
    use_disk: bool = option(True, "--disk/--no-disk", "Let what finds no room stay on disk. Bound it by -m disk=SIZE."),
    fail_if: FailIf | None = option(None, "--fail-if", "Exit with 3 if weights are on disk, or anywhere but on GPUs."),
    explain: str | None = option(None, "--explain", "MODULE", "Say why a module is where it is."),
    compare: str | None = option(None, "--compare", "POLICIES", "One line for each: sequential,balanced."),
    fits: bool = option(False, "--fits", "Least memory of 1, 2, 4 and 8 GPUs that hold everything."),
    gpus: str | None = option(None, "--gpus", "SIZE", "How many GPUs of that size it takes."),
    max_context: bool = option(False, "--max-context", "The largest context that the memory holds."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Decide which device holds which module.

    Works from the names and sizes in the headers alone: no model code, no torch, no weights. With --tp, --pp or
    --hosts: which rank holds which part, one GPU of -m SIZE each.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    from bigload.planning.options import PlanKeywords, options_of
    from bigload.planning.planner import plan_details

    form = AnswerForm(as_json, quiet, color)
    is_for_ranks = parallel_plans.asked(ctx)
    if offload is not None:
        given |= _offload(offload, policy, prefetch=prefetch, no_split=no_split)
    options = options_of(**{name: given[name] for name in PlanKeywords.__annotations__ if name in given})
    asked = questions.PlanQuestion(explain=explain, compare=compare, fits=fits, gpus=gpus, max_context=max_context)
    asked.check(writes=out is not None or html is not None, fail_if=fail_if is not None)
    if asked.needs_no_budget and not is_given(ctx, "max_memory"):
        given.pop("max_memory", None)  # limits of the variable are for plans
    if is_for_ranks:
        parallel_plans.run(given, options, asked, form)
        return
    if asked.needs_no_budget and "max_memory" in given:
        say(f"warning: {asked.asked[0]} says what memory it takes, whatever -m is; a plan says whether that does")
    budget = None if asked.needs_no_budget else _budget(max_memory, use_disk=use_disk)
    if offload is not None and budget is not None and not budget.accelerators:
        raise OptionError(f"--offload {offload} without a GPU", hint="name one to bring weights to: -m cuda:0=8GiB")
    checkpoint = open_shown(path, quiet=not form.is_for_people)
    say_warnings(checkpoint)
    if asked.asked:
        questions.answer(asked, checkpoint, budget, options).print(form)
        return
    assert budget is not None, "a plan has one"
    machine = predictions.predictor(
        path,
        profile,
        measure=measure,
        disk_bandwidth=None if disk_bandwidth is None else options.bandwidth.disk,
        link_bandwidth=None if link_bandwidth is None else options.bandwidth.link,
        quiet=not form.is_for_people,
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

        if out is not None:
            from bigload.planning.plan_file import write_plan

            write_plan(made.plan, out)
        with named_as_options({}):
            text = llama_cpp_arguments(made.plan, checkpoint)
        print_text(text)
        return
    prediction = None if machine is None else machine.of(made.plan, made.structure)
    _deliver(made, form, out, html, prediction, None if machine is None else machine.counted)


def _offload(offload: Offload, policy: str, *, prefetch: bool, no_split: list[str] | None) -> dict[str, object]:
    """Return the options that it stands for."""
    contradicting = {"--policy": policy != Policy.OPTIMAL, "--prefetch": prefetch, "--no-split": bool(no_split)}
    if given := [name for name, is_given in contradicting.items() if is_given]:
        raise OptionError(
            f"--offload {offload} decides {' and '.join(given)} itself", hint="leave out one or the other"
        )
    whole = ["*"] if offload is Offload.MODEL else []  # modules of the first level: the components of a pipeline
    return {"policy": Policy.STREAMED, "prefetch": offload is Offload.GROUP, "no_split": whole}


def _budget(max_memory: list[str] | None, *, use_disk: bool) -> MemoryBudget:
    from bigload.planning.budget import budget

    if not max_memory:
        raise OptionError(
            "no memory limits", hint="add them, for example: -m cuda:0=22GiB -m cpu=64GiB, or -m auto for this machine"
        )
    return budget.MemoryBudget.parse(max_memory, use_disk=use_disk)


def _deliver(
    made: PlanDetails,
    form: AnswerForm,
    out: Path | None,
    html: Path | None,
    prediction: Prediction | None,
    profile: MachineProfile | None,
) -> None:
    def write_page(path: Path) -> None:
        from bigload_cli.views.plan_page.html_report import write_report

        plan_file, known = (None if is_stdout(out) else out), (None if prediction is None else profile)
        write_report(made, path, plan_file=plan_file, prediction=prediction, profile=known)

    deliver(
        made.plan,
        form,
        out=out,
        html=html,
        write_page=write_page,
        value=_weights_by_device(made.plan),
        prediction=prediction,
    )


def _weights_by_device(plan: Plan) -> str:
    """Return the bytes of weights on each device in the form of -m: `cuda:0=5242880,cpu=8388608,disk=1048576`."""
    return ",".join(f"{use.device}={use.weights_bytes}" for use in plan.used_devices)


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
