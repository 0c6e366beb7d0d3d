"""`bigload run`: answers of a model, by a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import typer

from bigload.errors import OptionError
from bigload.units import MIB
from bigload_cli import output
from bigload_cli.library_messages import silent_libraries
from bigload_cli.options import (
    COLOR,
    JSON,
    MAX_MEMORY,
    QUIET,
    ColorMode,
    argument,
    is_given,
    option,
    size_option,
)
from bigload_cli.result_files import answers_on_stdout, check_results, say_written, write_results

if TYPE_CHECKING:
    from bigload.checkpoint.model import Checkpoint
    from bigload.generation.prompts import Prompt
    from bigload.generation.report import RunReport
    from bigload.machine.memory.detected import DetectedMemory
    from bigload.planning.plan import Plan
    from bigload.planning.timing.predict import Prediction
    from bigload_cli.answering import Answering

EPILOG = """\b
Examples:
  bigload run ./llama-8b -p "Why is the sky blue?"
  bigload run ./llama-70b -m cuda:0=22GiB -m cpu=64GiB --chat
  git diff | bigload run ./llama-8b -q --system "Write a commit message."
  bigload run ./llama-8b --file prompts.jsonl > answers.jsonl
  bigload run ./llama-70b --plan plan.json --stats -p "Hello" --trace trace.json
  bigload run ./mixtral --random-tokens 512 --repeat 3 --experts experts.json

\b
Instruct models are asked by their chat template; base models continue the
text. Tokens are chosen as generation_config.json beside the weights says;
without it, or with --temperature 0, the most likely one is. Only the answer
goes to stdout. In a chat, Ctrl-C ends an answer, /clear forgets the
conversation, Ctrl-D or /exit ends the program.

