"""Files of every architecture with impossible values: only bigload's own errors come out, in bounded memory.

Headers whose bytes are changed are in `test_header.py`. Here headers are whole, and what they say is not: values of
other types, signs and sizes, arrays in place of numbers, tensors of other shapes. The same goes for config.json.
"""

import json
import math
import random
import resource
import struct

import pytest

import bigload
from bigload.checkpoint.formats.gguf.families import FAMILIES
from bigload.checkpoint.source import open_checkpoint
from bigload.layouts.dtype_rules import dtype_rule
from bigload.layouts.options import ReshardOptions
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.planning.llama_cpp import llama_cpp_arguments
from bigload.planning.planner import plan
from builders import only_our_errors, write_shard
from gguf_files import BLOCKS, gguf_bytes, text, value

SIZE = 4
SCALING = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_log_multiplier")
KEYS = (
    *("attention.key_length", "attention.key_length_swa", "attention.key_length_mla", "attention.value_length_mla"),
    *("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length", "block_count"),
    *("expert_count", "expert_gating_func", "nextn_predict_layers", "rope.dimension_count", "rope.freq_base"),
    *(f"rope.scaling.{each}" for each in SCALING),
)
"""Keys that are read of every file, or of several families, besides those of the family's table."""

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
WHOLE = (0, 1, 2, 3, -1, -2, 7, 2**16, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63))
REAL = (0.0, -0.0, 0.25, 5e-324, -1.0, 1e-30, 1e30, 1e300, math.inf, -math.inf, math.nan)
TEXTS = ("", "linear", "yarn", "longrope", "llama3", "nan", "1e999", "[1]", "9" * 400, "\u20ac", "[" * 900)


def hostile_value(source):
    """Return type number and value of one of the forms that GGUF has."""
    kind = source.randrange(6)
    if kind == 0:
        return struct.pack("<Iq", 11, source.choice(WHOLE))
    if kind == 1:
        return struct.pack("<IQ", 10, source.choice((2**63, 2**64 - 1, 2**32)))
    if kind == 2:
        return struct.pack("<Id", 12, source.choice(REAL))
    if kind == 3:
        return value(source.choice((True, False, *TEXTS)))
    count = source.choice((0, 1, 2, 3, 100, 4096, 5000))
    if kind == 4:
        return struct.pack(f"<IIQ{count}q", 9, 11, count, *(source.choice(WHOLE) for _ in range(count)))
    return struct.pack(f"<IIQ{count}d", 9, 12, count, *(source.choice(REAL) for _ in range(count)))


def shape_in_gguf(name):
    return (2, SIZE, SIZE) if "_exps." in name or "_b.weight" in name else (SIZE,) if "norm" in name else (SIZE, SIZE)


def hostile_file(family, source):
    """Return a file of the family in which a few values, shapes, types or names are others."""
    prefix = family.architecture
    keys = {f"{prefix}.{key}": value(2) for key in (*KEYS, *family.keys) if source.random() < 0.9}
    keys |= {f"tokenizer.ggml.{each}_token_id": value(1) for each in ("bos", "eos", "padding")}
    keys |= {f"{prefix}.{key}": value(given) for key, given in family.fixed.items()}
    for key in source.sample(sorted(keys), source.randint(1, 5)):
        keys[key] = hostile_value(source)
    keys["general.architecture"] = value(prefix)
    tensors = dict[str, tuple[int, tuple[int, ...]]]()
    names = [f"{each}.weight" for each in family.root]
    for stack, (_, block) in family.stacks.items():
        leaves = [each if each.endswith((".weight", ".bias")) else f"{each}.weight" for each in block]
        names += [f"{stack}.{number}.{leaf}" for number in (0, 1) for leaf in leaves]
    names += [f"blk.0.ffn_{each}_exps.weight" for each in family.expert_parts]
    for name in names:
        if source.random() < 0.9:
            tensors[name] = 0, shape_in_gguf(name)
    for name in source.sample(FACTORS, source.randint(0, 3)):
        tensors[name] = 0, (source.choice((1, 2, 4)),)
    for name in source.sample(sorted(tensors), min(len(tensors), source.randint(0, 3))):
        shape = tuple(source.choice((0, 1, 2, 3, 4, 6, 32)) for _ in range(source.randint(0, 4)))
        kind = source.choice([kind for kind, (size, _) in BLOCKS.items() if not shape or shape[-1] % size == 0])
        tensors[name] = (0 if not shape else kind), shape
    raw = bytearray(gguf_bytes(tensors, keys=[text(key) + given for key, given in keys.items()]))
    if source.random() < 0.5:  # factors, and all other values, are numbers of any kind
        factor = struct.pack("<f", source.choice((0.0, 1.0, -1.0, 1e30, math.nan, math.inf, 1.5)))
        raw[-256:] = factor * 64
    return bytes(raw)


