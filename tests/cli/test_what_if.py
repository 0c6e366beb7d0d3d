"""The page of a plan places as the planner does: a JavaScript engine runs the page's own script."""

import json
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import checkpoints

from bigload.devices import CPU, DISK
from bigload.dtypes import DTYPES, parse_dtype
from bigload.errors import DoesNotFitError
from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile
from bigload.machine.profiles.profile_cache import profile_named
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Attention, Balance
from bigload.planning.model.activations import BlockActivations, ScanMemory
from bigload.planning.model.attention_memory import AttentionMemory
from bigload.planning.model.kv_cache import BlockCache
from bigload.planning.model.run_memory import MemoryModel
from bigload.planning.options import Bandwidth, options_of
from bigload.planning.placement.problem import Misfit
from bigload.planning.placement.solve import solve
from bigload.planning.planner import plan_details
from bigload.planning.timing.predict import predict
from bigload.planning.workload import Workload
from bigload_cli.views import plan_page
from bigload_cli.views.plan_page.what_if import MAX_FORMS, MAX_UNITS, as_json, cache_form, run_memory, what_if
from builders import checkpoint_of, llama_tensors, problem_of, unit_of
from make import load_recipe

quickjs = pytest.importorskip("quickjs", reason="needs quickjs, of the extra dev")

_ASK = """
globalThis.asked = (model, question) => {
  const found = whatIf.answer(model, question);
  const steps = found.fits ? whatIf.forwardSteps(model, found) : [];
  return written({...found, steps});
};
globalThis.timed = (model, question) => {
  const found = whatIfTime.predicted(model, whatIf.answer(model, question), question);
  return JSON.stringify(found && { ...found, steps: found.steps.map(({ units: [unit], ...step }) => step) });
};
globalThis.needed = (scenario, work) => {
  const big = Object.entries(work).map(([name, value]) => [name, typeof value === "number" ? BigInt(value) : value]);
  return written(whatIf.memoryOf(scenario, Object.fromEntries(big)));
};
const written = (found) => JSON.stringify(found, (_, value) => typeof value === "bigint" ? Number(value) : value);
globalThis.call = (name, ...values) => globalThis[name](...values.map((value) => JSON.parse(value)));
"""


@cache
def script():
    context = quickjs.Context()
    for name in ("what_if.js", "what_if_time.js"):
        context.eval((files(plan_page) / name).read_text(encoding="utf-8"))
    context.eval(_ASK)
    return lambda *words: json.loads(context.get("call")(*words))


def answered(document, limits, **wishes):
    question = {"limits": limits, "context": 0, "batch": 1, "dtype": "", "kvDtype": ""} | wishes
    return script()("asked", as_json(document), json.dumps(question))


def recipe(name):
    made = load_recipe(name)
    tensors = {tensor.name: (tensor.dtype.name, tuple(tensor.shape)) for tensor in made.tensors}
    return checkpoint_of(tensors, config=made.config)


def latent():
    """Return the first blocks of a model that caches latents, with fewer experts."""
    whole = recipe("deepseek-v3")
    left_out = re.compile(r"layers\.([5-9]|\d\d)\.|experts\.([8-9]|\d\d+)\.")
    tensors = {name: (t.dtype.name, t.shape) for name, t in whole.tensors.items() if not left_out.search(name)}
    return checkpoint_of(tensors, config={**whole.config, "n_routed_experts": 8, "num_hidden_layers": 5})


def small_dense():
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
    return checkpoint_of(llama_tensors(9, hidden=64, vocab=900), config={**config, "num_hidden_layers": 9})


def windowed():
    """Return a tied model with a window in most layers, and heads that share keys."""
    config = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "sliding_window": 512}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(12)]
    tensors = llama_tensors(12, tied=True, hidden=64, vocab=5000)
    return checkpoint_of(tensors, config={**config, **sizes, "layer_types": kinds, "num_hidden_layers": 12})


