"""Plans and files of bigload work in the libraries that run models. Skips where they are missing.

Run with them by: pip install -c constraints.txt -e '.[dev,peers]'
"""

import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from peer_models import CONFIGS, SIZES, kind_of, logits, made_of  # noqa: E402 - skips without transformers

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

OPT = transformers.OPTConfig(
    **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
    ffn_dim=64,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
)

RENAMED_IN_MEMORY = {"gpt_neox": "embed_out is lm_head in memory", "mixtral": "experts are fused in memory"}
"""Families whose tensors have other names in memory than in their checkpoints, which is where `load` finds them."""


@pytest.fixture(params=[*CONFIGS, OPT], ids=lambda config: config.model_type)
def saved(request, tmp_path):
    """A random model of some family, and the folder it was saved to."""
    model, folder = made_of(request.param), tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="40KB")
    return kind_of(request.param), model, folder


def test_transformers_reads_a_resharded_folder_as_the_original(saved, tmp_path):
    kind, model, folder = saved
    total = bigload.open_checkpoint(folder).total_bytes
    plan = bigload.plan(folder, {"cuda:0": total // 2, "cpu": total // 2}, overhead=0)
    out = bigload.reshard(plan, tmp_path / "split").out
    assert torch.equal(logits(kind.from_pretrained(out).eval()), logits(model))


def test_a_plan_is_a_device_map_for_transformers(saved, tmp_path):
    kind, model, folder = saved
    total = bigload.open_checkpoint(folder).total_bytes
    plan = bigload.plan(folder, {"cpu": total * 4 // 5}, names="transformers")
    assert plan.weights_on(bigload.Device("disk"))
    device_map = dict(plan.device_map)
    loaded = kind.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload").eval()
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)


def test_a_plan_covers_what_accelerate_checks(saved):
    _, model, folder = saved
    plan = bigload.plan(folder, {"cuda:0": "1GiB"}, names="transformers")
    accelerate.utils.modeling.check_device_map(model, dict(plan.device_map))


def test_a_meta_model_takes_a_checkpoint_in_place(saved):
    kind, model, folder = saved
    if model.config.model_type in RENAMED_IN_MEMORY:
        pytest.skip(RENAMED_IN_MEMORY[model.config.model_type])
    with torch.device("meta"):
        empty = kind.from_config(model.config)
    bigload.load(folder, into=empty)
    loaded = empty.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
