"""Device maps made of real families' modules: accelerate's own where it is right, and ones that it can carry out."""

import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
theirs = accelerate.utils.modeling

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}


def configs():
    yield transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
    yield transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
    yield transformers.GPTNeoXConfig(**SIZES)
    yield transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=64)
    yield transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    yield transformers.BertConfig(**SIZES, max_position_embeddings=64, is_decoder=True)
    yield transformers.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=96)
    yield transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, vocab_size=96)


@pytest.fixture(params=configs(), ids=lambda config: config.model_type)
def model(request):
    torch.manual_seed(0)
    kind = transformers.AutoModelForSeq2SeqLM if request.param.is_encoder_decoder else transformers.AutoModelForCausalLM
    return kind.from_config(request.param).eval()


def logits(model):
    ids = torch.arange(12).reshape(1, 12) % 90
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("classes", ["own", "none"])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.7, 0.9])
def test_first_fit_is_accelerates_wherever_that_covers_the_model(model, share, classes):
    total = bigload.compute_module_sizes(model)[""]
    no_split = list(model._no_split_modules) if classes == "own" else None
    memory = {0: int(total * share), 1: total // 4, "cpu": total // 3}
    ours = bigload.infer_auto_device_map(model, memory, no_split)
    bigload.check_device_map(model, ours)
    try:
        reference = theirs.infer_auto_device_map(model, dict(memory), no_split)
        theirs.check_device_map(model, reference)
    except (IndexError, ValueError) as error:
        pytest.skip(f"accelerate has no map: {error!r:.80}")
    assert dict(ours) == dict(reference)


@pytest.mark.parametrize("policy", [None, *bigload.Policy])
def test_a_map_can_be_carried_out(model, policy, tmp_path):
    expected = logits(model)
    total = bigload.compute_module_sizes(model)[""]
    device_map = bigload.infer_auto_device_map(
        model, {"cpu": total * 2 // 3}, list(model._no_split_modules) if policy is None else None, policy=policy
    )
    assert "disk" in device_map.values()
    dispatched = accelerate.dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(logits(dispatched), expected)
