"""Offloaded weights on simulated accelerators: copies at the last legal moment, clocks for every access, few bytes."""

import copy
import functools
import gc
import random
import threading
import weakref

import fused_models
import pytest
import torch
from safetensors.torch import save_file
from streamed_models import Residual, Residuals, Tables, run_in_threads
from torch import nn

import bigload
from bigload.errors import NotEnoughMemoryError, ReadError
from bigload.loading.staging.device_transfers import Transfers
from bigload.runtime.streaming.supplies import weight_reads as reads

WIDTH, NUM_BLOCKS = 32, 5
BLOCK_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
ROUNDING = 4 * 512  # of the pieces of a block
INPUT = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def Model(dtype=torch.float32):  # noqa: N802  a class with the sizes of this file
    return Residuals(NUM_BLOCKS, WIDTH, dtype=dtype)


def state(dtype=torch.float32):
    return {name: value.to(dtype) for name, value in Model().state_dict().items()}


def stored(where, folder, dtype=torch.float32, wanted=torch.float32, **options):
    """Return a model that runs on `sim:0` in `wanted`, with values of `dtype` on disk or in RAM."""
    with bigload.init_empty_weights():
        model = Model(wanted)
    if where == "ram":
        bigload.cpu_offload(model, "sim:0", state_dict=state(dtype), **options)
    else:
        save_file(state(dtype), folder / "model.safetensors")
        weights = bigload.StoredWeights(folder)
        bigload.cpu_offload(model, "sim:0", state_dict=weights, **options)
    return model


@functools.cache
def expected(dtype=torch.float32, wanted=torch.float32, given=INPUT):
    """Return what the same kernels give where all is on the device from the beginning."""
    model = Model()
    model.load_state_dict(state(dtype))
    with torch.no_grad():
        return model.to(wanted).to("sim:0")(given.to("sim:0", wanted)).cpu()


def run(model, given=INPUT, wanted=torch.float32):
    with torch.no_grad():
        return model(given.to("sim:0", wanted)).cpu()


@pytest.mark.parametrize("where", ["disk", "ram"])
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_results_are_those_of_weights_that_stay(where, dtype, wanted, simulation, tmp_path):
    model = stored(where, tmp_path, dtype, wanted)
    for _ in range(3):
        assert torch.equal(run(model, wanted=wanted), expected(dtype, wanted))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(2)
def test_no_device_is_too_fast(seed, simulation, tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "BLOCK_BYTES", 512)  # many reads and copies for each block
    chance = random.Random(seed)

    def hurry(stream):
        for each in list(simulation.streams):
            if chance.random() < 0.3:
                each.advance()

    model, plain = stored("disk", tmp_path), expected()
    simulation.hurry = hurry
    for _ in range(3):
        assert torch.equal(run(model), plain)


@pytest.mark.parametrize("where", ["disk", "ram"])
@pytest.mark.parametrize("num_ahead", [0, 1, 2, 3])
@pytest.mark.sample(3)
def test_memory_is_bounded_by_the_window_and_the_block_that_runs(where, num_ahead, simulation, tmp_path):
    given = INPUT.to("sim:0")
    before = simulation.used[0]
    model = stored(where, tmp_path, prefetch_bytes=num_ahead * (BLOCK_BYTES + ROUNDING))
    with torch.no_grad():
        for _ in range(3):
            model(given)
            assert simulation.used[0] - before <= num_ahead * (BLOCK_BYTES + ROUNDING)
    values = 8 * given.nbytes
    assert simulation.peak[0] - before <= (num_ahead + 1) * (BLOCK_BYTES + ROUNDING) + values
    assert simulation.peak[0] - before >= min(num_ahead + 1, NUM_BLOCKS) * BLOCK_BYTES


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_a_block_is_one_piece_of_memory_and_crosses_the_bus_once(where, simulation, tmp_path):
    model = stored(where, tmp_path, prefetch_bytes=0)
    given = INPUT.to("sim:0")
    simulation.transfers.clear()
    with torch.no_grad():
        model(given)
    assert sum(transfer.num_bytes for transfer in simulation.transfers) == NUM_BLOCKS * BLOCK_BYTES
    assert not any(transfer.is_blocking for transfer in simulation.transfers)
    assert simulation.used[0] == given.nbytes


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_run_one_model_together(own_streams, simulation, tmp_path):
    model = stored("disk", tmp_path)
    inputs = [INPUT * factor for factor in (1.0, 0.5, -2.0)]
    answers = [expected(given=given) for given in inputs]
    wrong = []

    def work(given, answer):
        stream = torch.sim.Stream("sim:0") if own_streams else None
        with torch.sim.stream(stream):
            wrong.extend(number for number in range(3) if not torch.equal(run(model, given), answer))

    run_in_threads(work, *zip(inputs, answers, strict=True))
    assert not wrong


