"""Hypothesis strategies for budgets, checkpoints, models and placement problems."""

from __future__ import annotations

from hypothesis import strategies as st

from bigload.devices import DISK
from bigload.dtypes import DTYPES
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Balance, Experts, Policy
from bigload.planning.model.structure import read_structure
from bigload.planning.options import Bandwidth, PlanKeywords, options_of
from bigload.planning.placement.problem import PlacementProblem
from builders import checkpoint_of, unit_of

_NAMES = st.sampled_from(["weight", "bias", "token", "weight.absmax", "scale"])


@st.composite
def budgets(draw, limits=None, *, max_accelerators=3):
    """Accelerators in any order, with RAM or without; the disk unbounded, limited or forbidden."""
    limits = st.integers(1, 150) if limits is None else limits
    numbers = draw(st.permutations(range(draw(st.integers(0, max_accelerators)))))
    named = {f"cuda:{index}": draw(limits) for index in numbers}
    if not named or draw(st.booleans()):
        named["cpu"] = draw(limits)
    disk = draw(st.sampled_from(["unbounded", "limited", "forbidden"]))
    if disk == "limited":
        named["disk"] = draw(limits)
    return MemoryBudget.of(named, use_disk=disk != "forbidden")


@st.composite
def checkpoints(draw):
    """A model of blocks and what may stand around them: a head, tied or not, a tower, parameters, quantised tails."""
    prefix = draw(st.sampled_from(["", "model.", "language_model.model."]))
    table = ("U8", (draw(st.integers(1, 30)), 1))
    tensors = {f"{prefix}embed_tokens.weight": table}
    for index in draw(st.lists(st.sampled_from([0, 1, 2, 9, 10, 11]), max_size=5, unique=True)):
        for part in draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True)):
            tensors[f"{prefix}layers.{index}.mlp.{part}"] = draw(st.integers(0, 15))
    extras = ("norm.weight", "token", "tower.layers.0.a.weight", "tower.layers.1.a.weight", "tower.position", "mtp.a")
    for extra in extras:
        if draw(st.booleans()):
            tensors[f"{prefix}{extra}"] = draw(st.integers(0, 15))
    for part in draw(st.sets(st.sampled_from(["weight", "bias", "dense.weight"]))):
        tensors[f"lm_head.{part}"] = table if part == "weight" else draw(st.integers(0, 15))
    tied = draw(st.sampled_from([True, False, None]))
    config = {"model_type": "x", "architectures": ["XForCausalLM"], "tie_word_embeddings": tied}
    return checkpoint_of(dict(draw(st.permutations(list(tensors.items())))), config=config)


@st.composite
def forms(draw, dtypes=tuple(DTYPES), *, max_size=12):
    """Names and forms of tensors of any dtype and shape, scalars and empty ones among them."""
    names = st.tuples(
        st.sampled_from(["", "layers.0.", "layers.1.", "layers.10.", "head."]),
        st.sampled_from(["weight", "bias", "a.weight", "weight.absmax", "\u00e9.scale", "format"]),
    ).map("".join)
    tensors = {}
    for name in draw(st.lists(names, max_size=max_size, unique=True)):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16]), max_size=3))
        packed = DTYPES[dtype].bits < 8
        tensors[name] = (dtype, [*shape, 4] if packed else shape)
    return tensors


_HIDDEN, _HEAD = 4, 2
_FAMILIES = {
    "llama": ("", "num_experts", "LlamaForCausalLM"),
    "mixtral": ("block_sparse_moe", "num_local_experts", "MixtralForCausalLM"),
    "qwen3_moe": ("mlp", "num_experts", "Qwen3MoeForCausalLM"),
}


