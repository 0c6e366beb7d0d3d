"""Pipelines of diffusers on the command line: components, and the three ways of offloading them."""

import json

import pytest

from builders import make_pipeline, write_shard

LIMITS = "-m cuda:0=1KiB,cpu=1GiB --overhead 0"


@pytest.fixture
def pipeline(here):
    folder = make_pipeline(here / "sd")
    blocks = {f"blocks.{index}.{part}.weight": ("F32", [4, 4]) for index in range(4) for part in ("attn", "mlp")}
    write_shard(folder / "unet" / "diffusion_pytorch_model.safetensors", blocks)
    return folder


def test_inspect_lists_components(run, pipeline):
    lines = run("bigload inspect sd").stdout.splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("COMPONENT"))
    assert [line.split()[:3] for line in lines[header + 1 : header + 5]] == [
        ["scheduler", "diffusers.DDIMScheduler", "-"],
        ["text_encoder", "transformers.CLIPTextModel", "2"],
        ["unet", "diffusers.UNet2DConditionModel", "8"],
        ["vae", "diffusers.AutoencoderKL", "1"],
    ]


# Components of 192, 512 and 16 bytes. The unet has blocks of 128, the text encoder has none and stays whole.
@pytest.mark.parametrize(("offload", "workspace"), [("model", 512), ("sequential", 192), ("group", 384)])
def test_offload_says_what_is_on_the_card_at_a_time(run, pipeline, offload, workspace):
    plan = json.loads(run(f"bigload plan sd {LIMITS} --offload {offload} --json").stdout)
    card, ram = plan["devices"][:2]
    assert (card["weights_bytes"], card["workspace_bytes"], ram["weights_bytes"]) == (0, workspace, 720)


@pytest.mark.parametrize(
    ("offload", "said"), [("model", "the largest streamed module"), ("group", "two streamed modules")]
)
def test_the_workspace_is_said_to_hold_what_it_holds(run, pipeline, offload, said):
    done = run(f"bigload plan sd {LIMITS} --offload {offload}")
    assert f"Workspace holds {said}" in done.stdout
    assert "--prefetch" not in done.stdout


def test_a_card_too_small_for_a_component_is_refused_with_what_would_do(run, pipeline):
    limits = "-m cuda:0=511,cpu=1GiB --overhead 0"
    done = run(f"bigload plan sd {limits} --offload model")
    assert done.code == 3
    assert "cuda:0 is short by 1 B" in done.stderr
    assert "the largest module is unet, 512 B" in done.stderr
    assert run(f"bigload plan sd {limits} --offload sequential").code == 0


@pytest.mark.parametrize("other", ["--prefetch", "--policy balanced", "--no-split unet", "-m cpu=1GiB"])
def test_offload_contradicts_options_that_it_decides(run, pipeline, other):
    limits = "" if other.startswith("-m") else LIMITS
    done = run(f"bigload plan sd {limits} --offload model {other}")
    assert done.code == 2
    assert "--offload model" in done.stderr
