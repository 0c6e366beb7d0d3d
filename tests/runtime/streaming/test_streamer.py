"""Bounds of the streamer hold whatever runs, fails or is interrupted."""

import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from call_interrupts import interrupted
from hypothesis import given
from hypothesis import strategies as st
from streamed_models import IDS, blocks_of, fetchers, held, made, run_in_threads, save, settled, streamed, streamer_of

import bigload
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.streaming.prefetch_thread import PrefetchThread
from bigload.runtime.streaming.streamed_block import Residency, StreamedBlock
from bigload.runtime.streaming.streamer import Streamer
from bigload.runtime.streaming.streaming_limits import StreamOptions

SMALL = {"prefetch_bytes": 3000, "resident_bytes": 0}


class Fake(StreamedBlock):
    """A block without modules, which notes what is done to it and can fail."""

    num_bytes = 0
    num_page_bytes = 0
    is_in_place = False

    def __init__(self, name, num_bytes, streamer, is_routed=False):
        self.num_bytes, self.calls, self.fails = num_bytes, [], None
        self.may_end = threading.Event()
        self.may_end.set()
        super().__init__(
            name, torch.nn.Identity(), (), device=torch.device("cpu"), is_routed=is_routed, streamer=streamer
        )

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if (
            name == "residency" and value is Residency.REQUESTED and self in self.streamer._blocks
        ):  # it is about to take memory
            check_bound(self.streamer)

    def is_current(self):
        return True

    def reserve(self):
        assert self.residency is Residency.REQUESTED
        self.calls.append("reserve")

    def fetch(self):
        assert self.residency is Residency.LOADING
        self.may_end.wait(10)
        self.calls.append("fetch")
        if self.fails is not None:
            raise self.fails

    def install(self):
        assert self.residency is Residency.RESIDENT
        self.is_installed = True

    def uninstall(self):
        self.is_installed = False

    def arrive(self):
        assert self.residency is Residency.RESIDENT

    def depart(self):
        assert self.residency is Residency.RESIDENT

    def drop(self, *, forget):
        assert not self.is_installed
        self.calls.append("drop")


def streamer_of_tens(count, **options):
    """Return a streamer, and its `count` blocks of ten bytes."""
    streamer = Streamer(StreamOptions(**options))
    return streamer, [Fake(str(number), 10, streamer) for number in range(count)]


def check_bound(streamer):
    """Check that what waits for its turn is within the window, and what stays within its own bound."""
    limits = streamer._limits
    present = [block for block in streamer._blocks if block.residency is not Residency.ABSENT and not block.num_users]
    kept = sum(block.num_bytes for block in present if block.is_kept)
    hot = sum(block.num_bytes for block in present if block in streamer._cached_experts)
    others = sum(block.num_bytes for block in present if not block.is_kept and block not in streamer._cached_experts)
    assert kept + hot <= limits.resident_bytes
    assert others <= limits.prefetch_bytes + max((block.num_bytes for block in present), default=0)


def run(streamer, block, inner=()):
    streamer.enter(block)
    try:
        assert block.is_installed
        for each in inner:
            run(streamer, each)
    finally:
        streamer.leave(block)


def assert_at_rest(streamer):
    wait_until(
        lambda: not any(block.residency in (Residency.REQUESTED, Residency.LOADING) for block in streamer._blocks)
    )
    with streamer._lock:
        assert [block for block in streamer._blocks if block.num_users or block.is_installed] == []
        idle = sum(block.num_bytes for block in streamer._prefetched)
        assert idle <= streamer._limits.prefetch_bytes
        stray = [
            block
            for block in streamer._blocks
            if block.residency is Residency.RESIDENT
            and not (block.is_kept or block in streamer._prefetched or block in streamer._cached_experts)
        ]
        assert stray == []
        assert streamer._held_bytes == sum(
            block.num_bytes for block in streamer._blocks if block.residency is Residency.RESIDENT
        )
        away = [block for block in streamer._blocks if block.residency is Residency.ABSENT and not block.is_routed]
        assert streamer._num_absent == len(away)


