"""Parameters that are made of several tensors are offloaded in these, and put together when their layer runs."""

import pytest
import torch
from packed_tensors import RowsOf8Bits, packed_model
from streamed_models import blocks_of

import bigload

INPUTS = torch.linspace(-1, 1, 192).view(3, 64)
SCALES_AND_DATA = 64 * 64 + 64 * 4


@pytest.mark.parametrize("prefetch", [True, False], ids=["blocks", "modules"])
@pytest.mark.parametrize("place", ["ram", "disk", "half"])
def test_a_model_with_packed_weights_answers_as_without_hooks(tmp_path, place, prefetch):
    model, expected = packed_model(), packed_model()(INPUTS)
    if place == "ram":
        bigload.cpu_offload(model, "cpu", prefetch=prefetch)
    elif place == "disk":
        bigload.disk_offload(model, tmp_path, "cpu", prefetch=prefetch)
    else:
        half = {str(index): "cpu" if index < 3 else "disk" for index in range(6)}
        bigload.dispatch_model(model, half, offload_dir=tmp_path, prefetch=prefetch)
    for _ in range(2):
        assert torch.equal(model(INPUTS), expected)
    assert isinstance(model[4].weight, RowsOf8Bits)
    assert model[4].weight.is_meta


def test_packed_weights_stream_in_their_parts_and_no_more(tmp_path):
    num_bytes = bigload.compute_module_sizes(packed_model())[""]
    model = bigload.disk_offload(packed_model(), tmp_path, "cpu")
    model(INPUTS)
    blocks = blocks_of(model).values()
    assert sum(block.num_bytes for block in blocks) == num_bytes
    assert all(block.is_in_place for block in blocks)
    assert (tmp_path / "2._weight_data8.dat").stat().st_size == 64 * 64


def test_packed_weights_are_what_they_were_once_hooks_are_gone(tmp_path):
    model = bigload.disk_offload(packed_model(), tmp_path, "cpu")
    bigload.remove_hook_from_submodules(model)
    assert not model[0].weight.is_meta
    assert torch.equal(model(INPUTS), packed_model()(INPUTS))


def test_packed_weights_count_with_all_parts():
    assert bigload.compute_module_sizes(packed_model())["0.weight"] == SCALES_AND_DATA
