import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.errors import PlanError
from bigload.planning.model.module_tree import (
    MAX_DEPTH,
    ModuleNode,
    build_tree,
    execution_order,
    in_execution_order,
    rows_of,
)
from bigload.planning.model.units import cut_into_units
from builders import checkpoint_of, llama_tensors


def tree_of(tensors):
    return build_tree(checkpoint_of(tensors).tensors)


def names_of(tensors):
    return [node.name for node in tree_of(tensors).walk()]


def num_tensors(node):
    return len(list(node.all_tensors()))


def test_modules_are_the_prefixes_of_the_names():
    assert names_of({"a.b.weight": 1, "a.c.weight": 1}) == ["", "a", "a.b", "a.c"]


def test_a_tensor_without_a_dot_belongs_to_the_root():
    root = tree_of({"weight": 3, "a.weight": 1})
    assert [tensor.name for tensor in root.tensors] == ["weight"]


def test_no_tensors_make_an_empty_root():
    root = tree_of({})
    assert (root.name, root.tensors, root.num_bytes, dict(root.children)) == ("", (), 0, {})


def test_counts_and_bytes_are_of_the_whole_subtree():
    root = tree_of({"top": 1, "a.w": 2, "a.b.w": 4, "c.w": 8})
    assert (num_tensors(root), root.num_bytes) == (4, 15)
    assert (num_tensors(root.children["a"]), root.children["a"].num_bytes) == (2, 6)


def test_rows_are_those_of_matrices():
    shapes = {"a.w": [3, 64], "a.b.experts": [2, 5, 64], "a.b.norm": [64], "a.conv": [64, 1, 4], "a.empty": [64, 0]}
    root = tree_of({name: ("BF16", shape) for name, shape in shapes.items()})
    assert (root.num_rows, root.children["a"].children["b"].num_rows) == (13, 10)
    assert ModuleNode.of("", list(root.all_tensors())).num_rows == 13


def test_every_tensor_is_in_the_tree_once():
    tensors = llama_tensors(blocks=12)
    assert sorted(tensor.name for tensor in tree_of(tensors).all_tensors()) == sorted(tensors)


def test_blocks_are_in_the_order_of_their_numbers():
    blocks = [name for name in names_of({f"layers.{i}.a.w": 1 for i in (10, 9, 2, 0, 11, 1)}) if name.count(".") == 1]
    assert blocks == [f"layers.{i}" for i in (0, 1, 2, 9, 10, 11)]


def test_a_llama_runs_from_embedding_over_blocks_and_norm_to_the_head():
    shuffled = dict(reversed(llama_tensors(blocks=2).items()))
    walked = [name for name in names_of(shuffled) if name.count(".") == 1 or name == "lm_head"]
    assert walked == ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]


def test_the_order_of_the_file_does_not_matter():
    tensors = llama_tensors(blocks=3)
    assert tree_of(tensors) != tree_of({"other.weight": 1})
    assert names_of(tensors) == names_of(dict(sorted(tensors.items(), reverse=True)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("vision_tower", "multi_modal_projector"),
        ("multi_modal_projector", "embed_tokens"),
        ("visual", "visual_projection"),
        ("wte", "h"),
        ("wpe", "h"),
        ("shared", "encoder"),
        ("encoder", "decoder"),
        ("embeddings", "encoder"),
        ("word_embeddings", "word_embeddings_layernorm"),
        ("h", "ln_f"),
        ("layers", "norm"),
        ("norm", "lm_head"),
        ("encoder", "pooler"),
        ("layers", "embed_out"),
        ("decoder", "proj_out"),
        ("bert", "cls"),
        ("encoder", "contact_head"),
        ("prompt_encoder", "mask_decoder"),
        ("feature_extractor", "feature_projection"),
        ("feature_projection", "encoder"),
        ("visual_projection", "text_model"),
        ("text_model", "text_projection"),
        ("mlp1", "language_model"),
        ("embeddings", "pre_layrnorm"),
        ("layernorm_pre", "transformer"),
        ("transformer", "layernorm_post"),
        ("layernorm_post", "global_transformer"),
        ("pre_tile_positional_embedding", "transformer"),
        ("transformer", "post_tile_positional_embedding"),
        ("post_tile_positional_embedding", "global_transformer"),
        ("embed_positions", "layers"),
        ("project_in", "layers"),
        ("layers", "project_out"),
        ("layers", "final_attn_token_to_image"),
        ("transformer", "output_hypernetworks_mlps"),
        ("encoder", "output_layer"),
        ("thinker", "talker"),
        ("blocks", "merger"),
        ("layers", "mtp"),
        ("2", "10"),
    ],
)
def test_siblings_are_in_execution_order(first, second):
    assert sorted([second, first], key=execution_order) == [first, second]


def test_a_merger_runs_at_the_end_of_its_tower_or_right_after_it():
    assert in_execution_order(("merger", "blocks", "patch_embed")) == ("patch_embed", "blocks", "merger")
    assert in_execution_order(("patch_merger", "layers", "vision_encoder")) == (
        "vision_encoder",
        "patch_merger",
        "layers",
    )


def test_a_module_without_a_name_is_not_its_parent():
    root = tree_of({".a": 1, "a": 2, "..b": 4})
    assert [tensor.name for tensor in root.tensors] == ["a"]
    assert {tensor.name for tensor in root.children[""].all_tensors()} == {".a", "..b"}


def test_numbered_modules_with_parts_of_their_own_are_blocks():
    assert tree_of({"layers.0.mlp.w": 1, "layers.1.mlp.w": 1}).children["layers"].is_block_list


def test_a_numbered_sequence_of_plain_layers_is_no_list_of_blocks():
    assert not tree_of({"mlp.0.weight": 1, "mlp.2.weight": 1}).children["mlp"].is_block_list


