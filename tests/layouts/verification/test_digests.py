import threading
from contextlib import ExitStack

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.layouts.verification.digests import FileDigest, InOrderDigest
from builders import digest_of


def file_of(sizes, *, is_raw=False):
    tensors = tuple(
        OutputTensor(source=TensorInfo(f"t{n}", DTYPES["U8"], (size,), Span("source", 0, size)), dtype=DTYPES["U8"])
        for n, size in enumerate(sizes)
    )
    return OutputFile(file="out", tensors=tensors, is_raw=is_raw)


def content_of(output):
    data = [bytes([n + 1]) * tensor.num_bytes for n, tensor in enumerate(output.tensors)]
    return output.header + b"".join(data)


def digests_of(output, content):
    starts = output.starts()
    return {
        tensor.name: xxhash.xxh3_128_hexdigest(content[start : start + tensor.num_bytes])
        for tensor, start in zip(output.tensors, starts, strict=True)
    }


shapes = st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.booleans())


@given(shapes, st.lists(st.integers(1, 5000), max_size=12))
def test_however_a_file_is_cut_the_digests_are_those_of_its_bytes(shape, cuts):
    output = file_of(shape[0], is_raw=shape[1])
    content, digest, position = content_of(output), FileDigest.of(output), 0
    for cut in cuts:
        digest.update(memoryview(content)[position : position + cut])
        position = min(position + cut, len(content))
        assert digest.position == position
    digest.update(memoryview(content)[position:])
    assert digest.finish() == xxhash.xxh3_128_hexdigest(content) == digest_of(content)
    assert digest.tensors == digests_of(output, content)
    assert list(digest.tensors) == [tensor.name for tensor in output.tensors]


@given(shapes, st.integers(0, 5000), st.integers(0, 300))
def test_holes_are_digested_as_the_zeros_that_they_read_as(shape, stored, hole):
    output = file_of(shape[0], is_raw=shape[1])
    content = bytearray(content_of(output))
    stored = min(stored, len(content))
    hole = min(hole, len(content) - stored)
    content[stored : stored + hole] = bytes(hole)
    digest = FileDigest.of(output)
    digest.update(memoryview(content)[:stored])
    digest.skip_to(stored + hole)
    digest.update(memoryview(content)[stored + hole :])
    assert digest.finish() == digest_of(bytes(content))
    assert digest.tensors == digests_of(output, content)


def test_a_hole_at_the_end_needs_no_skip():
    output = file_of([10, 3_000_000, 0], is_raw=True)
    digest = FileDigest.of(output)
    digest.update(memoryview(b"x" * 10))
    assert digest.finish() == digest_of(b"x" * 10 + bytes(3_000_000))
    assert digest.tensors["t2"] == digest_of(b"")


@given(shapes, st.integers(0, 7), st.integers(0, 200))
def test_what_went_in_since_a_mark_is_forgotten(shape, index, more):
    output = file_of(shape[0], is_raw=shape[1])
    content = content_of(output)
    place = output.starts()[min(index, len(shape[0]) - 1)]
    digest = FileDigest.of(output)
    digest.update(memoryview(content)[:place])
    mark, known = digest.mark(), dict(digest.tensors)
    digest.update(memoryview(bytes(len(content)))[place : place + more])
    digest.rewind(mark)
    assert (digest.position, digest.tensors) == (place, known)
    digest.update(memoryview(content)[place:])
    assert digest.finish() == digest_of(content)
    assert digest.tensors == digests_of(output, content)


def lent_to(released, number):
    """Return what gives a window's memory back."""
    lent = ExitStack()
    lent.callback(released.append, number)
    return lent


@pytest.mark.parametrize("threads", [2, 5])
def test_a_lane_takes_windows_in_file_order_whichever_is_ready_first(threads):
    output = file_of([1000], is_raw=True)
    content = content_of(output)
    digested, released = [], []
    lane = InOrderDigest(FileDigest.of(output))
    everyone = threading.Barrier(threads)

    def add(number):
        everyone.wait()
        width = 1000 // threads
        part = memoryview(content)[number * width : (number + 1) * width]
        lane.add(number, number * width, part, lent_to(released, number), digested.append)

    workers = [threading.Thread(target=add, args=(number,)) for number in reversed(range(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert lane.digest.finish() == digest_of(content)
    assert released == list(range(threads))
    assert sorted(digested) == released


def test_a_window_that_comes_too_early_keeps_its_memory_and_no_thread():
    output = file_of([100], is_raw=True)
    content = content_of(output)
    digested, released = [], []
    lane = InOrderDigest(FileDigest.of(output))
    lane.add(1, 50, memoryview(content)[50:], lent_to(released, 1), digested.append)
    assert digested == released == []
    lane.add(0, 0, memoryview(content)[:50], lent_to(released, 0), digested.append)
    assert digested == released == [0, 1]
    assert lane.digest.finish() == digest_of(content)


def test_a_lane_leaves_out_what_the_digest_has_already():
    output = file_of([100], is_raw=True)
    content = content_of(output)
    digest = FileDigest.of(output)
    digest.update(memoryview(content)[:37])
    lane = InOrderDigest(digest)
    lane.add(0, 20, memoryview(content)[20:60], ExitStack(), lambda _: None)
    lane.add(1, 60, memoryview(content)[60:], ExitStack(), lambda _: None)
    assert digest.finish() == digest_of(content)


def test_an_aborted_lane_gives_all_memory_back_and_digests_nothing():
    digested, released = [], []
    lane = InOrderDigest(FileDigest.of(file_of([150], is_raw=True)))
    lane.add(1, 50, memoryview(bytes(50)), lent_to(released, 1), digested.append)
    lane.abort()
    assert released == [1]
    lane.add(2, 100, memoryview(bytes(50)), lent_to(released, 2), digested.append)
    lane.add(0, 0, memoryview(bytes(50)), lent_to(released, 0), digested.append)
    assert released == [1, 2, 0]
    assert digested == []
    assert lane.digest.position == 0
