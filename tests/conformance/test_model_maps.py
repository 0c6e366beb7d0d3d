"""Device maps made of real families' modules: accelerate's own where it is right, and ones that it can carry out."""

import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
theirs = accelerate.utils.modeling

from peer_models import CONFIGS, SIZES, logits, made_of  # noqa: E402 - skips without transformers

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

OTHERS = (
    transformers.BertConfig(**SIZES, max_position_embeddings=64, is_decoder=True),
    transformers.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=96),
)


@pytest.fixture(params=[*CONFIGS, *OTHERS], ids=lambda config: config.model_type)
def model(request):
    return made_of(request.param)


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