def test_modules_without_numbers_are_no_list_of_blocks():
    assert not tree_of({"a.b.w": 1, "a.c.w": 1}).children["a"].is_block_list


def test_the_tails_of_a_quantised_weight_belong_to_the_module_of_the_weight():
    tails = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")
    names = ["a.bias", "a.weight", *(f"a.weight.{tail}" for tail in tails)]
    module = tree_of({**dict.fromkeys(names, 2), "b.weight": 1}).children["a"]
    assert [tensor.name for tensor in module.tensors] == sorted(names)
    assert (module.children, num_tensors(module), module.num_bytes) == ({}, 7, 14)


@pytest.mark.parametrize("tail", ["qweight", "qzeros", "scales", "g_idx", "weight_scale_inv", "weight_packed", "SCB"])
def test_the_parts_of_a_packed_weight_are_tensors_of_one_module(tail):
    assert names_of({"a.weight": 4, f"a.{tail}": 1}) == ["", "a"]


def test_a_sequence_of_quantised_layers_is_no_list_of_blocks():
    tensors = {f"mlp.{index}.weight{tail}": 1 for index in (0, 2) for tail in ("", ".absmax")}
    assert not tree_of(tensors).children["mlp"].is_block_list


def test_the_parameters_of_a_module_with_children_keep_their_tails_below_them():
    root = tree_of({"token": 1, "token.absmax": 1, "layers.0.a.w": 1})
    assert root.tensors == ()
    assert [tensor.name for tensor in root.children["token"].tensors] == ["token", "token.absmax"]


def test_quantised_weights_count_once():
    root = tree_of({"a.weight": 4, "a.weight.absmax": 1, "weight": 16, "weight.absmax": 32})
    assert (num_tensors(root), root.num_bytes) == (4, 53)


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a.", "a..b", "0", "0.0.0"])
def test_odd_names_are_in_the_tree_once(name):
    assert [tensor.name for tensor in tree_of({name: 1}).all_tensors()] == [name]


def test_a_name_as_deep_as_models_go_is_in_the_tree():
    assert num_tensors(tree_of({"a." * (MAX_DEPTH - 1) + "w": 1})) == 1


@pytest.mark.parametrize("depth", [MAX_DEPTH, 3000])
def test_a_name_deeper_than_any_model_is_refused(depth):
    with pytest.raises(PlanError, match="nests"):
        tree_of({"a." * depth + "w": 1, "b.w": 1})


def test_a_number_of_thousands_of_digits_is_a_key_like_any_other():
    assert num_tensors(tree_of({"layers." + "9" * 5000 + ".a.w": 1, "layers.1.a.w": 1})) == 2


def stages(widths, blocks=2):
    """A hierarchical vision model: a list of stages, each with blocks of a width of its own."""
    for stage, width in enumerate(widths):
        for block in range(blocks):
            yield f"stages.{stage}.layers.{block}.norm.weight", [width]
            yield f"stages.{stage}.layers.{block}.conv.weight", [width, 4 * width]


def block_lists(tensors):
    tree = build_tree(checkpoint_of({name: ("F32", shape) for name, shape in tensors}).tensors)
    return [node.name for node in tree.walk() if node.is_block_list]


def test_the_blocks_of_stages_are_one_level_down():
    assert block_lists(stages([8, 16, 32, 64])) == [f"stages.{stage}.layers" for stage in range(4)]


def test_blocks_of_one_width_that_hold_lists_are_no_stages():
    assert "stages" in block_lists(stages([16, 16, 16, 16]))


def test_many_numbered_siblings_are_blocks_whatever_their_widths():
    assert "stages" in block_lists(stages(range(8, 17)))


def test_blocks_of_experts_without_norms_are_no_stages():
    experts = [(f"layers.{layer}.experts.{n}.w1.weight", [8 + layer, 64]) for layer in range(2) for n in range(4)]
    assert block_lists(experts)[0] == "layers"


keys = st.sampled_from(["", "0", "1", "10", "weight", "absmax", "experts", "layers"])
names = st.lists(keys, min_size=1, max_size=5).map(".".join)


@given(sizes=st.dictionaries(names, st.integers(0, 9), max_size=20))
def test_a_tree_of_any_names_holds_each_tensor_once_and_counts_right(sizes):
    root = tree_of(sizes)
    assert sorted(tensor.name for tensor in root.all_tensors()) == sorted(sizes)
    for node in root.walk():
        assert node.num_bytes == sum(tensor.num_bytes for tensor in node.all_tensors())


@given(sizes=st.dictionaries(names, st.integers(0, 9), max_size=20), data=st.data())
def test_the_tree_does_not_depend_on_the_order_of_the_tensors(sizes, data):
    shuffled = dict(data.draw(st.permutations(list(sizes.items()))))
    assert names_of(sizes) == names_of(shuffled)


plain_names = names.filter(lambda name: all(name.split(".")))


@given(sizes=st.dictionaries(plain_names, st.integers(0, 9), max_size=20))
def test_every_tensor_of_any_name_without_empty_parts_is_below_one_unit(sizes):
    parts = [part.name for unit in cut_into_units(tree_of(sizes)) for part in unit.parts]
    for name in sizes:
        assert sum(f"{name}.".startswith(f"{part}.") for part in parts) == 1


@pytest.mark.parametrize(
    ("shape", "num_rows"), [((10,), 0), ((10, 63), 0), ((10, 64), 10), ((10, 4096), 10), ((2, 10, 4097), 40)]
)
def test_rows_longer_than_wide_ones_count_as_several_and_short_ones_not_at_all(shape, num_rows):
    assert rows_of(shape) == num_rows
