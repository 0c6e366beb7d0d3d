import contextlib
import gc
import random
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lock_interrupts import assert_leaves_no_lock

from bigload.checkpoint.byte_source import PositionalReader
from bigload.loading.staging.accelerators import free_bytes
from bigload.loading.staging.device_transfers import Transfers
from bigload.machine.threads.activities import Phase, Recorder
from builders import no_thread_left
from simulated_accelerator import watched
from transfer_jobs import cut, numbers, send_all

DEVICE = torch.device("sim:1")
BLOCK = 4096


class ReadFailedError(Exception):
    pass


class DeviceLostError(Exception):
    pass


def transfers_to(device=DEVICE, *, num_blocks=2, kind=Transfers, recorder=None, block_bytes=BLOCK):
    recorder = recorder or Recorder(is_tracing=False)
    return kind(device, block_bytes=block_bytes, num_blocks=num_blocks, recorder=recorder)


def empty(count, dtype=torch.float32, device=DEVICE):
    return torch.empty(count, dtype=dtype, device=device)


def start(work):
    thread = threading.Thread(target=work, name="bigload-test", daemon=True)
    thread.start()
    return thread


def join(*threads):
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


# Bytes arrive


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_arrives_through_few_blocks_from_any_number_of_threads(simulation, threads, num_blocks):
    host = numbers(20_001)
    there = empty(20_001)
    with transfers_to(num_blocks=num_blocks) as transfers:
        send_all(transfers, host, there, threads=threads, block_bytes=BLOCK)
        assert simulation.num_pending
        transfers.finish()
        assert not simulation.num_pending
    assert torch.equal(there.cpu(), host)
    sent = [transfer for transfer in simulation.transfers if transfer.destination == DEVICE]
    assert sum(transfer.num_bytes for transfer in sent) == 80_004
    assert not any(transfer.is_blocking for transfer in sent)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.int8, torch.int32),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0, 3])
def test_a_cast_happens_on_the_device_and_the_stored_bytes_cross_the_bus(simulation, stored, wanted, offset):
    host, there = numbers(9_000, stored), empty(9_000, wanted)
    with transfers_to() as transfers:
        send_all(transfers, host, there, threads=2, block_bytes=BLOCK, offset=offset)
    assert sum(transfer.num_bytes for transfer in simulation.transfers) == 9_000 * stored.itemsize
    assert torch.equal(there.cpu(), host.to(wanted))


def test_a_cast_takes_one_block_of_the_devices_memory_per_thread(simulation):
    host, there = numbers(50_000, torch.bfloat16), empty(50_000)
    with transfers_to(num_blocks=8) as transfers:
        send_all(transfers, host, there, threads=1, block_bytes=BLOCK)
    assert simulation.peak[1] == 200_000 + BLOCK


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("begin", [0, 1])
def test_columns_of_rows_arrive_one_after_the_other(simulation, begin, wanted):
    matrix = numbers(40 * 50, torch.bfloat16).view(40, 50)
    there = empty((40, 7), wanted)
    with transfers_to() as transfers:
        block = transfers.take()
        block.memory[begin : begin + 4000] = bytes(matrix.view(-1).view(torch.uint8).tolist())
        transfers.send_rows(block, begin + 20, there, num_rows=40, row_bytes=14, stride_bytes=100, dtype=torch.bfloat16)
        transfers.release(block)
    assert torch.equal(there.cpu(), matrix[:, 10:17].to(wanted))