def recurrent():
    tensors = {"backbone.embeddings.weight": ("F32", (1000, 32)), "backbone.norm_f.weight": ("F32", (32,))}
    for layer in range(6):
        mixer = f"backbone.layers.{layer}.mixer"
        shapes = {"A_log": (64, 16), "D": (64,), "conv1d.weight": (64, 1, 4), "in_proj.weight": (128, 32),
                  "x_proj.weight": (34, 64), "dt_proj.weight": (64, 2), "out_proj.weight": (32, 64)}  # fmt: skip
        tensors |= {f"{mixer}.{name}": ("F32", shape) for name, shape in shapes.items()}
    return checkpoint_of(tensors, config={"model_type": "mamba", "architectures": ["MambaForCausalLM"]})


def experts():
    """Return blocks whose routed experts are modules of their own, some of the first without any."""
    tensors = llama_tensors(8, hidden=64, vocab=3000)
    for layer in range(2, 8):
        mlp = f"model.layers.{layer}.mlp"
        del tensors[f"{mlp}.up_proj.weight"], tensors[f"{mlp}.down_proj.weight"]
        tensors[f"{mlp}.gate.weight"] = ("BF16", (8, 64))
        tensors |= {f"{mlp}.experts.{expert}.up_proj.weight": ("BF16", (256, 64)) for expert in range(8)}
        tensors |= {f"{mlp}.experts.{expert}.down_proj.weight": ("BF16", (64, 256)) for expert in range(8)}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    return checkpoint_of(tensors, config={"model_type": "deepseek_v3", **sizes})


MODELS = {
    "dense": lambda: recipe("llama-70b"),
    "tied": lambda: recipe("tied-gemma"),
    "experts": experts,
    "latent": latent,
    "encoder-decoder": lambda: recipe("t5"),
    "unlike-dtypes": lambda: recipe("mixed-dtypes"),
    "window": windowed,
    "recurrent": recurrent,
}


@cache
def model(name):
    return MODELS[name]()


def compare(checkpoint, document, options, limits, wishes):
    """Place by both, and compare."""
    names = [device["name"] for device in document["devices"]]
    found = answered(document, limits, **wishes)
    if limits[2] and found["fits"] is None:
        return  # with a bounded disk a search may end before it found anything, and the page says so
    given_limits = {name: limit for name, limit in zip(names, limits, strict=True) if limit}
    asked = replace(
        options.workload,
        context=wishes["context"],
        batch=wishes["batch"],
        load_dtype=parse_dtype(wishes["dtype"]) if wishes["dtype"] else None,
        kv_dtype=parse_dtype(wishes["kvDtype"]) if wishes["kvDtype"] else None,
    )
    budget = MemoryBudget.of(given_limits, use_disk=limits[2] != 0)
    try:
        made = plan_details(checkpoint, budget, replace(options, workload=asked))
    except DoesNotFitError:
        assert found["fits"] is False
        return
    placement, plan = made.solution.placement, made.plan
    assert found["fits"] is True
    assert [names[tier] for tier in found["tiers"]] == [str(device) for device in placement.devices]
    assert names[1 if found["onHost"] else 0] == str(plan.execution_device)
    assert found["exact"] == placement.is_proven
    assert found["isAhead"] == (placement.num_in_flight == 2)
    uses = {str(use.device): use for use in plan.devices}
    for name, row in zip(names, found["rows"], strict=True):
        if name in uses:
            use = uses[name]
            assert row == {
                "budget": use.budget_bytes,
                "weights": use.weights_bytes,
                "kv": use.kv_bytes,
                "logits": use.logits_bytes,
                "activation": use.activation_bytes,
                "overhead": use.overhead_bytes,
                "workspace": use.workspace_bytes,
                "free": use.free_bytes,
            }
    for tier, device in ((1, CPU), (2, DISK)):
        assert found["tokenBytes"][tier] == plan.token_bytes.get(device, 0)
    ends = [step["start"] + step["seconds"] for step in found["steps"]]
    assert max(ends, default=0) == pytest.approx(plan.token_seconds)


