"""Compare predicted times of plans with those that are seen on this machine.

    python benchmarks/bench_predictions.py [--profile box.json] [--only moe] [--case disk] [--folder DIR] [--out FILE]
    python benchmarks/bench_predictions.py --table round1.json round2.json round3.json

Five models of about 1 GiB are made, and each runs under four plans, each in a process of its own: `resident` in RAM;
`pages` on disk, with memory for all pages of the files; `disk` on disk, within a limit on memory that holds less than
all; `quarter` with a quarter of the weights in RAM, and such a limit for the others. Shown are seconds to load cold
files into memory that was touched before, and of a token after the first ones, predicted beside seen, and their ratio.
The profile is that of `bigload measure -o`; without one the machine is measured right before each model, with a file
and matrices that are not those of the models. A model takes a minute and a half; cases that are in FILE already are not
run again, so a run that was cut off goes on where it was.

The rates of a virtual machine change by what its neighbours do, by a factor of two within minutes where this was
written.
`--table` takes several rounds, each with a profile of its own, and shows the median of each case over all rounds, both
of what was seen and of what was predicted. A case is run again where other programs used a tenth of the cores. Needs
transformers and control groups. The exit code is 3 where fewer than nine of ten times of a token, or to load, are
within 15 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

import torch

from bigload.bench.fresh_memory import renew
from bigload.bench.rates.measure import Effort, measure_machine
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import CPU
from bigload.generation.planned_model import PlannedModel
from bigload.machine.files.page_cache import drop_cached_pages
from bigload.machine.memory.ram import available_memory
from bigload.machine.profiles.machine_profile import MachineProfile, read_profile
from bigload.machine.threads.other_programs import OtherPrograms
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.options import PlanOptions
from bigload.planning.plan_file import write_plan
from bigload.planning.planner import PlanDetails, plan_details
from bigload.planning.timing.predict import matching_seconds, predict
from bigload.runtime.dispatch import load_and_dispatch as loading
from bigload.units import GIB, MIB
from make import load_recipe, make
from memory_group import run_within

CASES = ("resident", "pages", "disk", "quarter")
PROMPT_TOKENS, LEAST_TOKENS, NUM_DROPPED = 32, 9, 2
TOKEN_SECONDS = 1.5
"""So long tokens are generated, `LEAST_TOKENS` at least."""

PROCESS_BYTES = 900 * MIB
"""Limit on the memory of a process, beside weights in RAM: torch, transformers, and less pages than the models have."""

GOAL, SHARE = 1.15, 0.9
WHAT = ("token", "load")
PROBE = "probe"
MOST_RUNS = 2

SHORT = Effort(num_bytes=512 * MIB, seconds=0.5, passes=3)
"""Of the profile before a model: a quarter of a minute, in which the machine does not become another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one plan; seconds. It is disturbed where other programs ran in each of `MOST_RUNS` runs."""

    model: str
    num_bytes: int
    case: str
    bound_by: str
    load_predicted: float
    load_seen: float
    matching_predicted: float
    reading_seen: float
    token_predicted: float
    token_seen: float
    first_predicted: float
    first_seen: float
    is_disturbed: bool


def recipes() -> dict[str, dict[str, Any]]:
    """Return the models, in the form of fixtures/recipes."""
    tied = _llama(width=2048, inner=8192, kv=512, layers=4, words=128_000)
    tied["config"]["tie_word_embeddings"] = True
    tied["tensors"][0]["name"] = "model.embed_tokens.weight"
    t5 = json.loads((Path(__file__).parents[1] / "fixtures/recipes/t5.json").read_text())
    t5["config"] |= {"num_layers": 8, "num_decoder_layers": 8}
    t5["tensors"] = [{**each, "name": each["name"].replace("..23}", "..7}")} for each in t5["tensors"]]
    return {
        "dense": _llama(width=2048, inner=8192, kv=512, layers=7, words=32_000),
        "dense-wide": _llama(width=3072, inner=8192, kv=1024, layers=4, words=32_000),
        "moe": _mixture(layers=4, experts=32),
        "tied": tied,
        "encoder-decoder": t5,
    }


def _llama(*, width: int, inner: int, kv: int, layers: int, words: int) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words,
        "num_attention_heads": width // 128, "num_key_value_heads": kv // 128, "head_dim": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    block = f"model.layers.{{0..{layers - 1}}}"
    shapes = {
        "{lm_head,model.embed_tokens}": [words, width],
        f"{block}.{{input,post_attention}}_layernorm": [width],
        f"{block}.self_attn.{{q,o}}_proj": [width, width],
        f"{block}.self_attn.{{k,v}}_proj": [kv, width],
        f"{block}.mlp.{{gate,up}}_proj": [inner, width],
        f"{block}.mlp.down_proj": [width, inner],
        "model.norm": [width],
    }
    return _recipe(config, shapes)


def _mixture(*, layers: int, experts: int, width: int = 2048, inner: int = 768, words: int = 16_000) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": width, "intermediate_size": 4 * inner, "moe_intermediate_size": inner,
        "num_hidden_layers": layers, "vocab_size": words, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": experts, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False,
    }  # fmt: skip
    block = f"model.layers.{{0..{layers - 1}}}"
    shapes = {
        "{lm_head,model.embed_tokens}": [words, width],
        f"{block}.{{input,post_attention}}_layernorm": [width],
        f"{block}.self_attn.{{q,k}}_norm": [128],
        f"{block}.self_attn.q_proj": [2048, width],
        f"{block}.self_attn.o_proj": [width, 2048],
        f"{block}.self_attn.{{k,v}}_proj": [512, width],
        f"{block}.mlp.gate": [experts, width],
        f"{block}.mlp.experts.{{0..{experts - 1}}}.{{gate,up}}_proj": [inner, width],
        f"{block}.mlp.experts.{{0..{experts - 1}}}.down_proj": [width, inner],
        "model.norm": [width],
    }
    return _recipe(config, shapes)


def _recipe(config: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    tensors = [{"name": f"{name}.weight", "dtype": "BF16", "shape": shape} for name, shape in shapes.items()]
    about = "Made by bench_predictions.py."
    return {"name": "model", "about": about, "config": config, "max_shard_bytes": 10**10, "tensors": tensors}


def made(name: str, folder: Path) -> Path:
    """Return the folder of a model, which is made where it is not there."""
    target = folder / name
    if not target.exists():
        recipe = folder / f"{name}.json"
        recipe.write_text(json.dumps(_recipe({}, {"t.{0..15}": [2**25]}) if name == PROBE else recipes()[name]))
        make(load_recipe(recipe), target, data="random")
    return target


def planned(model: Path, case: str) -> tuple[PlanDetails, int | None]:
    """Return a plan, and the limit on the memory of the process that carries it out."""
    checkpoint = open_checkpoint(model)
    total = checkpoint.total_bytes
    if case == "resident":
        return plan_details(checkpoint, MemoryBudget.of({"cpu": 2 * total}), PlanOptions()), None
    whole = plan_details(checkpoint, MemoryBudget.of({"cpu": 2 * total}), PlanOptions())
    largest = max(unit.num_bytes for unit in whole.solution.problem.units)
    in_ram = total // 4 if case == "quarter" else 0
    fits_twice = 3 * largest < total  # else a unit runs before the next one comes
    room = 2 * largest if fits_twice else largest * 21 // 20
    found = plan_details(checkpoint, MemoryBudget.of({"cpu": room + in_ram}), PlanOptions(prefetch=fits_twice))
    held = sum(use.weights_bytes for use in found.plan.devices if str(use.device) == "cpu")
    return found, None if case == "pages" else PROCESS_BYTES + held


class _Timed:
    """A function that adds up its seconds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: object, **given: object) -> object:
        began = time.perf_counter()
        try:
            return self._function(*arguments, **given)
        finally:
            self.seconds += time.perf_counter() - began