def test_a_file_is_read_into_blocks_and_arrives(simulation, tmp_path):
    host, there = numbers(5_000), empty(5_000)
    (tmp_path / "weights").write_bytes(bytes(host.view(torch.uint8).tolist()))
    with PositionalReader(tmp_path / "weights") as file, transfers_to() as transfers:
        for begin, end in cut(20_000, BLOCK):
            block = transfers.take()
            file.read_into([block.memory[: end - begin]], begin)
            transfers.send(block, 0, end - begin, there[begin // 4 : end // 4])
            transfers.release(block)
    assert torch.equal(there.cpu(), host)


def test_several_tensors_may_come_from_one_block(simulation):
    host = numbers(100)
    first, second = empty(60), empty(40)
    with transfers_to() as transfers:
        block = transfers.take()
        block.memory[:400] = bytes(host.view(torch.uint8).tolist())
        transfers.send(block, 0, 240, first)
        transfers.send(block, 240, 400, second)
        transfers.release(block)
    assert torch.equal(torch.cat([first.cpu(), second.cpu()]), host)


def test_a_parameter_that_wants_gradients_is_filled_like_any_tensor(simulation):
    host, there = numbers(10), torch.nn.Parameter(empty(10))
    with transfers_to() as transfers:
        send_all(transfers, host, there, threads=2, block_bytes=BLOCK)
    assert torch.equal(there.detach().cpu(), host)
    assert there.grad_fn is None


def test_a_destination_made_in_inference_mode_is_filled_from_threads_that_are_not_in_it(simulation):
    host = numbers(3000, torch.bfloat16)
    with torch.inference_mode():
        there = empty(3000)
        with transfers_to() as transfers:
            send_all(transfers, host, there, threads=2, block_bytes=BLOCK)
    assert there.is_inference()
    assert torch.equal(there.cpu(), host.float())


def test_two_devices_are_fed_at_once(simulation):
    hosts = {index: numbers(5_000, seed=index) for index in (0, 3)}
    there = {index: empty(5_000, device=f"sim:{index}") for index in hosts}
    with transfers_to(torch.device("sim:0")) as left, transfers_to(torch.device("sim:3")) as right:
        feeds = {0: left, 3: right}
        join(*(start(lambda i=i: send_all(feeds[i], hosts[i], there[i], threads=2, block_bytes=BLOCK)) for i in hosts))
    assert all(torch.equal(there[index].cpu(), hosts[index]) for index in hosts)


def test_a_device_without_an_index_is_the_current_one(simulation):
    with transfers_to(torch.device("sim")) as transfers:
        assert transfers.device == torch.device("sim:0")


def test_a_device_without_streams_is_copied_to_at_once(simulation, monkeypatch):
    monkeypatch.delattr(type(torch.sim), "Stream")
    host, there = numbers(9_000, torch.bfloat16), empty(9_000)
    with transfers_to(num_blocks=1) as transfers:
        send_all(transfers, host, there, threads=2, block_bytes=BLOCK)
        assert torch.equal(there.cpu(), host.float())
    assert all(transfer.is_blocking for transfer in simulation.transfers)


@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 3_000),
    ring=st.fixed_dictionaries({"num_blocks": st.integers(1, 4), "block_bytes": st.integers(8, 700)}),
    threads=st.integers(1, 3),
    wanted=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whatever_is_done_when_the_bytes_are_right(seed, count, wanted, ring, threads):
    order = random.Random(seed)
    with watched() as simulation:
        simulation.hurry = lambda stream: [stream.advance() for _ in range(order.choice([0, 0, 1, 3, 9]))]
        host, there = numbers(count, torch.bfloat16), empty(count, wanted)
        with transfers_to(**ring) as transfers:
            send_all(transfers, host, there, threads=threads, block_bytes=ring["block_bytes"])
        assert torch.equal(there.cpu(), host.to(wanted))
        del there


# What would go wrong otherwise: each of these leaves out one thing that Transfers does


class LendsTooEarly(Transfers):
    def release(self, block):
        block._has_copies = False
        super().release(block)


class NeverFinishes(Transfers):
    def finish(self):
        pass


class StartsTooEarly(Transfers):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._stream = torch.sim.Stream(device=self.device)


class TakesTemporariesElsewhere(Transfers):
    def _bring(self, source):
        raw = torch.empty(source.shape, dtype=torch.uint8, device=self.device)
        with torch.sim.stream(torch.sim.default_stream(self.device)):
            return torch.empty_like(raw).copy_(source, non_blocking=True)


def arrives(simulation, kind):
    """Return whether all bytes arrive by `kind`, and whether everything was in an order."""
    host, there = numbers(5_000, torch.bfloat16), empty(5_000)
    with transfers_to(kind=kind) as transfers:
        send_all(transfers, host, there, threads=1, block_bytes=BLOCK)
    is_right, is_ordered = torch.equal(there.cpu(), host.float()), simulation.races == []
    simulation.synchronize()
    del there
    simulation.races.clear()
    return is_right, is_ordered


@pytest.mark.parametrize(
    ("kind", "is_right", "is_ordered"),
    [
        (Transfers, True, True),
        (LendsTooEarly, False, True),
        (NeverFinishes, False, False),
        (StartsTooEarly, False, False),
        (TakesTemporariesElsewhere, False, False),
    ],
)
def test_each_wait_is_needed(simulation, kind, is_right, is_ordered):
    assert arrives(simulation, kind) == (is_right, is_ordered)


# Blocks


def test_blocks_begin_at_pages_and_are_not_pinned_where_nothing_pins(simulation):
    with transfers_to(num_blocks=3) as transfers:
        blocks = [transfers.take() for _ in range(3)]
        assert not transfers.is_pinned
        assert [block._tensor.data_ptr() % 4096 for block in blocks] == [0, 0, 0]
        assert [block.memory.nbytes for block in blocks] == [BLOCK] * 3
        for block in blocks:
            transfers.release(block)


def test_copies_go_on_while_the_next_blocks_are_filled(simulation):
    there = empty(8_192)
    with transfers_to(num_blocks=3) as transfers:
        outstanding = []
        for begin, end in cut(32_768, BLOCK):
            block = transfers.take()
            transfers.send(block, 0, BLOCK, there[begin // 4 : end // 4])
            transfers.release(block)
            outstanding.append(len(simulation.streams[-1].queue))
    # The wait at the start is queued too. From the fourth block on, only the one that is needed next was waited for.
    assert outstanding == [2, 3, 4, 3, 3, 3, 3, 3]


def test_a_thread_waits_until_another_gives_a_block_back(simulation):
    with transfers_to(num_blocks=1) as transfers:
        block, seen = transfers.take(), []
        waiting = start(lambda: seen.append(transfers.take()))
        transfers.release(block)
        join(waiting)
        assert seen == [block]


def test_a_block_comes_back_only_once(simulation):
    with transfers_to() as transfers:
        block = transfers.take()
        transfers.release(block)
        with pytest.raises(ValueError, match="nobody holds"):
            transfers.release(block)


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 1), (1, 0), (-1, 8)])
def test_no_blocks_are_refused_instead_of_waited_for(simulation, num_blocks, block_bytes):
    with pytest.raises(ValueError, match="expected 1 or more"):
        transfers_to(num_blocks=num_blocks, block_bytes=block_bytes)