def wait_until(holds, seconds=10):
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.001)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    options=st.builds(
        StreamOptions,
        prefetch_bytes=st.integers(0, 120) | st.none(),
        resident_bytes=st.integers(0, 200) | st.none(),
        workspace_bytes=st.integers(0, 200) | st.none(),
    ),
    routed=st.sets(st.integers(0, 5), max_size=2),
    passes=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=4),
    failing=st.sets(st.integers(0, 5), max_size=1),
)
def test_what_waits_is_within_the_window_and_what_stays_within_its_bound(sizes, options, routed, passes, failing):
    streamer = Streamer(options)
    blocks = [Fake(str(number), size, streamer, number in routed) for number, size in enumerate(sizes)]
    for number, order in enumerate(passes):
        for block in blocks:
            block.fails = OSError("here") if number == 1 and int(block.name) in failing else None
        for position in order:
            block = blocks[position % len(blocks)]
            with suppress(OSError):
                run(streamer, block, inner=[each for each in blocks if each.is_routed and each is not block][:1])
    if passes and any(passes):
        assert_at_rest(streamer)


def test_the_blocks_that_come_next_are_fetched_while_one_computes():
    streamer, blocks = streamer_of_tens(5, prefetch_bytes=20, resident_bytes=0)
    streamer.enter(blocks[0])
    wait_until(lambda: [block.residency for block in blocks] == [Residency.RESIDENT] * 3 + [Residency.ABSENT] * 2)
    streamer.leave(blocks[0])
    assert blocks[0].residency is Residency.ABSENT
    for number in range(1, 5):
        run(streamer, blocks[number])
    wait_until(lambda: blocks[0].residency is Residency.RESIDENT)  # a loop of decoding begins again
    assert_at_rest(streamer)


def test_blocks_that_stay_are_fetched_once():
    streamer, blocks = streamer_of_tens(5, prefetch_bytes=10, resident_bytes=25)
    for _ in range(4):
        for block in blocks:
            run(streamer, block)
    kept = [block for block in blocks if block.is_kept]
    assert len(kept) == 2
    assert all(block.calls.count("fetch") == 1 for block in kept)
    assert all(block.calls.count("fetch") >= 3 for block in blocks if not block.is_kept)


def test_routed_blocks_come_when_they_are_called_and_those_that_are_used_most_stay():
    streamer = Streamer(StreamOptions(prefetch_bytes=100, resident_bytes=20))
    experts = [Fake(str(number), 10, streamer, is_routed=True) for number in range(8)]
    for number in [1, 2, 1, 2, 1, 2, 5, 1, 2]:
        run(streamer, experts[number])
    assert [expert.calls.count("fetch") for expert in experts] == [0, 1, 1, 0, 0, 1, 0, 0]
    assert [int(expert.name) for expert in experts if expert.residency is Residency.RESIDENT] == [1, 2]


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), KeyboardInterrupt()])
def test_what_could_not_be_fetched_ahead_is_tried_again_by_who_needs_it(error):
    streamer, blocks = streamer_of_tens(2, prefetch_bytes=10, resident_bytes=0)
    blocks[1].fails = error
    streamer.enter(blocks[0])
    wait_until(lambda: blocks[1].has_failed)
    assert blocks[1].calls == ["reserve", "fetch", "drop"]
    streamer.leave(blocks[0])
    with pytest.raises(type(error)):
        run(streamer, blocks[1])
    assert blocks[1].residency is Residency.ABSENT
    blocks[1].fails = None
    run(streamer, blocks[1])
    for block in blocks:
        run(streamer, block)
    assert_at_rest(streamer)


def test_no_memory_or_no_thread_for_a_block_that_comes_later_does_not_disturb_this_one(monkeypatch):
    streamer, blocks = streamer_of_tens(2, prefetch_bytes=10, resident_bytes=0)

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for block in blocks * 2:
        run(streamer, block)
    assert_at_rest(streamer)
    assert streamer._prefetch_thread._queue == type(streamer._prefetch_thread._queue)()


@pytest.mark.parametrize("ends", ["in time", "with an error"])
def test_an_interrupt_while_waiting_for_the_thread_that_fetches_leaves_nothing_behind(ends):
    streamer, blocks = streamer_of_tens(4, prefetch_bytes=20, resident_bytes=0)
    blocks[1].may_end.clear()
    streamer.enter(blocks[0])
    wait_until(lambda: blocks[1].residency is Residency.LOADING)
    streamer.leave(blocks[0])
    main = threading.main_thread().ident
    threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        streamer.enter(blocks[1])
    assert blocks[1].num_users == 0
    blocks[1].fails = OSError() if ends == "with an error" else None
    blocks[1].may_end.set()
    wait_until(lambda: blocks[1].residency is not Residency.LOADING)
    blocks[1].fails = None
    for block in blocks * 2:
        run(streamer, block)
    assert_at_rest(streamer)


