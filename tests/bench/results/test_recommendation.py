import pytest

from bigload.bench.cases import LoadCase
from bigload.bench.results.recommendation import Recommendation, SizeMeasured, best_of, measure_sizes, prefix
from bigload.bench.results.statistics import Summary
from bigload.checkpoint.source import open_checkpoint
from bigload.loading.settings import Method
from builders import write_shard


def summary(mean, stddev=0.0):
    return Summary(mean=mean, stddev=stddev, minimum=mean, maximum=mean)


def case(threads, method=Method.READ):
    return LoadCase(threads=threads, method=method)


def size(num_bytes, serial, parallel):
    return SizeMeasured(num_bytes=num_bytes, serial_seconds=serial, parallel_seconds=parallel)


def advice(*sizes):
    return Recommendation(strategy="read, 4 threads", threads=4, method="read", sizes=sizes)


def test_the_fastest_is_best():
    assert best_of([(case(1), summary(2.0)), (case(4), summary(1.0))]) == case(4)


def test_fewer_threads_are_better_where_the_difference_is_small_and_noise():
    assert best_of([(case(2), summary(1.03, 0.1)), (case(8), summary(1.0, 0.1))]) == case(2)


@pytest.mark.parametrize(("mean", "stddev"), [(1.03, 0.0), (1.3, 0.5)])
def test_fewer_threads_are_not_better_where_it_is_no_noise_or_not_small(mean, stddev):
    assert best_of([(case(2), summary(mean, stddev)), (case(8), summary(1.0, stddev))]) == case(8)


def test_another_method_is_not_put_in_the_place_of_the_fastest():
    assert best_of([(case(1, Method.MMAP), summary(1.01, 0.1)), (case(8), summary(1.0, 0.1))]) == case(8)


@pytest.mark.parametrize(
    ("sizes", "pays_from"),
    [
        ((), None),
        ((size(10, 1.0, 1.0), size(20, 2.0, 1.0), size(40, 4.0, 2.0)), 20),
        ((size(10, 2.0, 1.0), size(20, 2.0, 1.0)), 10),
        ((size(10, 2.0, 1.0), size(20, 1.0, 1.0)), None),
        ((size(10, 2.0, 1.0), size(20, 1.0, 1.0), size(40, 2.0, 1.0)), 40),
    ],
)
def test_threads_pay_from_the_size_on_above_which_they_always_did(sizes, pays_from):
    assert advice(*sizes).pays_from_bytes == pays_from


@pytest.fixture
def checkpoint(tmp_path):
    forms = {"a": ("U8", [600]), "b": ("U8", [100]), "c": ("U8", [300]), "d": ("U8", [1000])}
    return open_checkpoint(write_shard(tmp_path / "model.safetensors", forms))


def test_a_part_is_what_fits_in_the_order_of_the_file(checkpoint):
    assert [tensor.name for tensor in prefix(checkpoint.tensors.values(), 450)] == ["b", "c"]
    assert [tensor.name for tensor in prefix(checkpoint.tensors.values(), 1000)] == ["a", "b", "c"]


def test_sizes_are_loaded_by_turns_with_one_thread_and_several(checkpoint):
    asked = []

    def time_load(case, names):
        asked.append((case.threads, tuple(names)))
        return {1: 2.0, 4: 1.0}[case.threads] + 0.001 * len(asked)

    found = measure_sizes(checkpoint, case(4), time_load, sizes=(450, 900, 1500))
    assert [threads for threads, _ in asked] == [1, 4, 4, 1, 1, 4] * 2
    assert [measured.num_bytes for measured in found] == [400, 700]  # 1500 is more than half of all
    assert found[0].serial_seconds == pytest.approx(2.004)


def test_a_size_that_no_tensors_come_near_is_left_out(checkpoint):
    assert measure_sizes(checkpoint, case(4), lambda *_: 1.0, sizes=(50,)) == ()
