"""Ranks hold of every parameter what those of transformers hold, where its plans and the rules here say the same."""

import json

import model_types
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigload.planning.tensor_parallel.families import FAMILIES
from bigload.planning.tensor_parallel.partition import partition
from bigload.planning.tensor_parallel.rule_styles import RULE_STYLES
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
styles = pytest.importorskip("transformers.distributed.tensor_parallel", reason="an older transformers")
utils = pytest.importorskip("transformers.distributed.parallel_utils", reason="an older transformers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 90,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ATTENTION = ("self_attn.", "they leave attention whole")
_SHARED = ("mlp.shared_expert", "they leave the shared experts whole")
_LINEAR = ("linear_attn.", "they cut fused projections anywhere and gather them; here linear attention stays whole")
EXCEPTIONS = {
    "deepseek_v3": [_ATTENTION],
    "granitemoe": [_ATTENTION],
    "phimoe": [_ATTENTION],
    "exaone_moe": [_SHARED],
    "qwen2_moe": [_SHARED],
    "qwen3_5_moe_text": [_LINEAR],
    "qwen3_5_text": [_LINEAR],
    "qwen3_next": [_LINEAR],
}
"""By model type: names of parameters that are divided otherwise, and why. Everything else has to agree."""
if model_types.release(transformers) >= (5, 24):
    _BLOCKS = ("layers.", "their plan has the embedding only")
    EXCEPTIONS |= {
        "gpt_neox": [("embed_in.", "they divide the embedding; here it stays whole")],
        "gpt_oss": [_BLOCKS],
        "qwen3_vl_text": [_BLOCKS],
    }


def known_types():
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return [name for name in sorted(FAMILIES) if name in mapping and getattr(mapping[name], "base_model_tp_plan", None)]


def built(config):
    """Return the model of `config`, without memory; the bare one where there is none for causal language."""
    with torch.device("meta"):
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            return transformers.AutoModel.from_config(config)


@pytest.fixture
def mesh():
    """Return a function that gives the mesh of all ranks as one of them sees it; no rank but this process exists."""

    def of(rank, tp):
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
        return DeviceMesh("cpu", list(range(tp)))

    yield of
    if distributed.is_initialized():
        distributed.destroy_process_group()


def sharded(model, mesh):
    """Return the shape of what this rank holds of every parameter once transformers has divided `model`."""
    modules = dict(model.named_modules())
    shapes = {}
    for name, _ in list(model.named_parameters()):
        module, _, parameter = name.rpartition(".")
        style = utils._get_parameter_plan(name, model.tp_plan)
        if style is not None:
            styles.ALL_PARALLEL_STYLES[style].shard_param(modules[module], parameter, mesh)
        held = modules[module]._parameters[parameter]
        shapes[name] = tuple(held.to_local().shape if hasattr(held, "to_local") else held.shape)
    return shapes


@pytest.mark.parametrize("model_type", known_types())
@pytest.mark.parametrize("tp", [2, 4])
def test_every_parameter_is_divided_as_transformers_does(model_type, tp, mesh):
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    model = built(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    raw = json.loads(config.to_json_string(use_diff=False))
    checkpoint = checkpoint_of({name: ("BF16", shape) for name, shape in shapes.items()}, config=raw)
    divisions = partition(checkpoint, tp=tp).divisions
    excused = [part for part, _ in EXCEPTIONS.get(model_type, ())]
    met = set()
    num_divided = 0
    for rank in (0, tp - 1):
        theirs = sharded(built(config), mesh(rank, tp))
        for name, shape in shapes.items():
            ours = divisions[name].shape(shape, rank)
            num_divided += ours != shape
            if ours != theirs[name]:
                met |= {part for part in excused if part in name}
                assert any(part in name for part in excused), f"{name}: {shape}, {ours} here, {theirs[name]} there"
    assert num_divided
    assert met == set(excused), "an exception that is none"


def test_words_are_those_of_transformers():
    assert set(styles.ALL_PARALLEL_STYLES.valid_keys()) <= RULE_STYLES.keys()


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_those_of_dtensor(dim, mesh):
    tensor = torch.empty(23, 23, device="meta")
    name = "layers.0.mlp.up_proj.weight" if dim == 0 else "layers.0.mlp.down_proj.weight"
    checkpoint = checkpoint_of({name: ("F32", [23, 23])}, config={"model_type": "llama"})
    for tp in (1, 2, 3, 4, 7, 11, 30):
        (division,) = partition(checkpoint, tp=tp).divisions.values()
        for rank in range(tp):
            held = distribute_tensor(tensor, mesh(rank, tp), [Shard(dim)], src_data_rank=None).to_local()
            assert division.shape((23, 23), rank) == tuple(held.shape)


ATTENTIONS = {
    "albert": {"embedding_size": 8},
    "bart": {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
    },
    "bert": {},
    "bloom": {"n_head": 4, "n_layer": 1},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 1,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1e9, "rope_theta": 1e4},
    },
    "deepseek_v2": {},
    "distilbert": {"dim": 32, "hidden_dim": 60, "n_heads": 4, "n_layers": 1},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": True},
    "falcon ": {"new_decoder_architecture": False, "multi_query": True},
    "falcon  ": {"new_decoder_architecture": False, "multi_query": False},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 1},
    "gpt_neo": {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 4},
    "glm4": {},
    "llama": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1},
    "opt": {"ffn_dim": 60, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen3_next": {"layer_types": ["full_attention"], "num_experts_per_tok": 2},
    "starcoder2": {},
    "t5": {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 60, "num_layers": 1, "feed_forward_proj": "gated-gelu"},
}
"""What the configs of these families want beside or instead of the sizes above: with queries, keys and values fused in
every way there is, stored inputs first, latent, shared by queries, and apart."""