def test_threads_that_need_one_block_have_it_fetched_once_and_all_get_it():
    streamer, (block,) = streamer_of_tens(1, prefetch_bytes=0, resident_bytes=0)
    block.may_end.clear()
    inside = threading.Barrier(4)

    def use():
        streamer.enter(block)
        inside.wait(10)
        streamer.leave(block)

    def end():
        wait_until(lambda: block.num_users == 4)
        block.may_end.set()

    run_in_threads(use, *[()] * 4, while_running=end)
    assert block.calls == ["reserve", "fetch", "drop"]
    assert_at_rest(streamer)


def test_when_the_fetch_of_one_thread_fails_the_others_try_themselves():
    streamer, (block,) = streamer_of_tens(1, prefetch_bytes=0, resident_bytes=0)
    block.fails = OSError()
    block.may_end.clear()
    failed = []

    def use():
        try:
            run(streamer, block)
        except OSError:
            failed.append(1)

    def end():
        wait_until(lambda: block.num_users == 3)
        block.may_end.set()

    run_in_threads(use, *[()] * 3, while_running=end)
    assert len(failed) == 3
    assert_at_rest(streamer)


def test_many_threads_keep_the_bound():
    streamer = Streamer(StreamOptions(prefetch_bytes=25, resident_bytes=15))
    blocks = [Fake(str(number), 10, streamer, is_routed=number == 7) for number in range(8)]
    errors = []

    def passes(step):
        try:
            for _ in range(10):
                for block in blocks[::step]:
                    run(streamer, block, inner=blocks[7:] if block is blocks[0] else ())
        except BaseException as error:
            errors.append(error)

    run_in_threads(passes, (1,), (1,), (2,), (-1,))
    assert errors == []
    assert_at_rest(streamer)


@pytest.fixture(scope="module")
def plain():
    return made().eval()


@pytest.fixture
def folder(plain, tmp_path):
    return save(plain, tmp_path / "checkpoint")


@pytest.mark.parametrize("options", [{}, SMALL], ids=["all stay", "small window"])
@pytest.mark.parametrize("what", ["removed", "truncated", "replaced"])
@pytest.mark.parametrize("when", ["before the first", "between", "within"])
@pytest.mark.sample(4)
def test_a_file_that_changes_is_an_error_and_when_it_is_back_all_is_well(plain, folder, options, what, when):
    file, aside = folder / "model-4.safetensors", folder.parent / "aside"
    model = streamed(folder, **options)

    def change(*_):
        if aside.exists():
            return
        file.rename(aside)
        if what == "truncated":
            file.write_bytes(aside.read_bytes()[:700])
        elif what == "replaced":
            file.write_bytes(aside.read_bytes())

    with settled(model):
        if when == "between":
            assert torch.equal(model(IDS), plain(IDS))
        if when == "within":
            handle = model.layers[1].register_forward_hook(change)
        else:
            change()
        for _ in range(2):
            with pytest.raises(bigload.ReadError, match=r"model-4\.safetensors"):
                model(IDS)
        if when == "within":
            handle.remove()
        file.unlink(missing_ok=True)
        aside.rename(file)
        for _ in range(2):
            assert torch.equal(model(IDS), plain(IDS))


