"""Layouts are opened by the libraries that run models: safetensors, transformers, accelerate.

The bytes are written by the tests' own simplest writer, so these tests are about form alone. Skips where the libraries
are missing; run with them by: pip install -c constraints.txt -e '.[dev,peers]'
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES
from bigload.layouts.choices import OffloadFormat
from bigload.layouts.formats.dat import has_dat_form
from bigload.layouts.formats.offload_reader import OffloadFolder
from bigload.layouts.resharding.reshard import reshard
from bigload.planning.planner import plan
from builders import laid_out, write_output, write_shard

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from peer_models import kind_of, logits, made_of  # noqa: E402 - skips without transformers

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "untied": transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    "tied": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "tied stacks": transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=96),
}
SOURCES = ["safetensors", "bin"]


@pytest.fixture(params=CONFIGS)
def model(request):
    return made_of(CONFIGS[request.param])


@pytest.fixture(params=SOURCES)
def checkpoint(request, model, tmp_path):
    """The model as transformers saves it, or its whole state dict, tied names as one tensor, as torch does."""
    folder = tmp_path / "source"
    if request.param == "safetensors":
        model.save_pretrained(folder, max_shard_size="40KB")
    else:
        folder.mkdir()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    return open_checkpoint(folder)


def write(output, checkpoint, folder):
    write_output(output, checkpoint.root, folder)
    (folder / "config.json").write_bytes((checkpoint.root / "config.json").read_bytes())
    return folder


def opened_by_transformers(model, folder):
    found, info = kind_of(model.config).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


def opened_by_accelerate(model, folder):
    with accelerate.init_empty_weights():
        found = kind_of(model.config).from_config(model.config).eval()
    found.tie_weights()
    return accelerate.load_checkpoint_and_dispatch(found, str(folder), device_map={"": "cpu"})


@pytest.mark.parametrize("opened", [opened_by_transformers, opened_by_accelerate])
@pytest.mark.parametrize("limit", [None, 30_000])
def test_shards_are_a_model_that_gives_the_same_logits(model, checkpoint, tmp_path, opened, limit):
    out = write(laid_out("shards", checkpoint, max_shard_bytes=limit), checkpoint, tmp_path / "out")
    assert torch.equal(logits(opened(model, out)), logits(model))


def test_one_name_of_those_that_are_tied_stays_and_it_is_the_one_save_pretrained_keeps(model, checkpoint, tmp_path):
    out = write(laid_out("shards", checkpoint, max_shard_bytes=None), checkpoint, tmp_path / "out")
    model.save_pretrained(tmp_path / "saved", max_shard_size="1GB")
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "saved/model.safetensors").keys()


def test_a_head_that_no_config_ties_is_not_lost_though_the_file_stores_it_once(tmp_path):
    config = CONFIGS["untied"]
    model = kind_of(config).from_config(config).eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    source = tmp_path / "source"
    source.mkdir()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    silent = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"}
    (source / "config.json").write_text(json.dumps({**silent, "architectures": [type(model).__name__]}))
    checkpoint = open_checkpoint(source)
    out = write(laid_out("shards", checkpoint), checkpoint, tmp_path / "out")
    assert torch.equal(logits(opened_by_transformers(model, out)), logits(model))


@pytest.mark.parametrize("opened", [opened_by_transformers, opened_by_accelerate])
def test_device_folders_are_a_model_that_gives_the_same_logits(model, checkpoint, tmp_path, opened):
    made = plan(checkpoint, {"cuda:0": 110_000, "cpu": 50_000}, overhead=0)
    out = write(laid_out("devices", checkpoint, plan=made, max_shard_bytes=20_000), checkpoint, tmp_path / "out")
    assert len({use.device for use in made.devices if use.weights_bytes}) > 1
    assert torch.equal(logits(opened(model, out)), logits(model))


@pytest.mark.parametrize("opened", [opened_by_transformers, opened_by_accelerate])
def test_an_offload_folder_of_everything_is_a_model(model, checkpoint, tmp_path, opened):
    out = write(laid_out("offload", checkpoint), checkpoint, tmp_path / "out")
    assert torch.equal(logits(opened(model, out)), logits(model))


@pytest.mark.parametrize("offload_format", OffloadFormat)
def test_accelerate_runs_a_model_from_an_offload_folder(model, checkpoint, tmp_path, offload_format):
    out = write(laid_out("offload", checkpoint, offload_format=offload_format), checkpoint, tmp_path / "out")
    with accelerate.init_empty_weights():
        found = kind_of(model.config).from_config(model.config).eval()
    found.tie_weights()
    where = {"offload_dir": str(out)}
    if offload_format == "safetensors":
        where["offload_index"] = OffloadFolder.open(out).accelerate_index()
    dispatched = accelerate.dispatch_model(found, {"": "disk"}, main_device="cpu", **where)
    assert torch.equal(logits(dispatched), logits(model))


@pytest.mark.parametrize("offload_format", OffloadFormat)
def test_accelerate_loads_each_weight_by_each_of_its_names(model, checkpoint, tmp_path, offload_format):
    out = write(laid_out("offload", checkpoint, offload_format=offload_format), checkpoint, tmp_path / "out")
    index = OffloadFolder.open(out).accelerate_index()
    if offload_format == "dat":
        assert index == json.loads((out / "index.json").read_text())
    loader = accelerate.utils.OffloadedWeightsLoader(save_folder=str(out), index=index)
    state = model.state_dict()
    assert set(loader) == state.keys()
    assert all(torch.equal(loader[name], tensor) for name, tensor in state.items())


FITTING = [name for name, dtype in DTYPES.items() if has_dat_form(dtype, [2])]
SHAPES = [[2, 4], [1], [], [0], [3, 0]]


@pytest.mark.parametrize("dtype", FITTING)
def test_dat_files_have_the_bytes_and_the_index_that_accelerate_gives_them(tmp_path, dtype):
    shapes = [shape for shape in SHAPES if has_dat_form(DTYPES[dtype], shape)]
    source = tmp_path / "source"
    source.mkdir()
    write_shard(source / "model.safetensors", {f"w{len(shape)}.{sum(shape)}": (dtype, shape) for shape in shapes})
    checkpoint = open_checkpoint(source)
    out = write_output(laid_out("offload", checkpoint, offload_format=OffloadFormat.DAT), source, tmp_path / "out")
    state = load_file(source / "model.safetensors")
    accelerate.utils.offload_state_dict(str(tmp_path / "theirs"), state)
    assert {file.name: file.read_bytes() for file in out.glob("*.dat")} == {
        file.name: file.read_bytes() for file in (tmp_path / "theirs").glob("*.dat")
    }
    assert json.loads((out / "index.json").read_text()) == json.loads((tmp_path / "theirs/index.json").read_text())
    loader = accelerate.utils.OffloadedWeightsLoader(save_folder=str(out))
    for name, tensor in state.items():
        found = loader[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    read = OffloadFolder.open(tmp_path / "theirs").tensors
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in read.items()} == {
        name: (dtype, tuple(tensor.shape)) for name, tensor in state.items()
    }


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [4]), ("F6_E2M3", [4]), ("F6_E3M2", [4]), ("U64", [])])
def test_what_is_refused_for_dat_files_is_what_accelerate_cannot_load(tmp_path, dtype, shape):
    assert not has_dat_form(DTYPES[dtype], shape)
    (tmp_path / "w.dat").write_bytes(bytes(max(1, math.prod(shape) * DTYPES[dtype].bits // 8)))
    form = {"dtype": DTYPES[dtype].torch_name or dtype.lower(), "shape": shape}
    with pytest.raises(TypeError):
        accelerate.utils.load_offloaded_weight(str(tmp_path / "w.dat"), form)


def test_a_folder_that_accelerate_offloaded_a_model_to_is_read(tmp_path):
    torch.manual_seed(0)
    found = kind_of(CONFIGS["tied"]).from_config(CONFIGS["tied"]).eval()
    state = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    accelerate.disk_offload(found, str(tmp_path / "offload"), execution_device="cpu")
    tensors = OffloadFolder.open(tmp_path / "offload").tensors
    assert tensors.keys() == state.keys()
    for name, tensor in tensors.items():
        data = (tmp_path / "offload" / tensor.span.file).read_bytes()[tensor.span.start : tensor.span.stop]
        assert data == state[name].numpy().tobytes()


def test_what_huggingface_hub_says_of_shared_tensors_in_a_header_is_read(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    table = torch.randn(4, 4)
    hub.save_torch_state_dict({"a.weight": table, "b.weight": table}, tmp_path)
    opened = OffloadFolder.open(tmp_path)
    assert opened.tensors.keys() == {"a.weight", "b.weight"}
    assert len(opened.aliases) == 1


def test_a_lora_adapter_is_found_by_peft_after_a_reshard(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    base = transformers.LlamaForCausalLM(config).eval()
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = adapted(torch.arange(8)[None]).logits
    adapted.save_pretrained(tmp_path / "adapter")
    out = reshard(tmp_path / "adapter", tmp_path / "out", layout="shards", max_shard_bytes=64).out
    again = peft.PeftModel.from_pretrained(adapted.unload(), out).eval()
    assert torch.equal(again(torch.arange(8)[None]).logits, expected)


@pytest.mark.parametrize("max_shard_bytes", [None, 300_000])
def test_a_model_of_diffusers_is_found_by_it_after_a_reshard(tmp_path, max_shard_bytes):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    model = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=8, **blocks)
    model.save_pretrained(tmp_path / "unet")
    reshard(tmp_path / "unet", tmp_path / "out", layout="shards", max_shard_bytes=max_shard_bytes)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("max_shard_bytes", "is_safe"), [(None, False), (300_000, True)])
def test_a_pipeline_of_diffusers_is_loaded_by_it_after_a_reshard(tmp_path, max_shard_bytes, is_safe):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    unet = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=8, **blocks)
    pipeline = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler(num_train_timesteps=7))
    pipeline.save_pretrained(tmp_path / "pipeline", safe_serialization=is_safe)
    reshard(tmp_path / "pipeline", tmp_path / "out", layout="shards", max_shard_bytes=max_shard_bytes)
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert again.scheduler.config.num_train_timesteps == 7
    assert all(torch.equal(tensor, again.unet.state_dict()[name]) for name, tensor in unet.state_dict().items())