def run_here(model: Path, plan_file: Path) -> dict[str, Any]:
    """Carry a plan out in this process, from cold files; return what was seen."""
    ready = PlannedModel.open(model, plan_file, asked_by="this bench", keeps_cache=True)
    assert ready.plan is not None
    empty = ready.empty()
    held = sum(use.weights_bytes for use in ready.plan.devices if str(use.device) == "cpu")
    # A host may back the memory of a virtual machine at its first touch. Of a process with a limit, half of what it has
    # would be less than it loads; nothing in the page cache is to stay.
    renew(held, share=0.9)
    for file in model.glob("*.safetensors"):
        drop_cached_pages(file, [(0, file.stat().st_size)])
    timed = _Timed(loading.load_matched)
    began = time.perf_counter()
    with mock.patch.object(loading, "load_matched", timed):
        module: Any = loading.load_and_dispatch(empty, ready.plan)
    load = time.perf_counter() - began
    # As the runtime is about to find it: for a few MiB of hooks and threads a block stays in memory or does not.
    left = available_memory()
    generator = torch.Generator().manual_seed(0)
    seconds: list[float] = []
    given: dict[str, Any] = {}
    with torch.inference_mode():
        while len(seconds) <= LEAST_TOKENS or sum(seconds[1:]) < TOKEN_SECONDS:
            number = len(seconds)
            ids = torch.randint(0, 1000, (1, 1 if number else PROMPT_TOKENS), generator=generator)
            began = time.perf_counter()
            if not ready.maker.config.is_encoder_decoder:
                out = module(input_ids=ids, logits_to_keep=1, **given)
            elif number == 0:
                given["encoder_outputs"] = module.get_encoder()(input_ids=ids)
                out = module(decoder_input_ids=ids[:, :1], **given)
            else:
                out = module(decoder_input_ids=ids, **given)
            seconds.append(time.perf_counter() - began)
            given["past_key_values"] = out.past_key_values
    later = seconds[1 + NUM_DROPPED :]
    return {
        "ram_bytes": None if left is None else left + ready.plan.weights_on(CPU),
        "load": load,
        "reading": timed.seconds,
        "first": seconds[0],
        "token": statistics.median(later),
    }