@pytest.mark.parametrize("family", ATTENTIONS)
@pytest.mark.parametrize("tp", [2, 4])
def test_what_a_rank_holds_is_all_that_its_rows_need(family, tp):
    """Without anything that other ranks hold, the layers before a rowwise one make the same of what this rank takes."""
    torch.manual_seed(0)
    model_type = family.strip()
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 96, **ATTENTIONS[family]}
    if model_type not in ("glm4", "gpt_oss", "llama", "phi", "phi3", "qwen3_next", "starcoder2"):
        del sizes["num_key_value_heads"], sizes["head_dim"]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    checkpoint = checkpoint_of(
        {name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()},
        config=json.loads(config.to_json_string(use_diff=False)),
    )
    divisions = partition(checkpoint, tp=tp).divisions
    rows = {name: divisions[f"{name}.weight"] for name in modules_of_rows(divisions, is_conv1d=model_type == "gpt2")}
    assert rows
    whole = inputs_of(model, rows)
    for name, division in rows.items():
        before = [other for other in state if part_of(other) == part_of(f"{name}.weight")]
        for rank in range(tp):
            kept = {other: masked(state[other], divisions[other], rank) for other in before}
            model.load_state_dict({**state, **kept}, strict=False)
            columns = torch.cat([torch.arange(*part) for part in division.ranges[rank]])
            torch.testing.assert_close(inputs_of(model, rows)[name][..., columns], whole[name][..., columns])


def modules_of_rows(divisions, *, is_conv1d):
    """Return the modules whose weights are divided by what they take."""
    ends = ("c_attn.weight", "c_fc.weight", "relative_attention_bias.weight")
    for name, division in divisions.items():
        if (
            division.dim == (0 if is_conv1d else 1)
            and name.endswith(".weight")
            and not name.endswith((*ends, "wte.weight"))
        ):
            yield name.removesuffix(".weight")


def part_of(name):
    """Return the attention that a parameter belongs to, or else its block and that it is in no attention."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if "att" in part.lower()), None)
    number = max((place for place, part in enumerate(parts) if part.isdecimal()), default=0)
    if parts[0] in ("encoder", "decoder") and "block" in parts:  # T5 numbers the layers of a block
        number = parts.index("block") + 1
    return ".".join(parts[: number + 1]) + "|none" if place is None else ".".join(parts[: place + 1])


def masked(tensor, division, rank):
    """Return `tensor` with sevens in place of what `rank` does not hold."""
    if division.dim is None:
        return tensor
    index = torch.cat([torch.arange(*part) for part in division.ranges[rank]])
    kept = torch.full_like(tensor, 7.0)
    return kept.index_copy(division.dim, index, tensor.index_select(division.dim, index))


def inputs_of(model, names):
    """Return what each of the modules `names` is given in a forward pass."""
    found = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0]}))
        for name in names
    ]
    tokens = torch.arange(5)[None]
    extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        model(input_ids=tokens, **extra)
    for hook in hooks:
        hook.remove()
    return found