@st.composite
def models(draw, *, with_experts=False):
    """A tiny decoder with all that its config has to tell: attention, experts, tied or absent heads, extra layers."""
    family = draw(st.sampled_from([name for name in _FAMILIES if name != "llama" or not with_experts]))
    sparse, count_key, architecture = _FAMILIES[family]
    blocks, num_experts = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    kv_heads, vocab = draw(st.sampled_from([1, 2])), draw(st.integers(1, 12))
    first_sparse = draw(st.integers(0, 1)) if blocks > 1 else 0
    dtype = draw(st.sampled_from(["BF16", "F32"]))
    tensors = {"model.embed_tokens.weight": (dtype, [vocab, _HIDDEN])}
    for block in range(blocks):
        name = f"model.layers.{block}"
        rows = {"q_proj": 2 * _HEAD, "k_proj": kv_heads * _HEAD, "v_proj": kv_heads * _HEAD, "o_proj": _HIDDEN}
        tensors |= {f"{name}.self_attn.{key}.weight": (dtype, [count, _HIDDEN]) for key, count in rows.items()}
        tensors[f"{name}.input_layernorm.weight"] = (dtype, [_HIDDEN])
        if sparse and block >= first_sparse:
            tensors[f"{name}.{sparse}.gate.weight"] = (dtype, [num_experts, _HIDDEN])
            for expert in range(num_experts):
                tensors[f"{name}.{sparse}.experts.{expert}.w1.weight"] = (dtype, [6, _HIDDEN])
        else:
            tensors[f"{name}.mlp.up_proj.weight"] = (dtype, [draw(st.sampled_from([8, 8, 3])), _HIDDEN])
    tensors["model.norm.weight"] = (dtype, [_HIDDEN])
    if draw(st.booleans()):
        tensors["lm_head.weight"] = (dtype, [vocab, _HIDDEN])
    if draw(st.booleans()):
        tensors["mtp.proj.weight"] = (dtype, [3, _HIDDEN])
    config = {
        "model_type": family,
        "architectures": [architecture],
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_size": _HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD,
        "num_hidden_layers": blocks,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        count_key: num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
    }
    return checkpoint_of(tensors, config=config)


@st.composite
def plan_wishes(draw) -> PlanKeywords:
    """Any options that do not contradict each other."""
    policy = draw(st.sampled_from(Policy) | st.just(Policy.OPTIMAL))
    return PlanKeywords(
        policy=policy,
        context=draw(st.sampled_from([0, 1, 7, 50])),
        batch=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([None, "F16", "F32"])),
        kv_dtype=draw(st.sampled_from([None, "F8_E4M3", "F32"])),
        attention=draw(st.sampled_from([None, "eager"])),
        overhead=draw(st.sampled_from([0, 0, 10, 300])),
        disk_bandwidth=3,
        link_bandwidth=draw(st.sampled_from([3, 4, 24])),
        balance=draw(st.sampled_from(["spread", "fill"])),
        order=draw(st.sampled_from(["keep", "any"])),
        experts=draw(st.sampled_from(Experts)) if policy is Policy.OPTIMAL else Experts.AUTO,
        prefetch=draw(st.booleans()),
        mtp=draw(st.booleans()),
        names=draw(st.sampled_from(["checkpoint", "transformers"])),
    )


@st.composite
def questions(draw, checkpoints=None, wishes=None):
    """A model, wishes, and a budget of about the size that they need."""
    checkpoint = draw(models() if checkpoints is None else checkpoints)
    asked = draw(plan_wishes()) if wishes is None else {**draw(plan_wishes()), **wishes}
    options = options_of(**asked)
    structure = read_structure(checkpoint, options)
    needs = structure.memory.at(options.workload)
    weights = sum(unit.num_bytes for unit in structure.units(options.workload))
    beside = needs.activation_bytes + asked["overhead"]
    total = weights + sum(needs.cache_bytes.values()) + needs.logits_bytes
    shares = st.integers(1, 13).map(lambda tenths: beside + total * tenths // 10 + 1)
    return checkpoint, draw(budgets(shares)), asked


@st.composite
def problems(draw, *, max_units=6, max_accelerators=2, with_riders=True):
    """Few units of few sizes, as models have them, some with caches, some sparse, some riding on the one before."""
    kinds = draw(st.lists(_unit_kinds(), min_size=1, max_size=3))
    units = []
    for index in range(draw(st.integers(1, max_units))):
        size, cache, token, is_routed = draw(st.sampled_from(kinds))
        is_routed = is_routed and index > 0 and with_riders
        cache = 0 if is_routed else cache
        units.append(unit_of(size, name=f"layers.{index}", is_routed=is_routed, cache_bytes=cache, token_bytes=token))
    total = sum(unit.num_bytes + unit.run_bytes for unit in units)
    budget = draw(budgets(st.integers(1, max(2 * total, 2)), max_accelerators=max_accelerators))
    return PlacementProblem(
        units=tuple(units),
        budget=budget,
        fixed_bytes={device: draw(st.integers(0, 2)) for device, _ in budget if device != DISK},
        num_in_flight=draw(st.sampled_from([1, 1, 2])),
        bandwidth=Bandwidth(disk=3, link=draw(st.sampled_from([3, 4, 24]))),
        any_order=draw(st.booleans()),
        balance=draw(st.sampled_from(Balance)),
    )


@st.composite
def _unit_kinds(draw):
    size = draw(st.integers(1, 9))
    return size, draw(st.sampled_from([0, 0, 1, 2])), draw(st.sampled_from([size, size, 1])), draw(st.booleans())