\b
Of --stats, WAITED is the time the model waited for weights, OVERLAP the share
of fetch time during which it computed, WEIGHTS the peak size of streamed
weights, loaded or in flight.
"""


_PROCESS_BYTES = 512 * MIB
"""What the process takes beside the model: torch and transformers, imported after the plan, and blocks being read."""

_RANDOM_ANSWER = 32
"""Tokens after random ones."""


class _Expected(TypedDict, total=False):
    """Fields of a report about predicted times."""

    prediction: Prediction
    cached_fraction: float | None


class _Mode(StrEnum):
    """Source of the prompts."""

    PROMPT = "-p"
    CHAT = "--chat"
    FILE = "--file"
    RANDOM = "--random-tokens"


def run(
    call: typer.Context,
    path: str = argument(..., "MODEL", "Folder of a model: config.json, tokenizer and weights."),
    prompt: str | None = option(None, "--prompt -p", "TEXT", "What to answer; - reads it from stdin."),
    chat: bool = option(False, "--chat", "Talk: a prompt a line. Default on a terminal without -p."),
    file: Path | None = option(
        None,
        "--file",
        "FILE",
        'Answer each line, {"prompt": ...} or {"messages": [...]}, by a line of JSON; "id" is passed on.',
    ),
    random_tokens: int | None = option(
        None,
        "--random-tokens",
        "N",
        f"No text: time a prompt of N random tokens and {_RANDOM_ANSWER} new ones (-n). Has --stats.",
        min=1,
        max=10_000_000,
    ),
    repeat: int = option(1, "--repeat", "N", "Runs of --random-tokens.", min=1, max=1000),
    system: str | None = option(None, "--system", "TEXT", "System message of the conversation."),
    raw: bool = option(False, "--raw", "Continue the text as it is, without the chat template."),
    max_new_tokens: int | None = option(
        None, "--max-new-tokens -n", "N", "Longest answer. Default: what the context leaves room for.", min=1
    ),
    temperature: float | None = option(
        None, "--temperature", "T", "0 takes the most likely token; higher is more random.", min=0
    ),
    top_p: float | None = option(
        None, "--top-p", "P", "Choose among the likeliest tokens of this probability.", min=0, max=1
    ),
    seed: int | None = option(None, "--seed", "N", "Of random choices.", min=0),
    plan: Path | None = option(
        None, "--plan", "FILE", "Where parts go, from bigload plan -o. Default: one made for -m."
    ),
    max_memory: list[str] | None = MAX_MEMORY,
    from_disk: bool = option(False, "--from-disk", "No plan: leave all weights in their files and stream them."),
    context: int | None = option(
        None, "--context", "TOKENS", "Longest prompt with its answer. Default: the plan's, or 4096.", min=1
    ),
    prefetch_bytes: str | None = option(
        None, "--prefetch-bytes", "SIZE", "Weights that may wait for their block. Default: 2 blocks."
    ),
    resident_bytes: str | None = option(
        None, "--resident-bytes", "SIZE", "Streamed weights that may stay. Default: on the CPU, all that fits."
    ),
    stats: bool = option(False, "--stats", "Show times, and what streaming weights cost."),
    trace: Path | None = option(
        None, "--trace", "FILE", "Write a trace of all threads, for chrome://tracing or Perfetto."
    ),
    experts: Path | None = option(None, "--experts", "FILE", "Record how often each expert was used, for later runs."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Answer a prompt with a model, in memory or larger than that.

    MODEL is the folder of a model of transformers, which has to be installed. Weights that find no room in
    memory are streamed from their files for every token.
    """
    from bigload.extras import require

    mode = _mode({_Mode.PROMPT: prompt, _Mode.CHAT: chat or None, _Mode.FILE: file, _Mode.RANDOM: random_tokens})
    _refuse(
        {
            "--plan and -m: the plan has limits of its own": plan and is_given(call, "max_memory"),
            "--plan and --from-disk: a plan says what is on disk": plan and from_disk,
            "--chat and --json: a conversation is no document": mode is _Mode.CHAT and as_json,
            "--repeat is for --random-tokens": mode is not _Mode.RANDOM and repeat > 1,
        }
    )
    prompts = _prompts(mode, prompt, file)
    prefetch = None if prefetch_bytes is None else size_option("--prefetch-bytes", prefetch_bytes, at_least=0)
    resident = None if resident_bytes is None else size_option("--resident-bytes", resident_bytes, at_least=0)
    on_stdout = _check_results(trace, experts, has_answer=as_json or mode is not _Mode.RANDOM)
    require("torch", asked_by="run", extra="run")
    if random_tokens is not None:
        max_new_tokens = max_new_tokens or _RANDOM_ANSWER
        context = context or random_tokens + max_new_tokens
    checkpoint, made, context, longest = _planned(
        path, plan, max_memory, from_disk=from_disk, context=context, quiet=quiet
    )
    measures = stats or as_json or mode is _Mode.RANDOM or trace is not None or experts is not None
    with silent_libraries():
        _import_lean(checkpoint)
        from bigload_cli.answering import Answering, AnswerWishes

        wishes = AnswerWishes(
            prompts=prompts,
            is_chat=mode is _Mode.CHAT,
            as_lines=mode is _Mode.FILE,
            random_tokens=random_tokens,
            repeat=repeat,
            system=system,
            is_raw=raw,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            context=context,
            longest_context=longest,
            max_new_tokens=max_new_tokens,
            prefetch_bytes=prefetch,
            resident_bytes=resident,
            measures=measures,
            as_json=as_json,
            stats=stats,
            quiet=quiet,
            color=color,
        )
        session = Answering.of(checkpoint, made, wishes)
        expected = _expected(checkpoint, made, session) if stats or as_json or mode is _Mode.RANDOM else {}
        report = session.run()._replace(**expected)
    written = _write(session, trace, experts)
    if not on_stdout and (as_json or mode is _Mode.RANDOM):
        _show(report, checkpoint.name, output.AnswerForm(as_json, quiet, color))
    elif stats and not quiet and mode in (_Mode.PROMPT, _Mode.FILE):
        _say(report, checkpoint.name, color=color)
    if not quiet:
        say_written(written)


def _refuse(contradictions: Mapping[str, object]) -> None:
    """Raise OptionError for the first pair of options that holds."""
    for words, holds in contradictions.items():
        if holds:
            raise OptionError(words, hint="leave one of them out")


def _check_results(trace: Path | None, experts: Path | None, *, has_answer: bool) -> bool:
    """Check the result files; return whether one is the answer on stdout."""
    from bigload.bench.results.result_marks import MADE_BY_RUN
    from bigload.planning.expert_stats import SCHEMA

    answers_on_stdout([trace, experts], as_json=has_answer)
    on_stdout = check_results([trace], made_by=MADE_BY_RUN, as_json=has_answer)
    return check_results([experts], made_by=SCHEMA, as_json=has_answer) or on_stdout


def _mode(given: Mapping[_Mode, object]) -> _Mode:
    """Return where prompts come from: what was asked for, else a conversation on a terminal, and stdin elsewhere."""
    asked = [mode for mode, value in given.items() if value is not None]
    if len(asked) > 1:
        raise OptionError(f"{' and '.join(asked)} contradict each other", hint="leave one of them out")
    if asked:
        return asked[0]
    return _Mode.CHAT if sys.stdin is not None and sys.stdin.isatty() else _Mode.PROMPT


