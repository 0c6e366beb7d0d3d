from pathlib import Path

import pytest

from bigload.errors import ReadError, UnsupportedMethodError
from bigload.loading.methods import Method
from bigload.loading.strategy import io_method as method_choice
from bigload.loading.strategy.io_method import (
    MIN_MEASURED_BYTES,
    Facts,
    MethodChoice,
    choose_method,
    decide,
    decide_unmeasured,
)
from bigload.loading.strategy.throughput_samples import FileRanges, Speeds
from bigload.machine.file_systems import FileSystem

GIB = 2**30
LARGE = MIN_MEASURED_BYTES
SHARD = Path("a.safetensors")


def facts(**known):
    return Facts(**{"num_bytes": LARGE, "file_system": "ext4 on vda", "cached": 0.0, **known})


def speeds(read, direct):
    return Speeds(read=read * GIB, direct=direct * GIB)


@pytest.mark.parametrize("asked", [Method.READ, Method.MMAP, Method.DIRECT])
def test_what_is_asked_for_is_done(asked):
    assert decide_unmeasured(facts(), asked) == MethodChoice(method=asked, reason="asked for")


def test_direct_reads_that_cannot_be_are_an_error_that_says_where():
    with pytest.raises(UnsupportedMethodError, match="tmpfs offers no reads past the page cache") as caught:
        decide_unmeasured(facts(without_direct=SHARD, file_system="tmpfs"), Method.DIRECT)
    assert caught.value.path == SHARD


@pytest.mark.parametrize("asked", [Method.READ, Method.MMAP])
def test_other_methods_need_no_direct_reads(asked):
    assert decide_unmeasured(facts(without_direct=SHARD), asked).method is asked


def test_a_map_over_a_network_is_made_and_warned_of():
    choice = decide_unmeasured(facts(is_network=True, file_system="nfs4 on server:/x"), Method.MMAP)
    assert choice.method is Method.MMAP
    assert choice.reason.startswith("asked for, though nfs4 on server:/x")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"num_bytes": LARGE - 1}, "less than 256.00 MiB is too little to measure what is faster"),
        ({"without_direct": SHARD, "file_system": "tmpfs"}, "tmpfs offers no direct reads"),
        ({"cached": 1.0}, "100 % of the bytes are in the page cache"),
        ({"cached": 0.9}, "90 % of the bytes are in the page cache"),
    ],
)
def test_nothing_is_measured_where_it_cannot_pay(known, reason):
    assert decide_unmeasured(facts(**known), Method.AUTO) == MethodChoice(method=Method.READ, reason=reason)


@pytest.mark.parametrize("cached", [0.0, 0.89, None])
def test_what_is_large_and_not_cached_is_worth_measuring(cached):
    assert decide_unmeasured(facts(cached=cached), Method.AUTO) is None


@pytest.mark.parametrize(
    ("read", "direct", "is_crowded", "method"),
    [
        (0.9, 2.3, False, Method.DIRECT),
        (2.3, 0.9, False, Method.READ),
        (1.0, 1.0, False, Method.READ),  # the next load finds it cached
        (1.0, 1.04, False, Method.READ),
        (1.0, 1.06, False, Method.DIRECT),
        (1.2, 1.0, True, Method.DIRECT),  # there is no room to keep what is read
        (1.3, 1.0, True, Method.READ),
    ],
)
@pytest.mark.parametrize("cached", [0.0, 0.4, None])
def test_what_is_not_cached_comes_the_faster_way(read, direct, is_crowded, method, cached):
    assert decide(facts(cached=cached, is_crowded=is_crowded), speeds(read, direct)).method is method


@pytest.mark.parametrize(
    ("cached", "cache_first"), [(0.0, False), (0.01, False), (0.02, True), (0.8, True), (None, False)]
)
def test_what_is_cached_is_not_fetched_from_the_disk(cached, cache_first):
    choice = decide(facts(cached=cached), speeds(1, 2))
    assert (choice.method, choice.cache_first) == (Method.DIRECT, cache_first)
    assert not decide(facts(cached=cached), speeds(2, 1)).cache_first


def test_the_reason_tells_what_was_measured():
    assert decide(facts(cached=0.03), speeds(0.9, 2.3)).reason == (
        "3 % of the bytes are cached, and direct reads ran at 2.30 GiB/s against 921.60 MiB/s through the page cache"
    )
    assert decide(facts(cached=None), speeds(2, 1)).reason == (
        "reads through the page cache ran at 2.00 GiB/s against 1.00 GiB/s directly"
    )
    assert decide(facts(is_crowded=True), speeds(1, 2)).reason.endswith(
        "page cache, which has no room beside the tensors"
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine of made-up facts, and a list of what it was asked for."""
    asked = []
    answers = {"alignment": 512, "cached": 0.0, "speeds": speeds(1, 2)}

    def answer(name):
        def ask(*arguments, **options):
            asked.append(name)
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return ask

    monkeypatch.setattr(method_choice, "direct_alignment", answer("alignment"))
    monkeypatch.setattr(method_choice, "cached_part", answer("cached"))
    monkeypatch.setattr(method_choice, "measure_speeds", answer("speeds"))
    monkeypatch.setattr(method_choice, "file_system_of", lambda path: FileSystem(kind="ext4", device="vda"))
    answers["asked"] = asked
    return answers


def choose(num_bytes=LARGE, **options):
    return choose_method([FileRanges(path=SHARD, ranges=((0, num_bytes),))], **{"threads": 2, **options})


def test_a_large_load_is_measured(machine):
    assert choose().method is Method.DIRECT
    assert machine["asked"] == ["alignment", "cached", "speeds"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"num_bytes": LARGE - 1}, []),
        ({"asked": Method.READ}, []),
        ({"asked": Method.MMAP}, []),
        ({"asked": Method.DIRECT}, ["alignment"]),
    ],
)
def test_nothing_is_asked_that_does_not_matter(machine, options, asked):
    choose(**options)
    assert machine["asked"] == asked


def test_without_direct_reads_nobody_asks_what_is_cached(machine):
    machine["alignment"] = None
    assert choose() == MethodChoice(method=Method.READ, reason="ext4 on vda offers no direct reads")
    assert machine["asked"] == ["alignment"]


def test_too_few_uncached_samples_mean_reads(machine):
    machine["speeds"] = None
    assert choose().method is Method.READ


def test_a_sample_that_cannot_be_read_does_not_end_the_load(machine):
    machine["speeds"] = ReadError(SHARD, "Input/output error at byte 7")
    choice = choose()
    assert choice.method is Method.READ
    assert "Input/output error at byte 7" in choice.reason


@pytest.mark.parametrize(
    ("memory", "available", "method"),
    [
        (LARGE, 2 * LARGE, Method.READ),
        (LARGE, 2 * LARGE - 1, Method.DIRECT),
        (0, LARGE, Method.READ),  # to a GPU
        (LARGE, None, Method.READ),
    ],
)
def test_tensors_and_page_cache_have_to_fit_into_memory_together(machine, memory, available, method):
    machine["speeds"] = speeds(1.1, 1.0)
    assert choose(memory_bytes=memory, available_bytes=available).method is method


def test_no_files_are_read_without_asking(machine):
    assert choose_method([], threads=1).method is Method.READ