def test_memory_goes_back_with_the_transfers_but_not_under_a_reader(simulation):
    transfers = transfers_to()
    read, unread = transfers.take(), transfers.take()
    unread_memory = weakref.ref(unread._tensor)
    view = read.memory[:5]
    view[:] = b"still"
    transfers.release(read)
    transfers.release(unread)
    transfers.close()
    del read, unread
    assert unread_memory() is None
    assert bytes(view) == b"still"


# Errors


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_in_one_thread_ends_all_and_leaves_nothing_under_way(simulation, threads):
    host, there = numbers(20_000), empty(20_000)
    fail_at = cut(80_000, BLOCK)[9][0]
    stop = ReadFailedError("the disk is gone")

    def fault(begin):
        if begin == fail_at:
            raise stop

    with no_thread_left(), pytest.raises(ReadFailedError) as raised, transfers_to() as transfers:
        send_all(transfers, host, there, threads=threads, block_bytes=BLOCK, fault=fault)
    assert raised.value is stop
    assert simulation.num_pending == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_of_a_failed_load_is_free_at_once_not_when_cycles_are_looked_for(simulation, threads):
    def fault(begin):
        if begin:
            raise ReadFailedError

    def fail():
        there = empty(20_000)
        with transfers_to() as transfers:
            send_all(transfers, numbers(20_000), there, threads=threads, block_bytes=BLOCK, fault=fault)

    gc.disable()
    try:
        with contextlib.suppress(ReadFailedError):
            fail()
        assert simulation.used == [0, 0, 0, 0]
    finally:
        gc.enable()


def test_abort_wakes_those_who_wait_and_refuses_those_who_come(simulation):
    stop, raised = ReadFailedError("elsewhere"), []

    def wait():
        try:
            transfers.take()
        except ReadFailedError as error:
            raised.append(error)

    with transfers_to(num_blocks=1) as transfers:
        block = transfers.take()
        threads = [start(wait) for _ in range(3)]
        transfers.abort(stop)
        transfers.abort(ReadFailedError("later"))
        join(*threads)
        transfers.release(block)
        with pytest.raises(ReadFailedError, match="elsewhere"):
            transfers.take()
    assert raised == [stop] * 3