def read_all(path, out, source):
    """Open and plan a GGUF file, and place it for llama.cpp; write the model in safetensors, and again in GGUF."""
    with only_our_errors():
        opened = open_checkpoint(path)
        made = plan(opened, {"cuda:0": "1GiB", "cpu": "1GiB"}, context=source.choice((1, 64, 2**29)))
        llama_cpp_arguments(made, opened)
    with only_our_errors():
        prepare_reshard(path, out / "back", ReshardOptions(dtypes=dtype_rule("fp32"), force=True))
        if source.random() < 0.05:
            bigload.reshard(path, out / "back", dtype="fp32", verify="none", force=True)
            prepare_reshard(out / "back", out / "again", ReshardOptions(layout="gguf", force=True))


LISTS = ([], {}, [2], [2, -1], [None], ["full_attention"] * 2)
ANY = (*WHOLE, *REAL, *TEXTS, *(10**400, 2**62, 2**30) * 2, None, True, False, *LISTS)
ROPE = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale_all_dim")
ROPE += ("original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "truncate")
OTHERS = ("layer_types", "num_hidden_layers", "multi_query", "rotary_dim", "query_pre_attn_scalar", "hidden_act")
OTHERS += ("per_layer_config", "num_nextn_predict_layers", "tie_word_embeddings", "sliding_window", "bos_token_id")
OTHERS += ("global_head_dim", "attention_k_eq_v", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "long_factor")


def hostile_rope(source):
    kinds = (*("default",) * 9, "linear", "yarn", "llama3", "longrope", "proportional")
    found = dict.fromkeys(source.sample(ROPE, source.randrange(len(ROPE))), 2) | {"rope_type": source.choice(kinds)}
    found |= {key: source.choice(ANY) for key in source.sample(ROPE, source.randrange(3))}
    found |= {key: [source.choice((1.0, *REAL))] for key in ("long_factor", "short_factor")}
    by_kind = {"full_attention": found, "sliding_attention": found}
    return source.choice((None, found, found, by_kind))


def hostile_config(family, source):
    """Return a config.json of the family in which a few values are others."""
    known = [*family.keys.values(), *OTHERS]
    windows = [number % (every := family.window_every or 2) < every - 1 for number in (0, 1)]
    kinds = ["sliding_attention" if each else "full_attention" for each in windows]
    config = {**dict.fromkeys(known, 2), **family.builtin, "layer_types": kinds}
    config |= {"hidden_act": family.activations[0], "tie_word_embeddings": False, "multi_query": source.random() < 0.2}
    config |= {source.choice(("rope_parameters", "rope_scaling")): hostile_rope(source)}
    config |= {key: source.choice(ANY) for key in source.sample(known, source.randint(0, 3))}
    return {**config, "model_type": family.model_type}


def write_all(folder, out, family, source):
    """Write a folder of transformers as GGUF."""
    names = [f"{each}.weight" for each in family.root.values()]
    for layers, block in family.stacks.values():
        leaves = (each if stored.endswith((".weight", ".bias")) else f"{each}.weight" for stored, each in block.items())
        names += [f"{layers}.{number}.{leaf}" for leaf in dict.fromkeys(leaves) for number in (0, 1)]
    shapes = {name: [SIZE] if "norm" in name else [SIZE, SIZE] for name in names if source.random() < 0.98}
    for name in source.sample(names, source.choice((0, 0, 1, 2))):
        shapes[name] = [source.choice((0, 1, 2, 4, 6)) for _ in range(source.randint(0, 4))]
    write_shard(folder / "model.safetensors", {name: ("F32", shape) for name, shape in shapes.items()})
    (folder / "config.json").write_text(json.dumps(hostile_config(family, source)))
    with only_our_errors():
        prepare_reshard(folder, out / "written", ReshardOptions(layout="gguf", force=True))
        if source.random() < 0.05:
            bigload.reshard(folder, out / "written", layout="gguf", verify="none", force=True)
            open_checkpoint(out / "written/model.gguf")


def try_all(folder, seeds):
    """Read and write with each seed, and check that memory stays within a bound."""
    (folder / "in").mkdir()
    before = highest_memory()
    for seed in seeds:
        source = random.Random(seed)
        family = source.choice(list(FAMILIES.values()))
        (folder / "m.gguf").write_bytes(hostile_file(family, source))
        try:
            read_all(folder / "m.gguf", folder, source)
            write_all(folder / "in", folder, family, source)
        except Exception as error:
            error.add_note(f"seed {seed}, {family.model_type}")
            raise
    assert highest_memory() - before < 256 * 2**20


def highest_memory():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_impossible_values_raise_nothing_but_our_errors(tmp_path):
    try_all(tmp_path, range(100))


@pytest.mark.slow
def test_many_impossible_values_raise_nothing_but_our_errors(tmp_path):
    try_all(tmp_path, range(100, 5_000))
