"""Plans carried out by transformers: `from_pretrained(device_map=plan.device_map)` answers as the whole model does."""

import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def llama4_vision():
    config = transformers.Llama4VisionConfig(
        **{**WIDE, "intermediate_size": 128}, num_hidden_layers=3, image_size=28, patch_size=14,
        vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
    )  # fmt: skip
    return transformers.Llama4VisionModel(config), {"pixel_values": torch.ones(1, 3, 28, 28)}


def sam_vision():
    config = transformers.SamVisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8,
        mlp_dim=32, global_attn_indexes=[1],
    )  # fmt: skip
    return transformers.SamVisionModel(config), {"pixel_values": torch.ones(1, 3, 32, 32)}


def blip2():
    config = transformers.Blip2Config(
        vision_config={**WIDE, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
        qformer_config={**WIDE, "num_hidden_layers": 2, "encoder_hidden_size": 32, "vocab_size": 32},
        text_config={"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "vocab_size": 64,
                     "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
                     "pad_token_id": 1},
        num_query_tokens=4,
        image_token_index=63,
    )  # fmt: skip
    ids = torch.tensor([[63, 63, 63, 63, 5, 6]])
    inputs = {"pixel_values": torch.ones(1, 3, 28, 28), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return transformers.Blip2ForConditionalGeneration(config), inputs


OWNED = {llama4_vision: "class_embedding", sam_vision: "vision_encoder.pos_embed", blip2: "query_tokens"}
"""Models, and a parameter that a module owns itself whose other weights are spread."""


def tensors_of(outputs):
    return [value for value in outputs.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("build", OWNED, ids=lambda build: build.__name__)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_parameter_is_where_its_owner_runs(build, share, tmp_path):
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    model.save_pretrained(tmp_path)
    checkpoint = bigload.open_checkpoint(tmp_path)
    # With a share of 0, all that can be is on disk.
    budget = max(int(checkpoint.total_bytes * share), 1)
    while True:
        try:
            plan = bigload.plan(checkpoint, {"cpu": budget})
            break
        except bigload.DoesNotFitError as error:
            budget += sum(error.shortfalls.values())
    device_map = plan.device_map
    assert "disk" in device_map.values()
    assert device_map[OWNED[build]] == "cpu"
    again = type(model).from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload").eval()
    with torch.no_grad():
        expected, found = tensors_of(model(**inputs)), tensors_of(again(**inputs))
    assert expected
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