def test_two_models_stream_from_one_checkpoint_side_by_side(plain, folder):
    models = [streamed(folder, **SMALL) for _ in range(2)]
    assert streamer_of(models[0]) is not streamer_of(models[1])
    for _ in range(2):
        for model in models:
            assert torch.equal(model(IDS), plain(IDS))
    seen = []
    handle = models[0].layers[2].register_forward_pre_hook(lambda *_: seen.append(models[1](IDS)))
    assert torch.equal(models[0](IDS), plain(IDS))
    handle.remove()
    assert torch.equal(seen[0], plain(IDS))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finaliser
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 may raise between taking a lock and its `with`")
def test_an_interrupt_never_leaves_the_queue_of_the_thread_locked():
    class Worker:
        def work(self, block):
            pass

    interrupts = 0

    def interrupt(*_):
        nonlocal interrupts
        interrupts += 1
        raise KeyboardInterrupt

    def use_queue_until_interrupted(number):
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.000002 * number)
        while interrupts == number:  # a finaliser that is interrupted swallows the exception
            thread.put(1)
            thread.cancel(1)

    worker = Worker()
    thread = PrefetchThread(worker, Worker.work)
    thread.put(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an interrupt in its callbacks would end in them, and leave theirs undone
    try:
        for number in range(200):
            # The loop is elsewhere: in Python 3.12 and 3.13, what is raised by its jump back leaves a `with` around it.
            with suppress(KeyboardInterrupt, RuntimeError):  # that is what Thread.start() makes of one in its lock
                use_queue_until_interrupted(number)
            other = threading.Thread(target=thread.has, args=(1,), daemon=True)
            other.start()
            other.join(30)
            assert not other.is_alive()
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_while_a_block_is_requested_leaves_nobody_waiting_for_it(monkeypatch):
    streamer, blocks = streamer_of_tens(3, prefetch_bytes=20, resident_bytes=0)

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(streamer._prefetch_thread, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(streamer, blocks[0])
    assert [block.residency for block in blocks] == [Residency.ABSENT] * 3
    for block in blocks:
        run(streamer, block)
    assert_at_rest(streamer)


def test_an_interrupt_while_weights_leave_a_module_takes_all_of_them_out_of_it(plain, folder, monkeypatch):
    model = streamed(folder, **SMALL)

    def interrupt(hook):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with settled(model):
        monkeypatch.setattr(AlignDevicesHook, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finaliser
@pytest.mark.parametrize("options", [{}, SMALL, {"resident_bytes": 3000, "prefetch_bytes": 1500}])
def test_an_interrupt_at_any_moment_leaves_a_model_that_works(plain, folder, options):
    expected, kept = plain(IDS), []
    model = None
    for number in itertools.count(1):
        if model is None:
            model = streamed(folder, **options)
            before = held(model)
            for _ in range(2):
                model(IDS)
        faulthandler.dump_traceback_later(60, exit=True)  # if it waits for ever
        if not (stack := interrupted(partial(model, IDS), number)):
            break
        for _ in range(2):
            assert torch.equal(model(IDS), expected), stack
        if any(block.num_users for block in blocks_of(model).values()):
            kept.append(stack)
            model = None
        else:
            assert held(model) == before, stack
    faulthandler.cancel_dump_traceback_later()
    assert number > 500
    # Right before the model's forward ends, its blocks stay, which work.
    assert {name for stack in kept for name in stack[: stack.index("_forward")]} <= {
        "post_forward",
        "under_way",
        "_forwards",
        "_entered",
    }


@pytest.mark.slow
def test_interrupts_at_random_moments_leave_a_model_that_works(plain, folder):
    model = streamed(folder, **SMALL)
    before, others = held(model), set(fetchers())
    main = threading.main_thread().ident
    interrupted = leaked = 0
    model(IDS)
    for number in range(300):
        timer = threading.Timer(0.0005 + 0.00001 * number, lambda: signal.pthread_kill(main, signal.SIGINT))
        try:
            timer.start()
            for _ in range(20):
                model(IDS)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        leaked = sum(block.num_users for block in blocks_of(model).values())
        assert torch.equal(model(IDS), plain(IDS))
    assert interrupted > 200
    assert held(model) == before or leaked
    assert leaked <= 3  # an interrupt right before the end of the model's forward: such a block stays, and works
    assert len(set(fetchers()) - others) <= 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_streams_whatever_the_threads_were_at_when_it_was_made():
    gc.collect()  # what is left of other tests would be tidied up in the child as well
    streamer, blocks = streamer_of_tens(4, prefetch_bytes=20, resident_bytes=0)
    blocks[1].may_end.clear()
    run(streamer, blocks[0])
    wait_until(lambda: blocks[1].residency is Residency.LOADING)
    with streamer._prefetch_thread._changed:
        child = os.fork()
        if not child:  # nobody there will ever finish what the thread had begun, or give its locks back
            signal.alarm(20)
            blocks[1].may_end.set()
            for block in blocks * 2:
                run(streamer, block)
            os._exit(0)
    blocks[1].may_end.set()
    assert os.waitpid(child, 0)[1] == 0
    for block in blocks * 2:
        run(streamer, block)
    assert_at_rest(streamer)