def measured(probe: Path) -> MachineProfile:
    """Return a profile of this machine, taken again where other programs ran meanwhile."""
    for _ in range(MOST_RUNS):
        found = measure_machine(probe, effort=SHORT)
        if not found.is_disturbed:
            break
    return found.profile


def compared(model: Path, case: str, profile: MachineProfile) -> Row:
    """Run a model under a plan and predict it."""
    details, limit = planned(model, case)
    plan_file = model.parent / f"{model.name}-{case}.json"
    write_plan(details.plan, plan_file)
    command = [sys.executable, __file__, "--child", str(model), str(plan_file)]
    for _ in range(MOST_RUNS):
        others = OtherPrograms()
        seen = json.loads(run_within(command, limit or available_memory() or 2**40).splitlines()[-1])
        if not (is_disturbed := others.disturb()):
            break
    given = {"prompt_tokens": PROMPT_TOKENS, "ram_bytes": seen["ram_bytes"]}
    found = predict(details.plan, details.structure, profile, **given)
    touched = predict(details.plan, details.structure, replace(profile, fresh_memory_rate=None), **given)
    return Row(
        model=model.name,
        num_bytes=details.plan.weights_bytes,
        case=case,
        bound_by=found.bound_by,
        load_predicted=touched.load_seconds,
        load_seen=seen["load"],
        matching_predicted=matching_seconds(profile, details.structure),
        reading_seen=seen["reading"],
        token_predicted=found.token_seconds,
        token_seen=seen["token"],
        first_predicted=found.first_token_seconds,
        first_seen=seen["first"],
        is_disturbed=is_disturbed,
    )


