"""Models of transformers in workers: logits of one process within 1e-5, and what they generate token for token."""

import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from parallel_families import FAMILIES, inputs_of, logits_of, make  # noqa: E402 - needs nothing, means nothing without

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

BY_DEFAULT = ("llama-gqa", "gpt2", "t5")
LENGTH = {"max_new_tokens": 6, "min_new_tokens": 6}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def answers(model):
    """Return logits, tokens by each way to generate, and a number that is drawn after them."""
    inputs = inputs_of(model)
    with torch.no_grad():
        logits = logits_of(model(**inputs))
        torch.manual_seed(7)
        prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        can_generate = hasattr(model, "can_generate") and model.can_generate()
        tokens = {how: model.generate(**prompt, **LENGTH, **way) for how, way in WAYS.items() if can_generate}
        return logits, tokens, torch.rand(1)


def check(model, parallel, expected):
    logits, tokens, drawn = answers(model)
    found = logits_of(parallel(**inputs_of(model)))
    assert ((found - expected[0]).abs().max() / expected[0].abs().max()).item() < 1e-5
    assert ((logits - expected[0]).abs().max() / expected[0].abs().max()).item() < 1e-5
    assert tokens.keys() == expected[1].keys()
    for how, generated in tokens.items():
        assert torch.equal(generated, expected[1][how]), how
    assert torch.equal(drawn, expected[2])


def cases():
    for family in FAMILIES:
        for num_workers in (2, 4):
            marks = () if family in BY_DEFAULT and num_workers == 2 else (pytest.mark.slow,)
            yield pytest.param(family, num_workers, id=f"{family}-{num_workers}", marks=marks)


@pytest.mark.parametrize(("family", "num_workers"), list(cases()))
def test_workers_give_what_one_process_gives(family, num_workers):
    model = make(transformers, family)
    expected = answers(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with bigload.parallelize(model, num_workers, backend="gloo", timeout=300) as parallel:
        check(model, parallel, expected)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        held = [worker.weight_bytes for worker in parallel.report.workers]
    assert max(held) < whole + sum(buffer.nbytes for buffer in model.buffers())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert torch.equal(answers(model)[0], expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "bert", "gpt-neox"])
def test_folders_run_without_a_model(family, tmp_path):
    model = make(transformers, family)
    expected = answers(model)
    model.save_pretrained(tmp_path / "model")
    with bigload.parallelize(tmp_path / "model", 2, backend="gloo") as parallel:
        check(parallel.model, parallel, expected)
        assert all(worker.read_bytes for worker in parallel.report.workers)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_folder_of_ranks_runs_with_its_own_number_of_workers_and_another(tp, tmp_path):
    model = make(transformers, "llama")
    expected = answers(model)
    model.save_pretrained(tmp_path / "model")
    bigload.reshard(tmp_path / "model", tmp_path / "ranks", layout="ranks", tp=tp)
    with bigload.parallelize(tmp_path / "ranks", 2, backend="gloo") as parallel:
        check(parallel.model, parallel, expected)


def gaps(found, expected):
    return [(one - other).abs().max().item() for one, other in zip(found, expected, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "gpt2", "t5", "bart", "bert", "bloom", "falcon", "gpt-neox", "vit"])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_hidden_states_and_weights_of_attention_of_all_heads_come_back(family, num_workers):
    model = make(transformers, family)
    model.set_attn_implementation("eager")
    asked = {**inputs_of(model), "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model(**asked)
        names = [name for name in expected if name.endswith(("hidden_states", "attentions")) and expected[name]]
        assert len(names) >= 2
        with bigload.parallelize(model, num_workers, backend="gloo", timeout=300):
            found, nameless = model(**asked), model(**asked, return_dict=False)
    for name in names:
        assert max(gaps(found[name], expected[name]), default=0) < 1e-4, name
    tuples = [each for each in nameless if isinstance(each, tuple) and each and isinstance(each[0], torch.Tensor)]
    assert [[one.shape for one in each] for each in tuples] == [[one.shape for one in expected[name]] for name in names]


@pytest.mark.slow
def test_what_is_set_between_calls_counts_and_a_foreign_id_is_an_error():
    model = make(transformers, "llama")
    ids = torch.arange(3, 9).reshape(1, 6)
    with bigload.parallelize(model, 2, backend="gloo", timeout=60):
        model.generation_config.max_new_tokens = 2
        assert model.generate(ids).shape == (1, 8)
        with pytest.raises(bigload.WorkerError):
            model.generate(ids, max_new_tokens=3, no_such_argument=1)
        assert model.generate(ids).shape == (1, 8)
        model.config.use_cache = False
        assert model(ids).past_key_values is None
        for foreign in (model.config.vocab_size, -1):
            with pytest.raises(bigload.WorkerError, match="IndexError") as caught:
                model(torch.tensor([[foreign]]))
            assert caught.value.is_shared
        model.set_attn_implementation("eager")
        assert model(ids, output_attentions=True).attentions[0].shape == (1, model.config.num_attention_heads, 6, 6)


@pytest.mark.slow
def test_a_cache_goes_on_where_it_was():
    model = make(transformers, "llama-gqa")
    ids = torch.arange(3, 15).reshape(1, 12)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, 6:]
    with bigload.parallelize(model, 2, backend="gloo"):
        first = model(input_ids=ids[:, :6], use_cache=True)
        assert first.past_key_values.get_seq_length() == 6
        second = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        assert second.past_key_values is first.past_key_values
        assert first.past_key_values.get_seq_length() == 12
    torch.testing.assert_close(second.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_generation_that_stops_by_the_clock_stops_in_all_workers_at_once():
    model = make(transformers, "llama")
    ids = torch.arange(3, 9).reshape(1, 6)
    with bigload.parallelize(model, 2, backend="gloo", timeout=60):
        found = model.generate(ids, max_new_tokens=500, min_new_tokens=500, max_time=0.5, do_sample=False)
        assert 6 < found.shape[1] <= 506
        assert model.generate(ids, **LENGTH, do_sample=False).shape == (1, 12)


@pytest.mark.slow
def test_a_class_that_transformers_does_not_have_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "evil.Model"}}')
    with pytest.raises(bigload.OptionError, match="whose class transformers has, not 'NoSuchModel'"):
        bigload.parallelize(tmp_path, 2, backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
def test_caches_of_states_stay_in_workers_and_go_on(kind):
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        first = model(tokens, use_cache=True)
        expected = model(tokens[:, :1], cache_params=first.cache_params, use_cache=True).logits
        generated = model.generate(tokens, **LENGTH, do_sample=False)
        with bigload.parallelize(model, 2, backend="gloo"):
            found = model(tokens, use_cache=True)
            torch.testing.assert_close(found.logits, first.logits)
            again = model(tokens[:, :1], cache_params=found.cache_params, use_cache=True).logits
            torch.testing.assert_close(again, expected)
            assert torch.equal(model.generate(tokens, **LENGTH, do_sample=False), generated)
