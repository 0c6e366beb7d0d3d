"""The layout `vllm`: names, forms and values of vLLM's `sharded_state`, by a reference of its own."""

import json
from shutil import copy

import pytest
import torch
from distributed_checkpoints import save_divided
from safetensors.torch import load_file, save_file

import bigload
from bigload.errors import OptionError, PartitionError
from rank_processes import run_ranks

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
QK_NORMS = {f"self_attn.{kind}_norm.weight": (WIDTH,) for kind in "qk"}
GEMMA_NORMS = {f"{place}_feedforward_layernorm.weight": (HIDDEN,) for place in ("pre", "post")}
BIASES = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in LAYER if ".bias" in name]


def in_layers(shapes):
    return {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}


def written(folder, *, rows=ROWS, leave_out=(), extra=None, **config):
    shapes = in_layers(LAYER)
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
@pytest.mark.sample(3)
def test_each_rank_has_the_tensors_of_vllm(tmp_path, tp, size, is_tied):
    tensors = written(tmp_path / "model", tie_word_embeddings=is_tied)
    bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=tp, max_shard_bytes=size)
    for rank in range(tp):
        found, wanted = parts_of(tmp_path / "out", rank), expected(tensors, rank, tp, is_tied=is_tied)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    assert not list((tmp_path / "out").glob("*.index.json"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_of_a_distributed_checkpoint_it_is_that_of_the_model(tmp_path, model_type):
    experts = {
        f"mlp.experts.{i}.{part}_proj.weight": (HIDDEN, HIDDEN) for i in range(4) for part in ("gate", "up", "down")
    }
    extra = in_layers({**experts, "mlp.gate.weight": (4, HIDDEN), **QK_NORMS})
    config = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": HIDDEN, "head_dim": WIDTH}
    dense = [name for name in in_layers(LAYER) if ".mlp." in name or ".bias" in name]
    written(tmp_path / "model", **({} if model_type == "qwen2" else {"extra": extra, "leave_out": dense, **config}))
    saved = tmp_path / "saved"
    assert run_ranks(3, save_divided, str(tmp_path / "model/model.safetensors"), str(saved)) == [True] * 3
    assert len(list(saved.glob("*.distcp"))) == 3
    copy(tmp_path / "model/config.json", saved)
    bigload.reshard(saved, tmp_path / "joined")
    for name in ("model", "saved", "joined"):
        bigload.reshard(tmp_path / name, tmp_path / f"of-{name}", layout="vllm", tp=2, any_expert_size=True)
    for rank in range(2):
        wanted, *several = (parts_of(tmp_path / f"of-{each}", rank) for each in ("model", "saved", "joined"))
        for found in several:
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def laid_out(folder, tp, **written_as):
    tensors = written(folder / "model", **written_as)
    return tensors, ranks_of(folder / "model", tp)


def ranks_of(folder, tp):
    out = folder.with_name(f"{folder.name}.tp{tp}")
    bigload.reshard(folder, out, layout="vllm", tp=tp, any_expert_size=True)
    return [parts_of(out, rank) for rank in range(tp)]


def test_padding_of_the_vocabulary_is_left_out_after_the_division(tmp_path):
    tensors, ranks = laid_out(tmp_path, 2, rows=100)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(ranks[0][name], tensors[name][:64])
        assert torch.equal(ranks[1][name], tensors[name][64:])


@pytest.mark.parametrize(
    ("model_type", "tied", "norms"),
    [
        ("gemma2", "model.embed_tokens.weight", GEMMA_NORMS),
        ("gemma3_text", "lm_head.weight", {**GEMMA_NORMS, **QK_NORMS}),
    ],
)
def test_gemma_is_tied_without_a_word_in_its_config(tmp_path, model_type, tied, norms):
    given = {"leave_out": ["lm_head.weight", *BIASES], "extra": in_layers(norms)}
    tensors, ranks = laid_out(tmp_path, 2, model_type=model_type, **given)
    for rank, found in enumerate(ranks):
        assert {"model.embed_tokens.weight", "lm_head.weight"} & found.keys() == {tied}
        assert torch.equal(found[tied], tensors["model.embed_tokens.weight"].chunk(2)[rank])


def test_fused_matrices_of_phi3_are_cut_before_they_are_divided(tmp_path):
    kinds = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    apart = BIASES + [f"model.layers.{i}.{kind}_proj.weight" for i in range(LAYERS) for kind in kinds]
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
    ("model_type", "architecture", "module", "names", "router"),
    [
        ("mixtral", "MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight"),
        ("qwen3_moe", "Qwen3MoeForCausalLM", "mlp", ("gate_proj", "up_proj", "down_proj"), "mlp.experts.gate.weight"),
    ],
)
@pytest.mark.parametrize("count", ["num_experts", "num_local_experts"])
@pytest.mark.sample(2)
def test_experts_are_stacked_as_vllm_has_them(tmp_path, *, model_type, architecture, module, names, router, count):
    experts, layers = 12, [f"model.layers.{i}." for i in range(LAYERS)]
    dense = [f"{layer}{name}" for layer in layers for name in LAYER if "mlp" in name or ".bias" in name]
    shapes = dict(zip(names, [(FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)], strict=True))
    extra = {
        f"{layer}{module}.experts.{expert}.{name}.weight": shape
        for layer in layers
        for expert in range(experts)
        for name, shape in shapes.items()
    }
    extra |= in_layers({f"{module}.gate.weight": (experts, HIDDEN), **(QK_NORMS if model_type == "qwen3_moe" else {})})
    config = {"model_type": model_type, "architectures": [architecture], count: experts}
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
    # Also what transformers goes by where another test has imported it.
    known = {"num_experts": experts, "num_local_experts": experts, "moe_intermediate_size": FFN}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, **config, **known}))
    bigload.reshard(tmp_path / "model", tmp_path / "stacked", names="transformers")
    assert [name for name in bigload.open_checkpoint(tmp_path / "stacked").tensors if name.endswith("gate_up_proj")]
    for found, wanted in zip(ranks_of(tmp_path / "stacked", 2), ranks, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


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
        ({"rows": 20}, "has 20 rows, 64 with vLLM's padding, which leave none for the last of 2 ranks"),
        ({"rows": 64, "tp": 3}, "has 64 rows, which do not divide among 3 ranks"),
        ({"rows": 60, "tp": 3}, "has 60 rows, 64 with vLLM's padding, which do not divide among 3 ranks"),
        ({"model_type": "gemma3_text", "tie_word_embeddings": False}, "config.json says that embeddings are not tied"),
        ({"leave_out": ["model.layers.1.self_attn.k_proj.weight"]}, "layers.1.self_attn.k_proj.weight is missing"),
        ({"leave_out": ["model.layers.1.self_attn.k_proj.bias"]}, "layers.1.self_attn.k_proj.bias is missing"),
        ({"leave_out": ["model.layers.1.input_layernorm.weight"]}, "input_layernorm.weight is missing"),
        ({"leave_out": ["lm_head.weight"]}, "lm_head.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.mlp.down_proj.weight has no place"),
        ({"num_hidden_layers": 3}, "model.layers.2.mlp.down_proj.weight is missing"),
        ({"num_hidden_layers": 10**12}, "no valid num_hidden_layers"),
        ({"num_hidden_layers": None}, "no valid num_hidden_layers"),
        ({"model_type": "mixtral"}, "no valid num_experts or num_local_experts"),
        ({"extra": {"model.layers.0.self_attn.qkv_proj.weight": (4, 4)}}, "qkv_proj.weight has no place"),
        ({"extra": {"model.layers.0.self_attn.q_proj.scale": (1,)}}, "q_proj.scale has no place"),
        ({"extra": {"model.layers.0.input_layernorm.scale": (1,)}}, "input_layernorm.scale has no place"),
        ({"extra": {"model.layers.0.self_attn.o_proj.bias": (HIDDEN,)}}, "o_proj.bias has no place"),
        ({"extra": {"model.visual.weight": (4, 4)}}, "model.visual.weight has no place"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 3,
                "extra": in_layers({"mlp.experts.gate_up_proj": (2, 2 * FFN, HIDDEN)}),
            },
            "gate_up_proj is [2, 48, 32], expected the matrices of 3 experts",
        ),
    ],
)
def test_what_vllm_would_not_load_is_refused(tmp_path, config, said):
    written(tmp_path / "model", **{key: value for key, value in config.items() if key != "tp"})
    with pytest.raises(PartitionError) as error:
        bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=config.get("tp", 2))
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_tensors_that_vllm_computes_or_ties_are_left_out(tmp_path):
    extra = {"lm_head.weight": (ROWS, HIDDEN), **in_layers({"self_attn.rotary_emb.inv_freq": (WIDTH // 2,)})}
    tensors, (found,) = laid_out(tmp_path, 1, extra=extra, tie_word_embeddings=True)
    assert torch.equal(found["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert not [name for name in found if "inv_freq" in name or "embed_tokens" in name]


def test_biases_are_those_that_the_config_asks_for(tmp_path):
    extra = in_layers({"self_attn.o_proj.bias": (HIDDEN,)})
    _, ranks = laid_out(tmp_path, 2, model_type="llama", attention_bias=True, extra=extra)
    assert all(
        f"model.layers.{i}.self_attn.{it}_proj.bias" in found for found in ranks for i in (0, 1) for it in ("qkv", "o")
    )


@pytest.mark.parametrize(("rows", "is_written"), [(192, False), (256, True)])
def test_experts_that_a_kernel_of_vllm_would_round_up_are_refused(tmp_path, *, rows, is_written):
    """vLLM's loader puts a smaller tensor to the front of a parameter, where the rows of w3 would be wrong."""
    dense = [name for name in in_layers(LAYER) if "mlp" in name or ".bias" in name]
    shapes = {f"block_sparse_moe.experts.0.{name}.weight": (2 * rows, HIDDEN) for name in ("w1", "w3")}
    shapes |= {"block_sparse_moe.experts.0.w2.weight": (HIDDEN, 2 * rows), "block_sparse_moe.gate.weight": (1, HIDDEN)}
    written(tmp_path / "model", leave_out=dense, extra=in_layers(shapes), model_type="mixtral", num_local_experts=1)
    if is_written:
        bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=2)
        return
    with pytest.raises(PartitionError, match=r"have 192 rows of an expert's gate_proj, which is no multiple of 128"):
        bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=2)
    assert not (tmp_path / "out").exists()
    bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=2, any_expert_size=True)


def test_the_version_of_the_names_is_recorded_and_an_unknown_one_refused(tmp_path):
    written(tmp_path / "model")
    bigload.reshard(tmp_path / "model", tmp_path / "out", layout="vllm", tp=1, vllm_version="0.32")
    assert json.loads((tmp_path / "out" / "bigload-manifest.json").read_text())["options"]["vllm_version"] == "0.32"
    with pytest.raises(OptionError, match=r'vllm_version is "0\.9"; expected one of 0\.31, 0\.32, whose names'):
        bigload.reshard(tmp_path / "model", tmp_path / "out-2", layout="vllm", tp=1, vllm_version="0.9")
    with pytest.raises(OptionError, match="for the layout vllm, not for ranks"):
        bigload.reshard(tmp_path / "model", tmp_path / "out-2", tp=1, vllm_version="0.9")
    assert not (tmp_path / "out-2").exists()
