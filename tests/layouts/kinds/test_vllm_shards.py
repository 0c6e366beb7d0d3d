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


def laid_out(folder, tp, **written_as):
    tensors = written(folder / "model", **written_as)
    bigload.reshard(folder / "model", folder / "out", layout="vllm", tp=tp)
    return tensors, [parts_of(folder / "out", rank) for rank in range(tp)]


def test_padding_of_the_vocabulary_is_left_out_after_the_division(tmp_path):
    tensors, ranks = laid_out(tmp_path, 2, rows=100)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(ranks[0][name], tensors[name][:64])
        assert torch.equal(ranks[1][name], tensors[name][64:])


@pytest.mark.parametrize(
    ("model_type", "tied"), [("gemma2", "model.embed_tokens.weight"), ("gemma3_text", "lm_head.weight")]
)
def test_gemma_is_tied_without_a_word_in_its_config(tmp_path, model_type, tied):
    tensors, ranks = laid_out(tmp_path, 2, model_type=model_type, leave_out=["lm_head.weight"])
    for rank, found in enumerate(ranks):
        assert {"model.embed_tokens.weight", "lm_head.weight"} & found.keys() == {tied}
        assert torch.equal(found[tied], tensors["model.embed_tokens.weight"].chunk(2)[rank])


def test_fused_matrices_of_phi3_are_cut_before_they_are_divided(tmp_path):
    apart = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in LAYER if ".bias" in name]
    kinds = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    apart += [f"model.layers.{i}.{kind}_proj.weight" for i in range(LAYERS) for kind in kinds]
    sizes = [HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH]
    fused = {}
    for i in range(LAYERS):
        fused[f"model.layers.{i}.self_attn.qkv_proj.weight"] = (sum(sizes), HIDDEN)
        fused[f"model.layers.{i}.mlp.gate_up_proj.weight"] = (2 * FFN, HIDDEN)
    tensors, ranks = laid_out(tmp_path, 2, model_type="phi3", leave_out=apart, extra=fused)
    for name, shape in fused.items():
        cuts = tensors[name].split(sizes if "qkv" in name else shape[0] // 2)
        for rank, found in enumerate(ranks):
            assert torch.equal(found[name], torch.cat([cut.chunk(2)[rank] for cut in cuts]))


@pytest.mark.parametrize(
    ("model_type", "module", "names", "router"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight"),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj"), "mlp.experts.gate.weight"),
    ],
)
@pytest.mark.parametrize("count", ["num_experts", "num_local_experts"])
def test_experts_are_stacked_as_vllm_has_them(tmp_path, *, model_type, module, names, router, count):
    experts, layers = 12, [f"model.layers.{i}." for i in range(LAYERS)]
    dense = [f"{layer}{name}" for layer in layers for name in LAYER if "mlp" in name or ".bias" in name]
    shapes = dict(zip(names, [(FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)], strict=True))
    extra = {
        f"{layer}{module}.experts.{expert}.{name}.weight": shape
        for layer in layers
        for expert in range(experts)
        for name, shape in shapes.items()
    }
    extra |= {f"{layer}{module}.gate.weight": (experts, HIDDEN) for layer in layers}
    config = {"model_type": model_type, count: experts}
    tensors, ranks = laid_out(tmp_path, 2, leave_out=dense, extra=extra, **config)
    for rank, found in enumerate(ranks):
        assert not [name for name in found if ".experts.0." in name]
        for layer in layers:
            every = f"{layer}{module}.experts"
            gate, up, down = (
                torch.stack([tensors[f"{every}.{expert}.{name}.weight"] for expert in range(experts)]) for name in names
            )
            w13 = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
            assert torch.equal(found[f"{every}.routed_experts.w13_weight"], w13)
            assert torch.equal(found[f"{every}.routed_experts.w2_weight"], down.chunk(2, 2)[rank])
            assert torch.equal(found[f"{layer}{router}"], tensors[f"{layer}{module}.gate.weight"])


def test_an_incomplete_expert_is_refused(tmp_path):
    with pytest.raises(PartitionError, match="not those that vLLM") as error:
        laid_out(
            tmp_path,
            2,
            model_type="mixtral",
            num_local_experts=1,
            extra={f"model.layers.0.block_sparse_moe.experts.0.{w}.weight": (FFN, HIDDEN) for w in ("w1", "w3")},
        )
    assert "experts.0.w2.weight is missing" in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "opt"}, "not known for models of type 'opt'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"rows": 20}, "64 with vLLM's padding"),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, "not those that vLLM"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 2,
                "extra": {"model.layers.0.mlp.experts.gate_up_proj": (2, 8, 4)},
            },
            "not those that vLLM",
        ),
        ({"tp": 3}, "do not divide among 3 ranks"),
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
