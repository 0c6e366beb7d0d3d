"""The simulated accelerator: a device like any other, and one on which what may go wrong does."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn


def side_stream(device="sim:1"):
    """Return a stream that waits for what the current one holds."""
    stream = torch.sim.Stream(device=device)
    stream.wait_stream(torch.sim.current_stream(device))
    return stream


def send(host, device, stream):
    """Enqueue a copy of `host` to `device`, on `stream`."""
    with torch.sim.stream(stream):
        device.copy_(host, non_blocking=True)


@contextmanager
def race(simulation, words):
    """In this context something is left unordered, of which `words` are said."""
    yield
    simulation.synchronize()
    assert any(words in race for race in simulation.races)
    simulation.races.clear()


# A device like any other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_what_was_moved_there_comes_back_as_it_was(simulation, dtype):
    host = torch.randn(3, 4).to(dtype)
    device = host.to("sim:2")
    assert type(device) is torch.Tensor
    assert device.device == torch.device("sim:2")
    assert torch.equal(device.cpu().view(torch.uint8), host.view(torch.uint8))


def test_views_share_memory_and_casts_do_not(simulation):
    host = torch.arange(12.0)
    device = host.to("sim:1")
    view = device.view(3, 4).t()[1:3]
    assert simulation.used[1] == 48
    view.mul_(10)
    host.view(3, 4).t()[1:3].mul_(10)
    assert torch.equal(device.cpu(), host)
    cast = device[2:6].to(torch.bfloat16)
    assert simulation.used[1] == 48 + 8
    assert torch.equal(cast.cpu(), host[2:6].bfloat16())


def test_a_module_on_meta_takes_tensors_of_the_device_and_runs_there(simulation):
    weight, bias = torch.randn(3, 4), torch.randn(3)
    with torch.device("meta"):
        module = nn.Linear(4, 3)
    module.load_state_dict({"weight": weight.to("sim:0"), "bias": bias.to("sim:0")}, assign=True)
    assert type(module.weight) is nn.Parameter
    given = torch.randn(2, 4)
    assert torch.allclose(module(given.to("sim:0")).cpu(), nn.functional.linear(given, weight, bias))
    with pytest.raises(RuntimeError, match="same device"):
        module(given)


def test_tensors_of_two_devices_do_not_mix(simulation):
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and sim:1"):
        torch.zeros(3, device="sim:0") + torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="sim:9")


def test_a_view_that_nobody_taught_it_is_refused_not_copied(simulation):
    with pytest.raises(NotImplementedError, match="view_as_complex"):
        torch.view_as_complex(torch.zeros(3, 2, device="sim:0"))


def test_fresh_memory_is_poison(simulation):
    assert torch.empty(4, device="sim:0").cpu().isnan().all()


def test_memory_is_counted_until_the_last_view_is_gone(simulation):
    tensor = torch.empty(1000, device="sim:3")
    view = tensor[10:20]
    assert torch.sim.mem_get_info("sim:3") == ((1 << 40) - 4000, 1 << 40)
    del tensor
    assert simulation.used[3] == 4000
    del view
    assert simulation.used == [0, 0, 0, 0]
    assert simulation.peak == [0, 0, 0, 4000]


def test_memory_over_the_limit_is_torchs_own_error_and_costs_nothing(simulation):
    simulation.limits[0] = 1000
    kept = torch.empty(200, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError, match="201 bytes asked for, 800 of 1000"):
        torch.empty(201, dtype=torch.uint8, device="sim:0")
    assert torch.sim.mem_get_info("sim:0") == (200, 1000)
    del kept


def test_copies_across_devices_are_logged(simulation):
    device = torch.zeros(10).to("sim:0").to("sim:1")
    device + device
    side = side_stream()
    send(torch.ones(10), device, side)
    side.synchronize()
    logged = [(str(t.source), str(t.destination), t.num_bytes, t.is_blocking) for t in simulation.transfers]
    assert logged == [("cpu", "sim:0", 40, True), ("sim:0", "sim:1", 40, True), ("cpu", "sim:1", 40, False)]


def test_a_thread_chooses_its_stream_for_itself(simulation):
    side, seen = side_stream(), []
    with torch.sim.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.sim.current_stream("sim:1")))
        thread.start()
        thread.join()
        assert torch.sim.current_stream("sim:1") is side
    assert seen == [torch.sim.default_stream("sim:1")] == [torch.sim.current_stream("sim:1")]


# What may go wrong does


def test_the_right_order_is_right_and_no_race(simulation):
    device = torch.empty(4, device="sim:1")
    side = side_stream()
    send(torch.ones(4), device, side)
    side.record_event().wait(torch.sim.current_stream("sim:1"))
    doubled = device * 2
    side.wait_stream(torch.sim.current_stream("sim:1"))
    send(torch.full((4,), 5.0), device, side)
    side.synchronize()
    assert torch.equal((device + doubled).cpu(), torch.full((4,), 7.0))


def test_reading_a_destination_before_a_wait_gives_poison_and_is_a_race(simulation):
    device = torch.empty(4, device="sim:1")
    send(torch.ones(4), device, side_stream())
    with race(simulation, "may still be written by stream"):
        assert (device + 0).cpu().isnan().all()


def test_a_race_is_one_also_when_the_device_was_quick(simulation):
    simulation.hurry = lambda stream: stream.run()
    device = torch.empty(4, device="sim:1")
    send(torch.ones(4), device, side_stream())
    with race(simulation, "may still be written by stream"):
        assert torch.equal((device + 0).cpu(), torch.ones(4))


def test_a_host_block_that_is_overwritten_before_its_copy_is_done_sends_the_new_bytes(simulation):
    device, host, side = torch.empty(4, device="sim:1"), torch.ones(4), side_stream()
    send(host, device, side)
    host.fill_(9)
    side.synchronize()
    assert torch.equal(device.cpu(), torch.full((4,), 9.0))


def test_a_host_block_that_waited_for_its_event_sends_its_own_bytes(simulation):
    device, host, side = torch.empty(4, device="sim:1"), torch.ones(4), side_stream()
    send(host, device, side)
    event = side.record_event()
    event.synchronize()
    host.fill_(9)
    assert torch.equal(device.cpu(), torch.ones(4))


def test_a_copy_before_the_destinations_memory_is_ready_is_lost_and_a_race(simulation):
    device, side = torch.empty(4, device="sim:1"), torch.sim.Stream(device="sim:1")
    with race(simulation, "copy on stream"):
        send(torch.ones(4), device, side)
        side.synchronize()
        assert device.cpu().isnan().all()


def test_overwriting_what_another_stream_may_still_read_is_a_race(simulation):
    device, side = torch.ones(4, device="sim:1"), side_stream()
    device + device
    with race(simulation, "may still be read by stream"):
        send(torch.zeros(4), device, side)


def test_freeing_what_another_stream_may_still_use_is_a_race(simulation):
    device = torch.empty(4, device="sim:1")
    send(torch.ones(4), device, side_stream())
    with race(simulation, "were freed while"):
        del device


def test_who_polls_an_event_gets_there(simulation):
    device, side = torch.empty(4, device="sim:1"), side_stream()
    send(torch.ones(4), device, side)
    event = side.record_event()
    polls = 1
    while not event.query():
        polls += 1
    assert 1 < polls <= 3
    side.synchronize()
