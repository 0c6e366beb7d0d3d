"""Models of transformers answer the same wherever their weights are: all in RAM, some on disk, all on disk.

On two accelerators: `tests/simulated/test_dispatched_models.py`.
"""

import copy

import pytest
import torch

import bigload
from tiny_models import CONFIGS, answers, make

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MAPS = ["all cpu", "cpu and disk", "all disk"]


@pytest.fixture(scope="module", params=CONFIGS)
def plain(request, tmp_path_factory):
    """A model, its answers, and a checkpoint of it."""
    model = make(transformers, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    save(model, folder)
    return model, answers(model), folder


def save(model, folder):
    kept = {group[0] for group in bigload.find_tied_parameters(model)}
    dropped = {name for group in bigload.find_tied_parameters(model) for name in group} - kept
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in dropped}
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def empty(model):
    with bigload.init_empty_weights():
        made = type(model)(copy.deepcopy(model.config)).eval()
    if model.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def device_map(model, name):
    if name != "cpu and disk":
        return {"": name.removeprefix("all ")}
    half = bigload.compute_module_sizes(model)[""] // 2
    return bigload.infer_auto_device_map(model, {"cpu": half}, model._no_split_modules)


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0]), "logits differ"
    assert torch.equal(found[1], expected[1]), "what is generated differs"


@pytest.mark.parametrize("where", MAPS)
def test_a_loaded_model_answers_as_the_plain_one(plain, where):
    model, expected, folder = plain
    loaded = empty(model)
    mapped = device_map(model, where)
    bigload.load_checkpoint_and_dispatch(loaded, folder, mapped, force_hooks=True, strict=True)
    assert any(parameter.is_meta for parameter in loaded.parameters()) == ("disk" in mapped.values())
    for _ in range(2):
        assert_same(answers(loaded), expected)


@pytest.mark.parametrize("where", MAPS)
def test_a_dispatched_model_answers_as_the_plain_one(plain, where, tmp_path):
    model, expected, _ = plain
    dispatched = bigload.dispatch_model(
        copy.deepcopy(model), device_map(model, where), offload_dir=tmp_path, force_hooks=True
    )
    assert_same(answers(dispatched), expected)
    bigload.remove_hook_from_submodules(dispatched)
    assert_same(answers(dispatched), expected)


@pytest.mark.parametrize("offload", [bigload.cpu_offload, bigload.disk_offload])
def test_an_offloaded_model_answers_as_the_plain_one(plain, offload, tmp_path):
    model, expected, _ = plain
    where = (tmp_path,) if offload is bigload.disk_offload else ()
    offloaded = offload(copy.deepcopy(model), *where)
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_same(answers(offloaded), expected)


def test_a_copy_of_a_dispatched_model_answers_as_well(plain):
    model, expected, folder = plain
    loaded = bigload.load_checkpoint_and_dispatch(empty(model), folder, device_map(model, "cpu and disk"))
    copied = copy.deepcopy(loaded)
    del loaded
    assert_same(answers(copied), expected)


def test_a_dispatched_model_can_be_saved_and_loaded_by_transformers(plain, tmp_path):
    model, expected, folder = plain
    loaded = bigload.load_checkpoint_and_dispatch(empty(model), folder, device_map(model, "cpu and disk"))
    loaded.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert_same(answers(again), expected)


@pytest.mark.parametrize("offload", [bigload.cpu_offload, bigload.disk_offload])
def test_an_offloaded_model_can_be_saved_by_transformers(offload, tmp_path):
    model = make(transformers, "LlamaForCausalLM")
    expected = answers(model)
    offload(model, *([tmp_path / "offloaded"] if offload is bigload.disk_offload else ()))
    model.save_pretrained(tmp_path / "saved")
    assert_same(answers(type(model).from_pretrained(tmp_path / "saved").eval()), expected)


def test_the_state_dict_of_a_dispatched_model_is_that_of_the_plain_one(plain):
    model, _, folder = plain
    loaded = bigload.load_checkpoint_and_dispatch(empty(model), folder, {"": "disk"})
    found = bigload.get_state_dict_offloaded_model(loaded)
    expected = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


RESIZED = {
    "LlamaForCausalLM": {"model": "cpu", "model.embed_tokens": "cpu", "lm_head": "disk"},
    "GPT2LMHeadModel": {"transformer": "cpu", "transformer.wte": "disk", "lm_head": "disk"},
}


@pytest.mark.parametrize("mean_resizing", [False, True])
@pytest.mark.parametrize("where", ["cpu", "parts", "disk"])
@pytest.mark.parametrize("family", RESIZED)
def test_resized_embeddings_of_a_dispatched_model_are_right_or_refused(family, where, mean_resizing, tmp_path):
    ids = torch.arange(3, 9).reshape(1, 6)
    model = make(transformers, family)
    expected = model(ids).logits
    device_map = RESIZED[family] if where == "parts" else {"": where}
    bigload.dispatch_model(model, device_map, offload_dir=tmp_path)
    if where == "cpu":
        model.resize_token_embeddings(100, mean_resizing=mean_resizing)
    else:
        with pytest.raises(bigload.AbsentWeightError, match=r"lm_head\.weight|embed_tokens\.weight|wte\.weight"):
            model.resize_token_embeddings(100, mean_resizing=mean_resizing)
    for _ in range(2):
        assert torch.equal(model(ids).logits[..., :96], expected)


@pytest.mark.parametrize("offload", [bigload.cpu_offload, bigload.disk_offload])
def test_a_fully_offloaded_model_generates_from_what_is_on_its_device(offload, tmp_path):
    plain = make(transformers, "WhisperForConditionalGeneration")
    model = offload(copy.deepcopy(plain), *([tmp_path] if offload is bigload.disk_offload else ()))
    assert model.device == model.get_encoder().device == torch.device("cpu")
    features = torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32)
    assert torch.equal(model.generate(features, max_new_tokens=4), plain.generate(features, max_new_tokens=4))


def test_an_offloaded_model_assists_another(tmp_path):
    plain = make(transformers, "LlamaForCausalLM")
    model, assistant = bigload.disk_offload(copy.deepcopy(plain), tmp_path), bigload.cpu_offload(copy.deepcopy(plain))
    ids = torch.arange(3, 9).reshape(1, 6)
    expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, assistant_model=assistant, max_new_tokens=5, do_sample=False), expected)


def test_a_pipeline_takes_a_model_that_is_offloaded_to_the_cpu():
    model = make(transformers, "ViTForImageClassification")
    processor = transformers.ViTImageProcessor(size={"height": 8, "width": 8})
    images = pytest.importorskip("PIL.Image").new("RGB", (8, 8), (200, 10, 60))
    answered = [
        transformers.pipeline("image-classification", model=each, image_processor=processor)(images)
        for each in (copy.deepcopy(model), bigload.cpu_offload(model))
    ]
    assert answered[0] == answered[1]