QUESTIONS = st.fixed_dictionaries(
    {
        "context": st.sampled_from([0, 1, 511, 512, 2048, 2049, 8192, 131072]),
        "batch": st.sampled_from([1, 2, 7]),
        "kvDtype": st.sampled_from(["", "fp8", "bf16", "fp32"]),
        "dtype": st.sampled_from(["", "bf16", "fp16", "fp32"]),
    }
)
WISHES = st.fixed_dictionaries(
    {"overhead": st.sampled_from([0, 1000]), "experts": st.sampled_from(["split", "auto", "block"])},
    optional={
        "prefetch": st.booleans(),
        "balance": st.sampled_from(["spread", "fill"]),
        "attention": st.sampled_from(["eager", "sdpa"]),
        "disk_bandwidth": st.sampled_from(["1000", "7GB"]),
    },
)


@given(
    name=st.sampled_from(list(MODELS)),
    shares=st.tuples(st.floats(0, 1.3), st.floats(0, 1.3), st.sampled_from([None, 0, 0.5])),
    question=QUESTIONS,
    wishes=WISHES,
)
def test_the_page_places_what_the_planner_places(name, shares, question, wishes):
    checkpoint, options = model(name), options_of(**wishes)
    limits = [None if share is None else int(share * checkpoint.total_bytes) for share in shares]
    if not limits[0] + limits[1]:
        limits[1] = checkpoint.total_bytes
    document = what_if(plan_details(checkpoint, MemoryBudget.of({"cpu": 2**60}), options))
    compare(checkpoint, document, options, limits, question)


WIDTHS = st.sampled_from([0, 0, 0, 7, 64, 4096])  # each moment is the worst where the terms of the others are 0
ATTENTIONS = st.builds(
    AttentionMemory,
    **dict.fromkeys(("num_heads", "num_index_heads"), st.sampled_from([0, 0, 3])),
    **dict.fromkeys(("projected", "query", "key_value", "repeated", "cached"), WIDTHS),
    scores=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    rotated_wide=st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 4), st.integers(0, 4))),
)
SCANS = st.builds(ScanMemory, narrow=WIDTHS, wide=WIDTHS, piece=st.sampled_from([1, 64, 256]))
WINDOWS = st.sampled_from([None, None, 15, 511, 4095])
BLOCKS = st.builds(
    BlockActivations,
    stream=WIDTHS,
    feed_forward=WIDTHS,
    attentions=st.lists(ATTENTIONS, max_size=2).map(tuple),
    scans=st.lists(SCANS, max_size=1).map(tuple),
    max_tokens=WINDOWS,
)
DTYPE = st.sampled_from([DTYPES[name] for name in ("F16", "BF16", "F32")])
CACHES = st.builds(
    BlockCache,
    block=st.just("layers.0"),
    **dict.fromkeys(("per_token", "per_source_token", "state", "wide_state"), WIDTHS),
    max_tokens=WINDOWS,
    dtype=DTYPE,
)
MEMORIES = st.builds(
    MemoryModel,
    caches=st.tuples(CACHES),
    source_tokens=st.sampled_from([None, 1500]),
    num_words=WIDTHS,
    activations=st.frozensets(BLOCKS, min_size=1, max_size=2),
    attention=st.sampled_from(Attention),
    dtype=DTYPE,
    unknown=st.just(()),
)
WORKLOADS = st.builds(
    Workload,
    context=st.sampled_from([0, 1, 16, 512, 2048, 2049, 131072]),
    batch=st.integers(1, 3),
    kv_dtype=st.one_of(st.none(), DTYPE, st.just(DTYPES["F8_E4M3"])),
    load_dtype=st.one_of(st.none(), DTYPE),
    attention=st.sampled_from([None, *Attention]),
)


@settings(max_examples=4 * settings().max_examples)
@given(memory=MEMORIES, workload=WORKLOADS)
def test_caches_logits_and_activations_are_those_of_the_planner(memory, workload):
    expected = memory.at(workload)
    work = {
        "context": workload.context,
        "batch": workload.batch,
        "kvBits": workload.kv_dtype and workload.kv_dtype.bits,
        "loadBits": workload.load_dtype and workload.load_dtype.bits,
        "isEager": (workload.attention or memory.attention) is Attention.EAGER,
    }
    scenario = {**run_memory(memory), "caches": [cache_form(cache) for cache in memory.caches]}
    assert script()("needed", json.dumps(scenario), json.dumps(work)) == {
        "caches": [expected.cache_bytes.get("layers.0", 0)],
        "logits": expected.logits_bytes,
        "activation": expected.activation_bytes,
    }


