import pytest

from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.mtp_layers import extra_layers
from builders import checkpoint_of


def extra_of(tensors, **config):
    return extra_layers(build_tree(checkpoint_of(tensors).tensors), ModelConfig(config or None))


def blocks(numbers, *parts, prefix="model.layers"):
    return {f"{prefix}.{number}.{part}.weight": 8 for number in numbers for part in parts}


OWN = blocks(range(4), "self_attn.q_proj", "mlp.up_proj")
ALIKE = blocks([4], "self_attn.q_proj", "mlp.up_proj")
NEXTN = {**ALIKE, **blocks([4], "eh_proj", "enorm")}


def test_a_block_past_the_last_that_has_parts_of_its_own_is_extra():
    assert extra_of({**OWN, **NEXTN}, num_hidden_layers=4) == ("model.layers.4",)


def test_a_block_past_the_last_that_the_config_counts_is_extra():
    assert extra_of({**OWN, **ALIKE}, num_hidden_layers=4, num_nextn_predict_layers=1) == ("model.layers.4",)


def test_the_config_of_the_language_model_is_asked():
    tower = blocks(range(6), "attn.qkv", prefix="visual.blocks")
    config = {"num_hidden_layers": 6, "text_config": {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}}
    assert extra_of({**OWN, **NEXTN, **tower}, **config) == ("model.layers.4",)


@pytest.mark.parametrize("num_layers", [5, 6, 1, 2, 0, -4, True, 4.0, "4", [4], None, 10**40])
def test_a_config_that_is_wrong_about_the_blocks_makes_none_extra(num_layers):
    assert extra_of({**OWN, **NEXTN}, num_hidden_layers=num_layers, num_nextn_predict_layers=9) == ()


def test_blocks_like_all_others_are_extra_only_if_the_config_counts_them():
    assert extra_of({**OWN, **ALIKE}, num_hidden_layers=4) == ()
    two = blocks([4, 5], "self_attn.q_proj", "mlp.up_proj")
    assert extra_of({**OWN, **two}, num_hidden_layers=4, num_nextn_predict_layers=1) == ()


def test_two_towers_of_unlike_depth_have_no_extra_blocks():
    vision = blocks(range(24), "self_attn.q_proj", "mlp.fc1", prefix="vision_model.encoder.layers")
    text = blocks(range(12), "self_attn.q_proj", "mlp.fc1", prefix="text_model.encoder.layers")
    assert extra_of({**vision, **text}, text_config={"num_hidden_layers": 12}) == ()


def test_blocks_that_are_numbered_from_one_are_all_the_models_own():
    shifted = blocks(range(1, 5), "self_attn.q_proj")
    assert extra_of({**shifted, **blocks([4], "eh_proj")}, num_hidden_layers=4, num_nextn_predict_layers=1) == ()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("mtp.layers.0.self_attn.q_proj.weight", "mtp"),
        ("model.mtp.layers.0.self_attn.q_proj.weight", "model.mtp"),
        ("model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_block"),
        ("model.mtp_emb_norm.weight", "model.mtp_emb_norm"),
    ],
)
def test_modules_called_mtp_are_extra_whatever_the_config_says(name, module):
    assert extra_of({**OWN, name: 8}) == (module,)
    assert extra_of({**OWN, name: 8}, num_hidden_layers=4) == (module,)


def test_a_name_that_only_begins_like_mtp_is_not_extra():
    assert extra_of({**OWN, "mtpx.weight": 8, "model.layers.0.mtp.weight": 8}) == ()


def test_a_checkpoint_of_nothing_but_mtp_is_kept():
    assert extra_of({"mtp.layers.0.self_attn.q_proj.weight": 8, "model.norm.weight": 1}) == ()


def test_no_tensors_and_no_blocks_make_nothing_extra():
    assert extra_of({}, num_hidden_layers=1) == ()
    assert extra_of({"0.weight": 1, "1.weight": 1}, num_hidden_layers=1, num_nextn_predict_layers=1) == ()