def test_a_graph_keeps_weights_for_the_stream_that_it_runs_on(simulation, tmp_path):
    model, plain = stored("disk", tmp_path).requires_grad_(False), Model().to("sim:0")
    run(model)  # memory for the blocks that come next was taken under the default stream
    given, same = (INPUT.to("sim:0").requires_grad_() for _ in range(2))
    plain(same).sum().backward()
    torch.sim.synchronize()
    with torch.sim.stream(torch.sim.Stream("sim:0")), torch.autograd.set_multithreading_enabled(False):
        output = model(given).sum()
        bigload.remove_hook_from_submodules(model)
        output.backward()
        del output
        gradient = given.grad.cpu()
    assert torch.equal(gradient, same.grad.cpu())


@pytest.mark.parametrize("where", ["cpu", "sim:0"])
def test_values_that_are_cast_by_way_of_a_third_dtype_are_moved_by_torch(where, simulation, tmp_path):
    save_file(state(), tmp_path / "model.safetensors")
    entry = {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "bfloat16"}
    weights = bigload.OffloadedWeightsLoader(index={name: {**entry, "weight_name": name} for name in state()})
    with bigload.init_empty_weights():
        model = Model()
    bigload.cpu_offload(model, where, state_dict=weights)
    for _ in range(2):
        with torch.no_grad():
            answer = model(INPUT.to(where)).cpu()
        assert torch.equal(answer, expected(torch.bfloat16))


def test_two_models_share_a_device(simulation, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = stored("disk", tmp_path / "one")
    two = stored("ram", tmp_path / "two", torch.bfloat16)
    for _ in range(2):
        assert torch.equal(run(one), expected())
        assert torch.equal(run(two), expected(torch.bfloat16))


def test_a_copy_of_a_model_streams_by_itself(simulation, tmp_path):
    model = stored("disk", tmp_path)
    run(model)
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    assert torch.equal(run(copied), expected())


def test_a_file_that_cannot_be_read_is_an_error_that_leaves_nothing_behind(simulation, tmp_path):
    model = stored("disk", tmp_path)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    run(model)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ReadError):
        run(model)
    assert simulation.used[0] <= 2 * (BLOCK_BYTES + ROUNDING)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("fail_at", [0, 3, 9])
def test_after_an_error_of_a_read_the_next_forward_is_right(fail_at, simulation, tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "BLOCK_BYTES", 2048)  # copies of the same block are under way when its last read fails
    model = stored("disk", tmp_path)
    read_into, count = reads.PositionalReader.read_into, [0]

    def failing(self, buffers, offset):
        count[0] += 1
        if count[0] == fail_at + 1:
            raise ReadError(tmp_path, "the disk is tired")
        read_into(self, buffers, offset)

    monkeypatch.setattr(reads.PositionalReader, "read_into", failing)
    num_failed = 0
    for _ in range(4):
        try:
            assert torch.equal(run(model), expected())
        except ReadError:
            num_failed += 1
    assert count[0] > fail_at
    assert num_failed <= 1, "what fails ahead of time is tried again"
    assert torch.equal(run(model), expected())