def _prompts(mode: _Mode, prompt: str | None, file: Path | None) -> list[Prompt]:
    """Return the prompts that are known before the model is looked at."""
    if mode not in (_Mode.PROMPT, _Mode.FILE):
        return []
    from bigload.generation.prompts import Prompt, read_prompts
    from bigload_cli.chat import stdin_text

    if file is not None:
        try:
            text = stdin_text() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is no text in UTF-8 ({error.reason})"
            raise OptionError(f"cannot read {file}: {reason}") from error
        return read_prompts(text.split("\n"), source="stdin" if str(file) == "-" else str(file))
    text = stdin_text() if prompt is None or prompt == "-" else prompt
    if not text:
        raise OptionError(
            "the prompt is empty", hint="give a text with -p, or on stdin; --chat asks for one line by line"
        )
    return [Prompt(text=text)]


def _planned(
    path: str, file: Path | None, limits: list[str] | None, *, from_disk: bool, context: int | None, quiet: bool
) -> tuple[Checkpoint, Plan | None, int, int | None]:
    """Return checkpoint, plan, context, and the longest context that could be asked for; say where weights go."""
    from bigload.extras import require
    from bigload.generation.prompts import chosen_context
    from bigload.machine.machine import Machine
    from bigload.planning.budget.budget import MemoryBudget
    from bigload.planning.model.config import ModelConfig
    from bigload.planning.plan import headline
    from bigload.planning.plan_file import open_planned, read_plan
    from bigload.planning.planner import plan as make_plan

    made = None if file is None else read_plan(file)
    checkpoint = open_planned(made, path, source=str(file))
    require("transformers", asked_by="run", extra="run")
    planned = 0 if made is None else made.options.workload.context
    trained = ModelConfig(checkpoint.config).count("trained_context")
    tokens = chosen_context(context, planned=planned, trained=trained)
    if made is None and not from_disk:
        budget = MemoryBudget.parse(limits or ["auto"], machine=Machine(ram=_ram_for_model))
        made = make_plan(checkpoint, budget, context=tokens)
    if made is not None and not quiet:
        output.say(headline(made).partition("\n")[0])
    return checkpoint, made, tokens, min(filter(None, (planned, trained)), default=None)


def _ram_for_model() -> DetectedMemory | None:
    """Return the free RAM, less what the process will take; at most a third of it, for small models in small groups."""
    from bigload.machine.memory.ram import detect_ram

    found = detect_ram()
    return found and found._replace(free_bytes=found.free_bytes - min(_PROCESS_BYTES, found.free_bytes // 3))


def _import_lean(checkpoint: Checkpoint) -> None:
    """Import the classes of the model in good time; libraries that quantise may need all of transformers."""
    from bigload.planning.model.config import ModelConfig
    from bigload_cli.lean_transformers import import_lean

    config = ModelConfig(checkpoint.config)
    if not (config.section("quantization_config").is_known or config.text.get("quantization_config")):
        import_lean(config.architectures)


def _expected(checkpoint: Checkpoint, made: Plan | None, session: Answering) -> _Expected:
    """Return the prediction of `made` for the first prompt, where this machine was measured, and what it hangs on."""
    from bigload.machine.files.page_cache import cached_fraction
    from bigload.planning.model.structure import read_structure
    from bigload_cli.commands.predictions import predictor

    machine = None if made is None else predictor(str(checkpoint.root), None)
    tokens = session.first_prompt_tokens
    if made is None or machine is None or tokens is None:
        return {}
    found = machine.of(made, read_structure(checkpoint, made.options), prompt_tokens=tokens)
    if found is None:
        return {}
    files = (checkpoint.root / shard.file for shard in checkpoint.shards)
    return {"prediction": found, "cached_fraction": cached_fraction(files)}


def _write(session: Answering, trace: Path | None, experts: Path | None) -> list[Path]:
    """Write the trace and the record of experts; return the paths."""
    import json

    from bigload.bench.results.chrome_trace import run_trace
    from bigload.planning.expert_stats import ExpertStats

    if trace is None and experts is None:
        return []
    stats = session.stats
    models = {} if stats is None else {session.planned.checkpoint.name: stats}
    recorded = ExpertStats(uses={} if stats is None else stats.experts)
    if experts is not None and not recorded.uses:  # an empty record would replace one of an earlier run
        output.say(
            f"warning: {experts} is not written: experts are counted where they are streamed, and none were "
            "(--from-disk streams all)"
        )
        experts = None
    return write_results([(trace, lambda: json.dumps(run_trace(models))), (experts, recorded.to_json)])


def _show(report: RunReport, name: str, form: output.AnswerForm) -> None:
    """Print the statistics as the answer."""
    from bigload.generation.report import run_document
    from bigload_cli.views import run as view

    output.print_answer(
        form, lambda: run_document(report), f"{report.median_seconds:.6f}", lambda: view.shown(report, name=name)
    )


def _say(report: RunReport, name: str, *, color: ColorMode) -> None:
    """Print the statistics beside the answer."""
    from bigload_cli.views import run as view

    output.say_shown(("", *view.shown(report, name=name)), color=color)