FORMS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=7)


@settings(max_examples=8 * settings().max_examples)
@given(
    forms=FORMS,
    limits=st.tuples(st.integers(1, 30), st.integers(0, 30), st.sampled_from([None, 0, 20])),
    is_spread=st.booleans(),
    in_flight=st.integers(1, 2),
)
def test_units_of_any_sizes_are_placed_as_by_the_policy(forms, limits, is_spread, in_flight):
    rates = Bandwidth(disk=3, link=7)
    document = {
        "devices": [{"name": name, "overhead": 0} for name in ("cuda:0", "cpu", "disk")],
        "dtypes": [["", None, 0]],
        "kvDtypes": [["", None]],
        "isEager": False,
        "isSpread": is_spread,
        "experts": "auto",
        "numInFlight": in_flight,
        "link": rates.link,
        "disk": rates.disk,
    }
    needs = {"source": None, "words": 0, "ofAllTokens": False, "bits": 16, "activations": [], "caches": []}
    units = [[number, "block", [0, number], [], False, []] for number in range(len(forms))]
    tables = {"names": [["layers", ""]], "forms": [(size, 0, token, stream) for size, token, stream in forms]}
    scenario = {**needs, **tables, "units": units, "hasExperts": False}
    found = answered({**document, "scenarios": [scenario]}, limits)
    problem = problem_of(
        [unit_of(size, name=f"layers.{n}", token_bytes=t, stream_bytes=s) for n, (size, t, s) in enumerate(forms)],
        {name: limit for name, limit in zip(("cuda:0", "cpu", "disk"), limits, strict=True) if limit},
        use_disk=limits[2] != 0,
        balance=Balance.SPREAD if is_spread else Balance.FILL,
        num_in_flight=in_flight,
        bandwidth=rates,
    )
    solution = solve(problem, "optimal")
    if isinstance(solution, Misfit):
        assert found["fits"] is False
    else:
        placement = solution.placement
        assert [("cuda:0", "cpu", "disk")[tier] for tier in found["tiers"]] == [str(home) for home in placement.devices]
        assert found["isAhead"] == (placement.num_in_flight == 2)


@given(
    checkpoint=checkpoints(),
    limits=st.tuples(st.integers(0, 150), st.integers(0, 150), st.sampled_from([None, 0, 50])),
    context=st.integers(0, 3),
    wishes=st.fixed_dictionaries({"overhead": st.integers(0, 9)}, optional={"prefetch": st.booleans()}),
)
def test_small_models_of_any_shape_are_placed_as_by_the_planner(checkpoint, limits, context, wishes):
    options = options_of(**wishes)
    limits = [*limits] if limits[0] + limits[1] else [0, 150, None]
    document = what_if(plan_details(checkpoint, MemoryBudget.of({"cpu": 2**60}), options))
    if document["refused"] is None:
        compare(checkpoint, document, options, limits, {"context": context, "batch": 1, "kvDtype": "", "dtype": ""})


RATES = st.integers(1, 10**6)
SECONDS = st.floats(0, 1e-3, allow_nan=False)


def devices_of(draw):
    """Return a GPU and a CPU of any speed."""
    for device in ("cuda:0", "cpu"):
        rates = {"weight_rate": {"BF16": draw(RATES)}, "flops": {"BF16": draw(RATES)}}
        rates["narrow_weight_rate"] = draw(st.sampled_from([{}, {"BF16": draw(RATES)}]))
        yield DeviceProfile(
            device=device,
            name=device,
            **rates,
            launch_seconds=draw(SECONDS),
            link_in=draw(RATES) if device != "cpu" else None,
        )


