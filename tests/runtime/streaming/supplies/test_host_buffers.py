"""Weights that are cast or realigned for each stay on the CPU."""

import gc
import json
from functools import partial

import pytest
import torch
from safetensors.torch import save, save_file
from streamed_models import Residuals, Tables, run_in_threads

import bigload
import builders
from bigload.errors import ReadError
from bigload.machine.files.page_cache import cached_bytes
from bigload.runtime.streaming.supplies import host_buffers

WIDTH, NUM_BLOCKS = 512, 6
BLOCK_BYTES = 2 * WIDTH * WIDTH * 4


Model = partial(Residuals, NUM_BLOCKS, WIDTH, bias=False)
INPUT = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


@pytest.fixture
def folder(tmp_path):
    save_file({name: value.bfloat16() for name, value in Model().state_dict().items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def allocations(monkeypatch):
    """The sizes of memory that was taken from the system for weights."""
    sizes = []
    allocate = host_buffers.allocate
    monkeypatch.setattr(host_buffers, "allocate", lambda size: sizes.append(size) or allocate(size))
    return sizes


def streamed(weights, **options):
    with bigload.init_empty_weights():
        model = Model()
    return bigload.cpu_offload(model, "cpu", state_dict=weights, **options)


def plain():
    model = Model()
    model.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()})
    with torch.no_grad():
        return model(INPUT)


def run(model, given=INPUT):
    with torch.no_grad():
        return model(given)


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_weights_in_another_dtype_give_the_results_of_a_cast_model(where, folder):
    weights = bigload.StoredWeights(folder)
    model = streamed(dict(weights) if where == "ram" else weights)
    for _ in range(3):
        assert torch.equal(run(model), plain())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_misaligned_weights_give_the_same_results(tmp_path):
    raw = save(Model().state_dict())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for entry in header.values():
        entry["data_offsets"] = [offset + 3 for offset in entry["data_offsets"]]
    header["odd"] = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    text = json.dumps(header)
    builders.write_raw(tmp_path / "model.safetensors", text + " " * (-len(text) % 8), b"odd" + raw[start:])
    weights = bigload.StoredWeights(tmp_path)
    assert not weights.source("layers.0.up.weight").is_as_wanted
    model = streamed(weights)
    for _ in range(2):
        assert torch.equal(run(model), run(Model()))


def test_memory_is_used_again_for_block_after_block(folder, allocations):
    model = streamed(bigload.StoredWeights(folder), prefetch_bytes=2 * (BLOCK_BYTES + 4096))
    for _ in range(4):
        run(model)
    assert len(allocations) <= 4, "the window, the block that runs, and the one before"


def test_what_somebody_keeps_of_a_weight_is_never_overwritten(allocations):
    model = bigload.cpu_offload(Tables(torch.float32), "cpu", state_dict=Tables(torch.bfloat16).state_dict())
    kept = [table.detach()[1:] for _ in range(3) for table in model()]
    assert [float(value.min()) for value in kept] == [float(value.max()) for value in kept] == [*range(6)] * 3
    num_held = len(allocations)
    assert num_held >= len(kept)
    kept.clear()
    for _ in range(3):
        model()
    assert len(allocations) == num_held, "what came back is lent again"


def test_gradients_pass_through_weights_that_have_gone(folder):
    model = streamed(bigload.StoredWeights(folder), prefetch_bytes=0).requires_grad_(False)
    reference = Model()
    reference.load_state_dict({name: value.bfloat16() for name, value in reference.state_dict().items()})
    given = [INPUT.clone().requires_grad_() for _ in range(3)]
    outputs = [model(value) for value in given]
    for output in outputs:
        output.square().sum().backward()
    same = INPUT.clone().requires_grad_()
    reference(same).square().sum().backward()
    for value in given:
        assert torch.equal(value.grad, same.grad)


def test_weights_fetched_in_inference_mode_are_good_outside(folder):
    model = streamed(bigload.StoredWeights(folder), resident_bytes="1GiB").requires_grad_(False)
    with torch.inference_mode():
        model(INPUT)
    given = INPUT.clone().requires_grad_()
    model(given).sum().backward()
    assert given.grad is not None


def test_threads_run_one_model_together(folder):
    model = streamed(bigload.StoredWeights(folder))
    answer, wrong = plain(), []

    def work():
        wrong.extend(number for number in range(3) if not torch.equal(run(model), answer))

    run_in_threads(work, *[()] * 3)
    assert not wrong


def test_new_values_in_ram_are_those_of_the_next_forward(folder):
    values = dict(bigload.StoredWeights(folder))
    model = streamed(values, resident_bytes="1GiB")
    run(model)
    values.update({name: torch.zeros_like(value) for name, value in values.items()})
    assert torch.equal(run(model), INPUT)


def test_a_file_that_was_cut_off_is_told_and_read_when_it_is_back(folder):
    path = folder / "model.safetensors"
    good = path.read_bytes()
    model = streamed(bigload.StoredWeights(folder), prefetch_bytes=0)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ReadError, match=r"model\.safetensors"):
        run(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_pages_are_forgotten_where_a_stay_says_so(folder):
    model = streamed(bigload.StoredWeights(folder))
    run(model)
    path = folder / "model.safetensors"
    before = cached_bytes(path)
    if not before:
        pytest.skip("this file system caches nothing, or does not say so")
    block = model.layers[2]._hf_hook.block
    block.reserve()
    block.fetch()
    block.drop(forget=True)
    after = cached_bytes(path)
    assert after <= before - block.num_page_bytes + 64 * 1024 or after == before  # tmpfs keeps all


def test_memory_goes_with_the_model(folder):
    model = streamed(bigload.StoredWeights(folder))
    run(model)
    memory = model.layers[0]._hf_hook.block.streamer._supply_factory._host_buffers.pool
    assert memory.num_bytes
    bigload.remove_hook_from_submodules(model)
    del model
    gc.collect()
    memory.clear()
    assert memory.num_bytes == 0
