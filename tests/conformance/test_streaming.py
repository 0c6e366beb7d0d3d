"""Models of transformers stream: the same answers, also when forwards break off, within the memory that is allowed."""

import copy
import threading

import pytest
import torch
from streamed_models import blocks_of, settled

import bigload
from tiny_models import CONFIGS, SIZES, answers, inputs_of, make

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

CONFIGS |= {
    "BartForConditionalGeneration": {
        **{"d_model": 32, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
        "decoder_start_token_id": 2,
    },
    "AlbertForMaskedLM": {**SIZES, "embedding_size": 16},
    "DebertaV2ForMaskedLM": {
        **SIZES,
        **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"},
        "max_position_embeddings": 32,
    },
    "SwinForImageClassification": {
        **{"image_size": 8, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    },
    "RecurrentGemmaForCausalLM": {**SIZES, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "Qwen2MoeForCausalLM": {
        **SIZES,
        **{"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "shared_expert_intermediate_size": 32,
    },
}
EVERY_DAY = ("LlamaForCausalLM", "DebertaV2ForMaskedLM", "MixtralForCausalLM")
FAMILIES = [
    *EVERY_DAY,
    *(pytest.param(family, marks=pytest.mark.slow) for family in CONFIGS if family not in EVERY_DAY),
]
SMALL = {"prefetch_bytes": "40KB", "resident_bytes": 0}


def streamed(model, folder, **options):
    """Return a copy of `model` with all of its weights in files."""
    return bigload.disk_offload(copy.deepcopy(model), folder, **(SMALL | options))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_plain_model_within_the_memory_that_was_allowed(family, tmp_path):
    plain = make(transformers, family)
    expected = answers(plain)
    model = streamed(plain, tmp_path)
    answers(model)  # `generate` gives encoders hooks, which then stay
    with settled(model):
        for _ in range(2):
            found = answers(model)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
    blocks = blocks_of(model)
    largest = max(block.num_bytes for block in blocks.values())
    deepest = sum(sorted(block.num_bytes for name, block in blocks.items())[-2:])
    peak = max(forward.peak_bytes for forward in model.bigload_stats().forwards)
    assert peak <= 40_000 + largest + deepest


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    plain = make(transformers, "LlamaForCausalLM")
    return plain, answers(plain), streamed(plain, tmp_path_factory.mktemp("llama"))


def test_generate_may_end_early(llama):
    _, expected, model = llama

    class Stop(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return ids.shape[1] >= 14

    class Fails(transformers.generation.streamers.BaseStreamer):
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 3:
                raise KeyboardInterrupt

        def end(self):
            pass

    with settled(model):
        criteria = transformers.StoppingCriteriaList([Stop()])
        ids = model.generate(**inputs_of(model), stopping_criteria=criteria, max_new_tokens=9, do_sample=False)
        assert ids.shape[1] == 14
        with pytest.raises(KeyboardInterrupt):
            model.generate(**inputs_of(model), streamer=Fails(), max_new_tokens=9, do_sample=False)
        assert torch.equal(answers(model)[1], expected[1])


def test_threads_generate_with_one_model(llama):
    _, expected, model = llama
    found = []
    with settled(model):
        threads = [threading.Thread(target=lambda: found.append(answers(model))) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join(120) for thread in threads]
    assert len(found) == 3
    assert all(torch.equal(logits, expected[0]) and torch.equal(ids, expected[1]) for logits, ids in found)


def test_inner_modules_can_be_called_and_copied_by_themselves(llama):
    plain, _, model = llama
    x, ids = torch.randn(1, 3, 32), torch.arange(3)[None]
    with settled(model):
        assert torch.equal(model.model.layers[2].mlp(x), plain.model.layers[2].mlp(x))
        assert torch.equal(model.get_input_embeddings()(ids), plain.get_input_embeddings()(ids))
        assert torch.equal(copy.deepcopy(model.model.layers[1].mlp)(x), plain.model.layers[1].mlp(x))


@pytest.mark.slow
def test_gradient_checkpointing_and_adapters_give_the_gradients_of_the_plain_model(tmp_path):
    plain = make(transformers, "LlamaForCausalLM")
    gradients = []
    for model in (copy.deepcopy(plain), streamed(plain, tmp_path)):
        model.requires_grad_(False)
        model.gradient_checkpointing_enable()
        model.train()
        embeds = torch.linspace(-1, 1, 12 * 32).reshape(1, 12, 32).requires_grad_()
        model(inputs_embeds=embeds).logits.square().sum().backward()
        gradients.append(embeds.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "layer"])
def test_a_compiled_model_or_layer_gives_what_it_gives_otherwise(llama, what):
    _, expected, model = llama
    model = copy.deepcopy(model)
    if what == "model":
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            found = [compiled(**inputs_of(model)).logits for _ in range(3)]
    else:
        model.model.layers[1].compile(backend="eager")
        with torch.no_grad():
            found = [model(**inputs_of(model)).logits for _ in range(3)]
    assert all(torch.allclose(each, expected[0], atol=1e-5) for each in found)