def rows_of(file: Path) -> list[Row]:
    """Return the rows that `--out` wrote."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]]


def medians(rounds: list[list[Row]]) -> list[Row]:
    """Return each case with the medians of its times over all rounds."""
    names = [each.name for each in fields(Row) if each.name.endswith(("_predicted", "_seen"))]
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in chain.from_iterable(rounds):
        cases.setdefault((row.model, row.case), []).append(row)
    best = ([row for row in rows if not row.is_disturbed] or rows for rows in cases.values())
    return [
        replace(rows[0], **{name: statistics.median(getattr(row, name) for row in rows) for name in names})
        for rows in best
    ]


def lines_of(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    columns = "token predicted | seen | ratio | load predicted | seen | ratio | of it names | first predicted | seen"
    yield f"| model | case | {columns} |\n{'|---' * 11}|"
    for row in rows:
        token = f"{row.token_predicted:.3f} | {row.token_seen:.3f} | {row.token_predicted / row.token_seen:.2f}"
        load = f"{row.load_predicted:.2f} | {row.load_seen:.2f} | {row.load_predicted / row.load_seen:.2f}"
        names = f"{row.matching_predicted:.2f}, {row.load_seen - row.reading_seen:.2f}"
        first = f"{row.first_predicted:.2f} | {row.first_seen:.2f}"
        model = f"{row.model}, {row.num_bytes / GIB:.2f} GiB"
        case = f"{row.case}, {row.bound_by}" + ", disturbed" * row.is_disturbed
        yield f"| {model} | {case} | {token} | {load} | {names} | {first} |"
    near = " and ".join(f"{num_near(rows, what)}" for what in WHAT)
    yield f"\nOf {len(rows)} times of a token and as many to load, {near} are within 15 %. Seconds."


def num_near(rows: list[Row], what: str) -> int:
    """Return how many times of a token, or to load, were predicted to within the goal."""
    pairs = ((getattr(row, f"{what}_predicted"), getattr(row, f"{what}_seen")) for row in rows)
    return sum(1 / GOAL <= predicted / seen <= GOAL for predicted, seen in pairs)


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="a file of bigload measure -o")
    parser.add_argument("--only", choices=list(recipes()), nargs="+", help="some models")
    parser.add_argument("--case", choices=CASES, help="one plan")
    parser.add_argument("--folder", type=Path, help="where models are made, and kept for the next run")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--table", type=Path, nargs="+", help="files of --out: rounds of the same cases")
    parser.add_argument("--make", action="store_true", help="make the models and stop")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        print(json.dumps(run_here(*asked.child)))
        return 0
    if asked.table:
        return shown(medians(list(map(rows_of, asked.table))))
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        names = asked.only or list(recipes())
        models, probe = [made(name, folder) for name in names], made(PROBE, folder)
        if asked.make:
            return 0
        given = read_profile(asked.profile) if asked.profile else None
        cases = [case for case in CASES if asked.case in (None, case)]
        rows = rows_of(asked.out) if asked.out is not None and asked.out.exists() else []
        done = {(row.model, row.case) for row in rows}
        for model in models:
            left = [case for case in cases if (model.name, case) not in done]
            profile = given if given or not left else measured(probe)
            if profile is not None and asked.out is not None:
                asked.out.with_suffix(f".{model.name}.profile.json").write_text(profile.to_json())
            for case in left:
                assert profile is not None
                rows.append(compared(model, case, profile))
                if asked.out is not None:
                    asked.out.write_text(json.dumps({"rows": list(map(asdict, rows))}, indent=1))
    return shown(rows)


def shown(rows: list[Row]) -> int:
    """Print the table; return the exit code."""
    print("\n".join(lines_of(rows)))
    return 0 if min(num_near(rows, what) for what in WHAT) >= SHARE * len(rows) else 3


if __name__ == "__main__":
    sys.exit(main())
