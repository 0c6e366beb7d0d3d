"""Quantised checkpoints of transformers answer, wherever their weights are, as transformers has them in memory."""

import json

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload.generation.planned_model import PlannedModel
from bigload.generation.text_generator import Sampling, TextGenerator

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

IDS = torch.arange(7)[None]
BLOCKS = [
    "model.embed_tokens",
    *(f"model.layers.{index}" for index in range(3)),
    "model.norm",
    "model.rotary_emb",
    "lm_head",
]
MAPS = {
    "disk": {"": "disk"},
    "half": {name: "cpu" if index % 2 else "disk" for index, name in enumerate(BLOCKS)},
    "memory": {"": "cpu"},
}


def of_bitsandbytes(**settings):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return transformers.BitsAndBytesConfig(**settings)


def of_torchao(name):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return transformers.TorchAoConfig(getattr(torchao, name)())


CHANNELS = {"num_bits": 8, "strategy": "channel"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
LARGEST = {("int", 4): 7, ("int", 8): 127, ("float", 8): 448}
WORDS = {"bits": 4, "group_size": 32}
WRITTEN = {
    "gptq": lambda folder: of_gptqmodel(
        folder, {"quant_method": "gptq", **WORDS, "desc_act": True, "sym": False, "backend": "torch"}, gptq_layer
    ),
    "awq": lambda folder: of_gptqmodel(
        folder,
        {"quant_method": "awq", **WORDS, "version": "gemm", "zero_point": True, "backend": "torch_awq"},
        awq_layer,
    ),
    "compressed-int4": lambda folder: of_compressed_tensors(
        folder, "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    ),
    "compressed-int8": lambda folder: of_compressed_tensors(
        folder, "int-quantized", {**CHANNELS, "type": "int"}, {**TOKENS, "type": "int"}
    ),
    "compressed-float8": lambda folder: of_compressed_tensors(
        folder, "float-quantized", {**CHANNELS, "type": "float"}, {**TOKENS, "type": "float"}
    ),
}
METHODS = {
    "nf4": lambda: of_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": lambda: of_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda: of_bitsandbytes(load_in_8bit=True),
    "torchao-int8": lambda: of_torchao("Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": lambda: of_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao-float8": lambda: of_torchao("Float8WeightOnlyConfig"),
    "torchao-intx": lambda: of_torchao("IntxWeightOnlyConfig"),
}


def write_packed(model, folder, settings, **packed):
    """Write `model` with its linear layers in blocks as `packed` makes them, by hand: calibration takes too long."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        parts = {"weight": tensor} if not layer.endswith("_proj") else packed["of_layer"](*tensor.T.shape)
        tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def in_words(values, order):
    """Return 4-bit `values` in words of 32 bits, eight of the last dimension in each."""
    words = sum(values[..., start::8].long() << (4 * place) for place, start in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_layer(inputs, outputs):
    values, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(6, 10, (inputs // 32, outputs))
    return {
        "qweight": in_words(values.T, range(8)).T,
        "qzeros": in_words(zeros - 1, range(8)),
        "scales": (torch.rand(inputs // 32, outputs) * 0.01 + 0.005).half(),
        "g_idx": (torch.arange(inputs) // 32)[torch.randperm(inputs)].int(),
    }


def awq_layer(inputs, outputs):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": in_words(torch.randint(0, 16, (inputs, outputs)), order),
        "qzeros": in_words(torch.randint(6, 10, (inputs // 32, outputs)), order),
        "scales": (torch.rand(inputs // 32, outputs) * 0.01 + 0.005).half(),
    }


def of_gptqmodel(folder, settings, of_layer):
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    pytest.importorskip("optimum", reason="optimum is not installed")
    model = loaded(plain_model(folder)).half()
    write_packed(model, folder, settings, of_layer=of_layer)


def of_compressed_tensors(folder, form, weights, inputs=None):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    model = loaded(plain_model(folder))
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(symmetric=True, **weights),
        input_activations=inputs and quantization.QuantizationArgs(symmetric=True, **inputs),
    )
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format=form)
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            shape = module.weight_scale.shape
            largest = module.weight.detach().abs().view(shape[0], shape[1], -1).amax(-1)
            module.weight_scale.data = largest / (
                448 if weights["type"] == "float" else 2 ** weights["num_bits"] / 2 - 1
            )
    compressor = compressors.ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def plain_model(folder):
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16)


def empty(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    with bigload.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return bigload.prepare_quantised(model).eval()


@torch.no_grad()
def answer(model):
    return model(IDS, use_cache=False).logits


@pytest.fixture(scope="module", params=[*METHODS, *WRITTEN])
def quantised(request, tmp_path_factory):
    """Return the folder of a quantised checkpoint, and what transformers answers with it in memory."""
    folder = tmp_path_factory.mktemp("quantised")
    if request.param in WRITTEN:
        WRITTEN[request.param](folder)
        return folder, answer(loaded(folder))
    settings = METHODS[request.param]()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain_model(folder / "plain"), quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / "packed")
    return folder / "packed", answer(loaded(folder / "packed"))


@pytest.mark.parametrize("prefetch", [True, False], ids=["blocks", "modules"])
@pytest.mark.parametrize("place", MAPS)
def test_a_quantised_checkpoint_answers_from_wherever_it_is(quantised, place, prefetch):
    folder, expected = quantised
    model = bigload.load_checkpoint_and_dispatch(
        empty(folder), folder, MAPS[place], strict=True, force_hooks=True, prefetch=prefetch
    )
    for _ in range(2):
        assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("prefetch", [True, False], ids=["blocks", "modules"])
@pytest.mark.parametrize("has_run", [False, True], ids=["new", "used"])
def test_a_quantised_model_in_memory_is_offloaded_as_it_is(tmp_path, quantised, has_run, prefetch):
    folder, expected = quantised
    for offload in (
        lambda model: bigload.cpu_offload(model, "cpu", prefetch=prefetch),
        lambda model: bigload.disk_offload(model, tmp_path / "all", "cpu", prefetch=prefetch),
        lambda model: bigload.dispatch_model(model, MAPS["half"], offload_dir=tmp_path / "half", prefetch=prefetch),
    ):
        model = loaded(folder)
        if has_run:
            answer(model)
        layer = model.model.layers[0].mlp.up_proj
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if (
            getattr(state, "packing_format_for_cpu", False)
            or getattr(layer, "quantization_status", "") == "decompressed"
        ):
            with pytest.raises(bigload.DispatchedModelError, match="has run"):
                offload(model)
            continue
        model = offload(model)
        for _ in range(2):
            assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_offloaded_words_are_taken_by_a_kernel_that_leaves_them_as_they_are(tmp_path, method):
    """Without a backend in the config: the fastest kernels of gptqmodel rearrange weights once."""
    WRITTEN[method](tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["backend"]
    file.write_text(json.dumps(config))
    planned = PlannedModel.open(tmp_path, None, asked_by="run", keeps_cache=True)
    generator = TextGenerator(planned, planned.dispatched(), sampling=Sampling(temperature=0))
    assert len(generator.answer(IDS[0].tolist(), max_new_tokens=6).tokens) == 6


def test_a_plan_counts_packed_bytes_and_is_carried_out(quantised):
    folder, expected = quantised
    stored = sum(tensor.num_bytes for tensor in bigload.open_checkpoint(folder).tensors.values())
    plan = bigload.plan(folder, {"cpu": f"{stored * 2 // 3}B"})
    assert "disk" in plan.device_map.values()
    assert torch.equal(answer(bigload.load_and_dispatch(empty(folder), plan)), expected)


def test_a_run_answers_with_it_as_transformers_does(quantised):
    folder, _ = quantised
    stored = sum(tensor.num_bytes for tensor in bigload.open_checkpoint(folder).tensors.values())
    for plan in (None, bigload.plan(folder, {"cpu": f"{stored * 2 // 3}B"})):
        planned = PlannedModel.open(folder, plan, asked_by="run", keeps_cache=True)
        generator = TextGenerator(planned, planned.dispatched(), sampling=Sampling(temperature=0))
        answer = generator.answer(IDS[0].tolist(), max_new_tokens=6)
        expected = loaded(folder).generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert list(answer.tokens) == expected[0, IDS.shape[1] :].tolist()


def test_the_kv_cache_of_a_plan_is_in_the_dtype_that_it_computes_in(quantised):
    folder, _ = quantised
    plan = bigload.plan(folder, {"cpu": "1GiB"}, context=64)
    config = transformers.AutoConfig.from_pretrained(folder)
    of_a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2  # 16 bits
    assert sum(use.kv_bytes for use in plan.devices) == 64 * of_a_token


def test_a_map_that_is_made_counts_packed_bytes(quantised):
    folder, expected = quantised
    stored = sum(tensor.num_bytes for tensor in bigload.open_checkpoint(folder).tensors.values())
    model = bigload.load_checkpoint_and_dispatch(
        empty(folder),
        folder,
        "auto",
        max_memory={"cpu": stored + 100_000},
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    assert set(model.hf_device_map.values()) == {"cpu"}
    assert torch.equal(answer(model), expected)


def test_a_model_with_plain_layers_is_told_what_it_lacks(quantised):
    folder, expected = quantised
    with bigload.init_empty_weights(include_buffers=False):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if "_weight_qdata" in "".join(bigload.open_checkpoint(folder).tensors):  # torchao has no layers of its own
        model = bigload.load_checkpoint_and_dispatch(model, folder, {"": "disk"})
        assert torch.equal(answer(model), expected)
    else:
        with pytest.raises(bigload.LoadError) as refused:
            bigload.load_checkpoint_and_dispatch(model, folder, {"": "disk"})
        assert "prepare_quantised" in refused.value.hint