class Tied(nn.Module):
    """A model whose last module has the weight of the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(16, WIDTH)
        self.layer = Residual(WIDTH, bias=True)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


@pytest.mark.parametrize("prefetch_bytes", [0, None, "1MiB"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_tied_weights_that_are_offloaded_are_there_once(where, prefetch_bytes, simulation, tmp_path):
    model, ids = Tied(), torch.arange(5)
    plain = copy.deepcopy(model).to("sim:0")(ids.to("sim:0")).detach().cpu()
    device_map = {"embed": where, "layer": where, "head": where}
    bigload.dispatch_model(model, device_map, "sim:0", offload_dir=tmp_path, prefetch_bytes=prefetch_bytes)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(ids).cpu(), plain)
    tied_bytes, given_bytes = 16 * WIDTH * 4, 4096
    if prefetch_bytes == "1MiB":  # room for all of it
        assert simulation.used[0] <= BLOCK_BYTES + ROUNDING + tied_bytes
    assert simulation.peak[0] <= BLOCK_BYTES + ROUNDING + tied_bytes + 4 * plain.nbytes + given_bytes


def test_no_memory_ahead_is_no_error_and_none_for_the_block_is_told(simulation, tmp_path):
    model = stored("disk", tmp_path)
    given = INPUT.to("sim:0")
    simulation.limits[0] = simulation.used[0] + BLOCK_BYTES + ROUNDING + 8 * given.nbytes
    with torch.no_grad():
        for _ in range(2):
            answer = model(given)
    simulation.limits[0] = None
    assert torch.equal(answer.cpu(), expected())
    bigload.remove_hook_from_submodules(model)
    assert simulation.used[0] == given.nbytes + answer.nbytes


def test_a_block_that_does_not_fit_is_told(simulation, tmp_path):
    model = stored("disk", tmp_path)
    simulation.limits[0] = BLOCK_BYTES // 2
    with pytest.raises(NotEnoughMemoryError, match="sim:0"):
        run(model)
    simulation.limits[0] = None
    assert torch.equal(run(model), expected())


def test_what_somebody_keeps_of_a_weight_is_never_overwritten(simulation):
    model = bigload.cpu_offload(Tables(), "sim:0")
    with torch.no_grad():
        kept = [*model(), *model()]
    assert [float(value.detach().cpu().unique()) for value in kept] == [*range(6), *range(6)]


def test_gradients_pass_through_weights_that_have_gone(simulation, tmp_path):
    model = stored("disk", tmp_path, prefetch_bytes=0)
    plain = Model().to("sim:0")
    given = [INPUT.to("sim:0").requires_grad_() for _ in range(2)]
    model.requires_grad_(False)
    outputs = [model(value) for value in given]
    for output in outputs:
        output.sum().backward()
    same = INPUT.to("sim:0").requires_grad_()
    plain(same).sum().backward()
    assert torch.equal(given[0].grad.cpu(), same.grad.cpu())
    assert torch.equal(given[1].grad.cpu(), same.grad.cpu())


def test_weights_fetched_in_inference_mode_are_good_outside(simulation, tmp_path):
    model = stored("disk", tmp_path, resident_bytes="1MiB").requires_grad_(False)
    with torch.inference_mode():
        model(INPUT.to("sim:0"))
    given = INPUT.to("sim:0").requires_grad_()
    model(given).sum().backward()
    assert given.grad is not None


def test_new_values_in_ram_are_those_of_the_next_forward(simulation):
    values = state()
    with bigload.init_empty_weights():
        model = Model()
    bigload.cpu_offload(model, "sim:0", state_dict=values, resident_bytes="1MiB")
    run(model)
    for value in values.values():
        value.zero_()
    assert torch.equal(run(model), INPUT)
    values.update(state())
    assert torch.equal(run(model), expected())


def test_pinned_weights_are_copied_from_where_they_are(simulation, tmp_path, monkeypatch):
    monkeypatch.setattr(reads, "_is_pinned", lambda source: True)
    taken = []
    monkeypatch.setattr(Transfers, "take", taken.append)
    for dtype in (torch.float32, torch.bfloat16):
        model = stored("ram", tmp_path, dtype)
        assert torch.equal(run(model), expected(dtype))
    assert not taken


def test_pinned_memory_and_streams_go_with_the_model(simulation, tmp_path, monkeypatch):
    made = []
    init = Transfers.__init__

    def note(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append((weakref.ref(self), weakref.ref(self._free[0]._tensor.untyped_storage())))

    monkeypatch.setattr(Transfers, "__init__", note)
    model = stored("disk", tmp_path)
    run(model)
    ((transfers, memory),) = made
    del model
    gc.collect()
    deadline = threading.Event()
    while transfers() is not None and not deadline.wait(0.01):
        gc.collect()
    assert memory() is None


def test_a_cast_of_the_modules_is_a_cast_of_their_weights(simulation, tmp_path):
    model = stored("disk", tmp_path)
    run(model)
    for module in model.children():  # the model itself refuses
        module.bfloat16()
    assert torch.equal(run(model, wanted=torch.bfloat16), expected(wanted=torch.bfloat16))


@pytest.mark.parametrize(("where", "num_kept"), [("disk", 0), ("ram", 7)])
def test_experts_of_a_fused_module_come_one_by_one(where, num_kept, simulation, tmp_path):
    plain = fused_models.mixture()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    values = bigload.StoredWeights(tmp_path) if where == "disk" else plain.state_dict()
    inputs = torch.randint(0, 64, (3, 2), generator=torch.Generator().manual_seed(1))
    on_device = copy.deepcopy(plain).to("sim:0")
    others = sum(each.nbytes for name, each in plain.named_parameters() if "experts" not in name)
    expert_bytes = 3 * 512 + fused_models.EXPERT_BYTES
    with bigload.init_empty_weights():
        model = fused_models.mixture()
    before = simulation.used[0]
    options = {"resident_bytes": num_kept * expert_bytes, "prefetch_bytes": 0 if num_kept else 8 * expert_bytes}
    bigload.cpu_offload(model, "sim:0", state_dict=values, **options)
    with torch.no_grad():
        for ids in inputs:
            assert torch.equal(model(ids.to("sim:0")).cpu(), on_device(ids.to("sim:0")).cpu())
        chosen = {name for ids in inputs for name in fused_models.chosen_experts(plain, ids)}
    assert set(fused_models.fetched_experts(model)) == chosen
    most = (num_kept + 9) * expert_bytes + others + 8192
    assert simulation.peak[0] - before <= most < 3 * fused_models.NUM_EXPERTS * expert_bytes
