import pytest

from bigload.errors import OptionError
from bigload.planning.model.structure import read_structure
from bigload.planning.options import options_of
from bigload.planning.workload import Workload
from builders import checkpoint_of, llama_config, llama_tensors

LLAMA = {**llama_config(), "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
CONTEXT = Workload(context=10, batch=3)
CACHE = 2 * 8 * 2 * 10 * 3
"""Keys and values of 8 features in 16 bits, for 3 sequences of 10 tokens."""

LOGITS = 32 * 4 * 3


def structure_of(tensors, config=None, **wishes):
    return read_structure(checkpoint_of(tensors, config=config), options_of(**wishes))


def parts_of(units):
    return {part.name: part for unit in units for part in unit.parts}


def names_of(units):
    return [[part.name for part in unit.parts] for unit in units]


def test_every_block_has_its_cache_and_nothing_else_has():
    parts = parts_of(structure_of(llama_tensors(), LLAMA).units(CONTEXT))
    caches = {name: part.cache_bytes for name, part in parts.items()}
    assert caches == {name: CACHE if "layers" in name else 0 for name in parts}


def test_the_head_has_the_logits():
    parts = parts_of(structure_of(llama_tensors(), LLAMA).units(CONTEXT))
    assert {name: part.logits_bytes for name, part in parts.items() if part.logits_bytes} == {"lm_head": LOGITS}


def test_the_embedding_has_the_logits_when_the_head_is_tied_to_it_and_not_stored():
    tensors, config = llama_tensors(tied=True), {**LLAMA, "tie_word_embeddings": True}
    parts = parts_of(structure_of(tensors, config).units(CONTEXT))
    assert {name for name, part in parts.items() if part.logits_bytes} == {"model.embed_tokens"}


def test_a_head_that_is_a_copy_of_the_embedding_has_the_logits_and_no_bytes():
    structure = structure_of(llama_tensors(), {**LLAMA, "tie_word_embeddings": True})
    head = parts_of(structure.units(CONTEXT))["lm_head"]
    assert (structure.shared, head.num_bytes, head.logits_bytes) == (("lm_head.weight",), 0, LOGITS)


def test_the_last_module_has_the_logits_of_a_head_that_nobody_knows():
    tensors = {name: form for name, form in llama_tensors().items() if name != "lm_head.weight"}
    parts = parts_of(structure_of({**tensors, "output.weight": ("BF16", [32, 8])}, LLAMA).units(CONTEXT))
    assert {name for name, part in parts.items() if part.logits_bytes} == {"output"}


def test_no_context_needs_neither_caches_nor_logits():
    units = structure_of(llama_tensors(), LLAMA).units(Workload())
    assert {(unit.cache_bytes, unit.logits_bytes) for unit in units} == {(0, 0)}


def test_a_module_kept_whole_has_the_caches_of_all_its_blocks():
    structure = structure_of(llama_tensors(blocks=3), LLAMA, no_split="model.layers")
    assert parts_of(structure.units(CONTEXT))["model.layers"].cache_bytes == 3 * CACHE


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("model.layers", ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]),
        ("model", ["model", "lm_head"]),
        (
            ["*.layers.?", "*embed*"],
            ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
        ),
    ],
)
def test_modules_that_match_a_pattern_are_kept_whole_instead_of_blocks(patterns, names):
    structure = structure_of(llama_tensors(blocks=2), no_split=patterns)
    assert list(parts_of(structure.units(Workload()))) == names


def test_patterns_may_cut_finer_than_blocks():
    names = parts_of(structure_of(llama_tensors(blocks=1), no_split="*.mlp").units(Workload()))
    pieces = {"input_layernorm", "self_attn", "mlp"}
    assert {name for name in names if "layers" in name} == {f"model.layers.0.{piece}" for piece in pieces}


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(OptionError, match=r"--no-split model\.layer: no module has such a name"):
        structure_of(llama_tensors(), no_split=["model.norm", "model.layer"])


EXPERTS = {
    "embed.weight": 50,
    **{f"layers.{block}.attn.weight": 10 for block in range(2)},
    **{f"layers.{block}.mlp.gate.weight": 2 for block in range(2)},
    **{f"layers.{block}.mlp.experts.{expert}.up.weight": 20 for block in range(2) for expert in range(4)},
    "norm.weight": 5,
}
CHOICE = {
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
}


def test_experts_apart_ride_on_the_rest_of_their_block():
    units = structure_of(EXPERTS, CHOICE).units(Workload(), split_experts=True)
    assert [(unit.name, unit.num_bytes, unit.is_routed) for unit in units] == [
        ("embed", 50, False),
        ("layers.0.attn", 12, False),
        ("layers.0.mlp.experts", 80, True),
        ("layers.1.attn", 12, False),
        ("layers.1.mlp.experts", 80, True),
        ("norm", 5, False),
    ]


def test_dense_parts_and_experts_hold_every_byte_once():
    structure = structure_of(EXPERTS, CHOICE)
    whole, apart = structure.units(Workload()), structure.units(Workload(), split_experts=True)
    assert sum(unit.num_bytes for unit in whole) == sum(unit.num_bytes for unit in apart) == sum(EXPERTS.values())
    assert sum(unit.token_bytes for unit in whole) == sum(unit.token_bytes for unit in apart)


def test_a_token_needs_the_experts_that_it_chooses_and_they_are_streamed_one_by_one():
    experts = structure_of(EXPERTS, CHOICE).units(Workload(), split_experts=True)[2]
    assert (experts.token_bytes, experts.stream_bytes) == (20, 20)


def test_a_whole_block_is_streamed_whole():
    block = structure_of(EXPERTS, CHOICE).units(Workload())[1]
    assert (block.num_bytes, block.token_bytes, block.stream_bytes) == (92, 32, 92)


def test_experts_that_are_one_module_in_memory_are_streamed_together():
    structure = structure_of(EXPERTS, CHOICE, names="transformers")
    block, experts = structure.units(Workload())[1], structure.units(Workload(), split_experts=True)[2]
    assert (block.token_bytes, experts.token_bytes, experts.stream_bytes) == (92, 80, 80)


def test_caches_stay_with_the_dense_part_of_a_block():
    tensors = {
        **llama_tensors(blocks=2),
        **{f"model.layers.{block}.mlp.gate.weight": ("BF16", [2, 8]) for block in range(2)},
        **{f"model.layers.{b}.mlp.experts.{e}.up.weight": ("BF16", [16, 8]) for b in range(2) for e in range(2)},
    }
    units = structure_of(tensors, LLAMA).units(CONTEXT, split_experts=True)
    assert [unit.cache_bytes for unit in units if unit.is_routed] == [0, 0]
    assert sum(unit.cache_bytes for unit in units) == 2 * CACHE


def test_layers_left_out_are_not_placed_and_their_ties_neither():
    tensors = {**EXPERTS, "mtp.embed_tokens.weight": 50, "mtp.proj.weight": 3}
    structure = structure_of(tensors, CHOICE)
    assert (structure.left_out, structure.left_out_bytes) == (("mtp",), 53)
    assert "mtp" not in parts_of(structure.units(Workload()))
    assert all("mtp" not in name for tie in structure.ties for name in tie.stored)
    kept = structure_of(tensors, CHOICE, mtp=True)
    assert (kept.left_out, kept.left_out_bytes) == ((), 0)
    assert "mtp" in parts_of(kept.units(Workload()))


def test_a_checkpoint_without_tensors_has_no_units():
    assert structure_of({}).units(CONTEXT) == ()