def test_nobody_gets_a_block_after_the_end(simulation):
    transfers = transfers_to()
    transfers.close()
    transfers.close()
    with pytest.raises(ValueError, match="closed"):
        transfers.take()


def test_close_waits_for_the_copies_of_a_block_that_nobody_gave_back(simulation):
    host, there = numbers(10), empty(10)
    transfers = transfers_to()
    block = transfers.take()
    block.memory[:40] = bytes(host.view(torch.uint8).tolist())
    transfers.send(block, 0, 40, there)
    assert simulation.num_pending
    transfers.close()
    assert simulation.num_pending == 0
    assert torch.equal(there.cpu(), host)


def test_bytes_that_do_not_fit_their_destination_are_refused_and_the_block_lives_on(simulation):
    there = empty(10)
    with transfers_to(num_blocks=1) as transfers:
        block = transfers.take()
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            transfers.send(block, 0, 4, there)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            transfers.send(block, 0, 2, there, dtype=torch.bfloat16)
        transfers.release(block)
        assert transfers.take() is block
        transfers.release(block)


def test_no_memory_for_a_cast_is_torchs_error_and_nothing_stays_behind(simulation):
    host, there = numbers(1000, torch.bfloat16), empty(1000)
    simulation.limits[1] = simulation.used[1] + 1000
    with pytest.raises(torch.OutOfMemoryError), transfers_to() as transfers:
        send_all(transfers, host, there, threads=2, block_bytes=BLOCK)
    assert simulation.num_pending == 0


@pytest.mark.parametrize("call", ["synchronize", "record"])
def test_a_device_that_fails_lends_no_block_again_and_keeps_nobody_waiting(simulation, monkeypatch, call):
    def fail(*_):
        raise DeviceLostError("no answer")

    there = empty(10)
    with transfers_to(num_blocks=1) as transfers:
        block = transfers.take()
        transfers.send(block, 0, 40, there)
        with monkeypatch.context() as patched:
            patched.setattr(torch.sim.Event, call, fail)
            with pytest.raises(DeviceLostError, match="no answer"):  # noqa: PT012  either may be told
                transfers.release(block)
                transfers.take()
        with pytest.raises(DeviceLostError, match="no answer"):
            transfers.take()


# What is told


def test_copies_and_waits_are_recorded(simulation):
    recorder, there = Recorder(is_tracing=True), empty(5_000)
    with transfers_to(recorder=recorder) as transfers:
        send_all(transfers, numbers(5_000, torch.bfloat16), there, threads=2, block_bytes=BLOCK)
    copied = [activity.num_bytes for activity in recorder.activities() if activity.phase is Phase.COPY]
    waited = [activity for activity in recorder.activities() if activity.phase is Phase.WAIT]
    assert sum(copied) == 10_000
    assert len(waited) == len(copied) + 1


def test_free_memory_is_what_the_device_says_or_not_known(simulation):
    simulation.limits[2] = 1000
    taken = empty(10, device="sim:2")
    assert free_bytes(torch.device("sim:2")) == 960
    assert free_bytes(torch.device("cpu")) is None
    del taken


def test_free_memory_counts_what_torch_holds_and_nobody_uses(simulation, monkeypatch):
    monkeypatch.setattr(type(torch.sim), "memory_reserved", staticmethod(lambda device: 300), raising=False)
    monkeypatch.setattr(type(torch.sim), "memory_allocated", staticmethod(lambda device: 100), raising=False)
    simulation.limits[2] = 1000
    assert free_bytes(torch.device("sim:2")) == 1200


def test_a_driver_that_does_not_tell_is_not_an_error(simulation, monkeypatch):
    def fail(device):
        raise RuntimeError("the device does not support querying free memory")

    monkeypatch.setattr(type(torch.sim), "mem_get_info", staticmethod(fail))
    assert free_bytes(torch.device("sim:2")) is None


@pytest.mark.parametrize("what", ["take", "abort"])
def test_an_interrupt_never_leaves_the_blocks_locked(simulation, what):
    def use():
        if what == "take":
            transfers.release(transfers.take())
        else:
            transfers.abort(ReadFailedError())

    with transfers_to() as transfers:
        assert_leaves_no_lock(use)
