"""Each transform in each layout, delta, resumed run and process group writes what two reshards in turn would write."""

import json
import os
import signal

import pytest

import bigload
from bigload import Dequantize, Drop, MergeLora, Quantize, Rename
from bigload.errors import BigloadError
from builders import contents
from reshard_teams import finished, run_until_killed
from thread_process_groups import outcomes

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **HEADS}
CONFIG |= {"intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 128, "rms_norm_eps": 1e-6}
SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)}
SHAPES |= {"self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256)}
SHAPES |= {"mlp.down_proj": (256, 512), "input_layernorm": (256,), "post_attention_layernorm": (256,)}
FUSED = {"block_sparse_moe.gate": (2, 256)}
FUSED |= {f"block_sparse_moe.experts.{e}.{w}": (256, 256) for e in range(2) for w in ("w1", "w2", "w3")}

TRANSFORMS = {
    "lora": lambda root: {"transforms": [MergeLora(root / "adapter")]},
    "quantize": lambda root: {"transforms": [Quantize("int8")]},
    "dequantize": lambda root: {"transforms": [Dequantize()]},
    "rename": lambda root: {"transforms": [Rename.parse("s/self_attn/attention/")]},
    "drop": lambda root: {"transforms": [Drop("model.layers.1.*")]},
    "dtype": lambda root: {"dtype": "fp16"},
    "names": lambda root: {"names": "transformers"},
}
SOURCES = {"dequantize": "quantised", "names": "mixtral"}
WAYS = {
    "shards": {"layout": "shards", "max_shard_bytes": "1MB"},
    "offload": {"layout": "offload"},
    "offload-dat": {"layout": "offload", "offload_format": "dat"},
    "ranks": {"tp": 2},
    "stages": {"tp": 1, "pp": 2},
    "dcp": {"layout": "dcp"},
    "gguf": {"layout": "gguf"},
    "vllm": {"layout": "vllm", "tp": 2},
    "delta": {"base": "source"},
}

OF_NAMES = ("rename", "drop", "names")
COMPUTED = [pytest.param(name, marks=pytest.mark.slow if name in OF_NAMES else ()) for name in TRANSFORMS]
QUICK = ("ranks", "gguf", "vllm", "delta")
REFUSED = {
    *((transform, "vllm") for transform in ("quantize", "rename", "drop")),  # names that vLLM has no place for
    *(("quantize", way) for way in ("ranks", "stages", "gguf")),
    *(("names", way) for way in ("ranks", "stages", "gguf")),
    ("rename", "gguf"),
    ("drop", "delta"),
    ("dtype", "delta"),
}
"""What gets an error before the first write; all else is equal."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A llama in bf16, a quantised one, a mixtral with experts one by one, and an adapter of the first."""
    folder = tmp_path_factory.mktemp("matrix")
    torch.manual_seed(0)
    for model, parts, changes in (
        ("plain", SHAPES, {}),
        ("mixtral", SHAPES | FUSED, {"model_type": "mixtral", "intermediate_size": 256}),
    ):
        of_layer = {part: shape for part, shape in parts.items() if model == "plain" or not part.startswith("mlp.")}
        shapes = {f"model.layers.{n}.{part}.weight": shape for n in range(2) for part, shape in of_layer.items()}
        shapes |= {"model.embed_tokens.weight": (128, 256), "lm_head.weight": (128, 256), "model.norm.weight": (256,)}
        (folder / model).mkdir()
        tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        safe.save_file(tensors, folder / model / "model.safetensors")
        if model == "mixtral":
            changes |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 2}
        (folder / model / "config.json").write_text(json.dumps(CONFIG | changes))
        bigload.write_manifest(folder / model)
    bigload.reshard(folder / "plain", folder / "quantised", transforms=[Quantize("fp8-block")])
    (folder / "adapter").mkdir()
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {f"{path}.lora_A.weight": torch.randn(4, 256), f"{path}.lora_B.weight": torch.randn(256, 4)}
    safe.save_file(matrices, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    for name, transform in TRANSFORMS.items():
        source = folder / SOURCES.get(name, "plain")
        # a file of GGUF names the folder that it was made of
        bigload.reshard(source, folder / name / source.name, max_shard_bytes=None, **transform(folder))
    return folder


def _outcome(source, out, **options):
    """Return the weight files that a reshard writes, or its error; nothing is left of one that was refused."""
    try:
        bigload.reshard(source, out, **options)
    except BigloadError as error:
        assert not out.exists()
        assert not out.with_name(f"{out.name}.partial").exists()
        return type(error)
    assert bigload.verify(out).ok
    if "base" in options:
        return {name: tensor.tolist() for name, tensor in bigload.load(out).items()}
    return {name: data for name, data in contents(out).items() if not name.endswith(".json")}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sample(8)
def test_a_layout_of_a_transform_is_that_of_what_it_wrote(root, tmp_path, transform, way):
    source, options = root / SOURCES.get(transform, "plain"), dict(WAYS[way])
    if way == "delta":
        options["base"] = source
    at_once = _outcome(source, tmp_path / "once", **{**options, **TRANSFORMS[transform](root)})
    in_two = _outcome(root / transform / source.name, tmp_path / "two", **options)
    if (transform, way) in REFUSED:
        assert isinstance(at_once, type)
    else:
        assert at_once == in_two
        if way == "delta":
            assert not bigload.diff(tmp_path / "once", tmp_path / "two").changed


@pytest.mark.parametrize("transform", COMPUTED)
@pytest.mark.sample(2)
def test_a_killed_run_is_resumed_to_the_same_bytes(root, tmp_path, transform):
    source = root / SOURCES.get(transform, "plain")
    options = {"max_shard_bytes": "300KB", "threads": 1, **TRANSFORMS[transform](root)}
    bigload.reshard(source, tmp_path / "whole", **options)
    child = os.fork()
    if child == 0:

        def die(progress):
            if progress.done_bytes > progress.total_bytes // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        bigload.reshard(source, tmp_path / "out", on_progress=die, **options)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    report = bigload.reshard(source, tmp_path / "out", resume=True, **options)
    assert report.kept_bytes > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("transform", COMPUTED)
@pytest.mark.sample(2)
def test_two_processes_write_what_one_writes(root, tmp_path, transform):
    source = root / SOURCES.get(transform, "plain")
    options = {"max_shard_bytes": "300KB", "threads": 1, **TRANSFORMS[transform](root)}
    bigload.reshard(source, tmp_path / "one", **options)
    reports = outcomes(2, lambda team: bigload.reshard(source, tmp_path / "two", team=team, **options))
    assert [getattr(report, "out", report) for report in reports] == [tmp_path / "two"] * 2
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


ASKED = {
    "lora": ("--lora", "{}/adapter"),
    "quantize": ("--quantize", "int8"),
    "dequantize": ("--dequantize", "bf16"),
    "rename": ("--rename", "s/self_attn/attention/"),
    "names": ("--names", "transformers"),
    "dtype": ("--dtype", "fp16"),
}
"""`TRANSFORMS` on the command line."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "way"),
    [
        ("quantize", "shards"),
        ("names", "shards"),
        ("lora", "vllm"),
        ("dequantize", "ranks"),
        ("rename", "dcp"),
        ("dtype", "offload"),
    ],
)
def test_processes_of_torchrun_of_which_one_is_killed_write_what_one_does(root, tmp_path, monkeypatch, transform, way):
    monkeypatch.chdir(root)
    options = {**WAYS[way], **TRANSFORMS[transform](root)}
    source, out = SOURCES.get(transform, "plain"), tmp_path / "place" / "out"
    bigload.reshard(source, tmp_path / "one", **options)
    words = [word for name, value in WAYS[way].items() for word in (f"--{name.replace('_', '-')}", value)]
    asked = [source, out, *words, *(word.format(root) for word in ASKED[transform])]
    asked = ["--max-shard-size" if word == "--max-shard-bytes" else word for word in asked]
    out.parent.mkdir()
    writer = (
        0 if way == "dcp" else 1
    )  # so small a checkpoint is one file of that layout, which the first process writes
    run_until_killed(2, writer, *asked, tell=tmp_path / "tell")
    assert not out.exists()
    code, _, errors = finished(2, *asked, "--resume")
    assert code == 0, errors
    assert contents(out) == contents(tmp_path / "one")
