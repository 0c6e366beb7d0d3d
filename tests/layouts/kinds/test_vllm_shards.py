"""The layout `vllm`: names, forms and values of vLLM's `sharded_state`, by a reference of its own."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload.errors import PartitionError

HEADS, KV_HEADS, WIDTH, HIDDEN, FFN, ROWS, LAYERS = 8, 2, 4, 32, 24, 128, 2
CONFIG = {
    "model_type": "qwen2",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "vocab_size": ROWS,
}
LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.q_proj.bias": (HEADS * WIDTH,),
    "self_attn.k_proj.bias": (KV_HEADS * WIDTH,),
    "self_attn.v_proj.bias": (KV_HEADS * WIDTH,),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}


def written(folder, *, rows=ROWS, leave_out=(), extra=None, **config):
    shapes = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (rows, HIDDEN), "model.norm.weight": (HIDDEN,), **(extra or {})}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (rows, HIDDEN)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if name not in leave_out}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return tensors


def expected(tensors, rank, tp, *, is_tied):
    """What vLLM's QKVParallelLinear, MergedColumnParallelLinear and VocabParallelEmbedding hold."""

    def rows(name, number=rank, count=tp):
        return tensors[name].chunk(count)[number]

    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    found = {"lm_head.weight": rows(head), "model.norm.weight": tensors["model.norm.weight"]}
    if not is_tied:
        found["model.embed_tokens.weight"] = rows("model.embed_tokens.weight")
    of_kv = min(tp, KV_HEADS)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[f"{layer}.{name}"] = tensors[f"{layer}.{name}"]
        for leaf in ("weight", "bias"):
            key, value = (
                rows(f"{layer}.self_attn.{kind}_proj.{leaf}", rank * of_kv // tp, of_kv) for kind in ("k", "v")
            )
            query = rows(f"{layer}.self_attn.q_proj.{leaf}")
            found[f"{layer}.self_attn.qkv_proj.{leaf}"] = torch.cat([query, key, value])
        halves = [rows(f"{layer}.mlp.{half}_proj.weight") for half in ("gate", "up")]
        found[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(halves)
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            found[f"{layer}.{name}"] = tensors[f"{layer}.{name}"].chunk(tp, dim=1)[rank]
        found |= {f"{layer}.self_attn.attn._{kind}_scale": torch.tensor(1.0) for kind in ("k", "v", "q", "prob")}
    return found


def parts_of(folder, rank):
    files = [folder / f"model-rank-{rank}-part-{n}.safetensors" for n in range(100)]
    found = [load_file(file) for file in files if file.exists()]
    assert len(found) == len(list(folder.glob(f"model-rank-{rank}-part-*.safetensors")))
    names = [name for part in found for name in part]
    assert len(names) == len(set(names))
    return {name: tensor for part in found for name, tensor in part.items()}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("tp", "size"), [(1, None), (2, 2000), (4, None)])
def test_each_rank_has_the_tensors_of_vllm(tmp_path, tp, size, is_tied):
    tensors = written(tmp_path / "model", tie_word_embeddings=is_tied)
    bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=tp, max_shard_bytes=size)
    for rank in range(tp):
        found, wanted = parts_of(tmp_path / "out", rank), expected(tensors, rank, tp, is_tied=is_tied)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    assert not list((tmp_path / "out").glob("*.index.json"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "opt"}, "not known for models of type 'opt'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rows": 100}, "pads to a multiple of 64"),
        ({"tp": 3}, "does not divide|pads"),
        ({"leave_out": ["model.layers.1.self_attn.k_proj.weight"]}, "not those that vLLM"),
        ({"leave_out": ["lm_head.weight"]}, "not those that vLLM"),
        ({"extra": {"model.layers.0.self_attn.qkv_proj.weight": (4, 4)}}, "not those that vLLM"),
    ],
)
def test_what_vllm_would_not_load_is_refused(tmp_path, config, said):
    tp = config.pop("tp", 2)
    written(tmp_path / "model", **config)
    with pytest.raises(PartitionError, match=said):
        bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=tp)
    assert not (tmp_path / "out").exists()