@given(
    data=st.data(),
    limits=st.tuples(st.sampled_from([0, 0.2, 0.5]), st.sampled_from([0.1, 0.4, 1.5]), st.just(None)),
    work=st.fixed_dictionaries({"context": st.sampled_from([0, 16, 600]), "batch": st.integers(1, 3)}),
    prefetch=st.booleans(),
    name=st.sampled_from(["dense", "window"]),
)
def test_the_page_predicts_what_the_command_predicts(data, limits, work, prefetch, name):
    checkpoint = small_dense() if name == "dense" else windowed()
    profile = MachineProfile(
        name="any", source="file", disk_rate=data.draw(RATES), mapped_rate=data.draw(st.one_of(st.none(), RATES)),
        load_rate=data.draw(RATES), ram_bytes=data.draw(st.one_of(st.none(), st.integers(0, 10**6))),
        cold_load_rate=data.draw(st.one_of(st.none(), RATES)), matching_seconds=data.draw(SECONDS),
        fresh_memory_rate=data.draw(st.one_of(st.none(), RATES)), tensor_seconds=data.draw(SECONDS),
        devices=tuple(devices_of(data.draw)),
    )  # fmt: skip
    options = options_of(overhead=0, prefetch=prefetch, **work)
    whole = plan_details(checkpoint, MemoryBudget.of({"cpu": 2**60}), options)
    document = what_if(whole, predict(whole.plan, whole.structure, profile), profile)
    asked = [limit and int(limit * checkpoint.total_bytes) for limit in limits]
    question = {"limits": asked, **work, "dtype": "", "kvDtype": ""}
    found = script()("timed", as_json(document), json.dumps(question))
    budget = MemoryBudget.of({name: limit for name, limit in zip(("cuda:0", "cpu"), asked, strict=False) if limit})
    try:
        made = plan_details(checkpoint, budget, options)
    except DoesNotFitError:
        assert found is None
        return
    expected = predict(made.plan, made.structure, profile)
    seconds = found["token"], found["first"], found["load"]
    assert seconds == pytest.approx(
        (expected.token_seconds, expected.first_token_seconds, expected.load_seconds), rel=1e-6, abs=1e-9
    )
    assert sum(step["seconds"] for step in found["steps"]) == pytest.approx(
        sum(step.seconds for step in expected.steps), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("name", ["experts", "encoder-decoder"])
def test_models_that_the_page_does_not_time_say_so_by_having_no_rates(name):
    profile = profile_named("h100")
    made = plan_details(model(name), MemoryBudget.of({"cpu": 2**60}), options_of())
    assert what_if(made, profile=profile)["timing"] is None


@pytest.mark.parametrize(
    "wishes",
    [
        "--policy sequential --order any --overhead 1000 --mtp --prefetch",
        "--attention eager --balance fill --experts block --no-split 'model.layers.*' --no-split '*.mlp'",
        "--names transformers --disk-bandwidth 1GB --link-bandwidth 9GB",
    ],
)
def test_the_command_of_the_page_has_what_the_plan_was_asked_for(run, here, wishes):
    planned = run(f"bigload plan tiny-llama -m cpu=1GiB {wishes} --html report.html --json")
    page = (here / "report.html").read_text(encoding="utf-8")
    document = json.loads(re.search(r'<script type="application/json" id="model">(.*?)</script>', page)[1])
    assert document["wishes"]
    again = run(f"{document['command']} -m cpu=1GiB {' '.join(document['wishes'])} --json")
    assert (again.code, again.stdout) == (0, planned.stdout)


def test_what_the_page_does_not_place_it_refuses():
    def refused(checkpoint, *budget, **wishes):
        made = plan_details(checkpoint, MemoryBudget.parse(budget), options_of(overhead=0, **wishes))
        return what_if(made)["refused"] or ""

    assert refused(model("tied"), "0=1GiB,cpu=9GiB") == ""
    assert "several accelerators" in refused(model("tied"), "0=4GiB,1=4GiB,cpu=9GiB")
    assert "balanced policy" in refused(model("tied"), "0=4GiB,cpu=9GiB", policy="balanced")
    unlike = checkpoint_of({f"model.layers.{number}.mlp.weight": 1000 + number for number in range(MAX_FORMS + 1)})
    assert "unlike" in refused(unlike, "cpu=1MiB")
    assert "unlike" in refused(
        checkpoint_of({f"layers.{number}.mlp.weight": 10 for number in range(MAX_UNITS + 1)}), "cpu=1MiB"
    )
