from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.loading.schedule import ALIGNMENT, BLOCK_BYTES, Piece, ReadJob, schedule_reads


def tensor(name, start, num_bytes, file="one.safetensors"):
    return TensorInfo(name, DTYPES["U8"], (num_bytes,), Span(file, start, start + num_bytes))


def reads(schedule):
    return [(job.file, job.offset, job.num_bytes) for job in schedule.jobs]


def starts(schedule):
    return {name: (slot.buffer, slot.start) for name, slot in schedule.slots.items()}


@st.composite
def spread_tensors(draw):
    """Tensors in up to three files, next to each other or with others in between, in any order."""
    tensors = []
    for file in range(draw(st.integers(1, 3))):
        position = draw(st.integers(8, 200))
        sizes = draw(st.lists(st.tuples(st.integers(0, 90), st.sampled_from((0, 0, 0, 1, 40))), max_size=8))
        for index, (num_bytes, gap) in enumerate(sizes):
            tensors.append(tensor(f"{file}.{index}", position + gap, num_bytes, file=f"{file}.safetensors"))
            position += gap + num_bytes
    return draw(st.permutations(tensors))


def test_the_example_of_the_docstring_holds():
    tensors = [tensor("a", 100, 10), tensor("b", 110, 6), tensor("c", 200, 40)]
    schedule = schedule_reads(tensors, block_bytes=32)
    file = "one.safetensors"
    assert schedule.jobs == (
        ReadJob(file, 100, (Piece(0, 0, 10), Piece(0, 64, 70))),
        ReadJob(file, 200, (Piece(0, 128, 160),)),
        ReadJob(file, 232, (Piece(0, 160, 168),)),
    )
    assert starts(schedule) == {"a": (0, 0), "b": (0, 64), "c": (0, 128)}
    assert schedule.buffers == (192,)
    assert schedule.num_bytes == 56


def test_neighbours_are_one_read():
    schedule = schedule_reads([tensor(str(index), 8 + 10 * index, 10) for index in range(50)])
    assert reads(schedule) == [("one.safetensors", 8, 500)]


def test_a_hole_between_wanted_tensors_is_not_read():
    schedule = schedule_reads([tensor("a", 8, 10), tensor("b", 19, 10)])
    assert reads(schedule) == [("one.safetensors", 8, 10), ("one.safetensors", 19, 10)]


def test_a_read_ends_at_the_size_of_a_block():
    schedule = schedule_reads([tensor("a", 8, 100)], block_bytes=40)
    assert reads(schedule) == [("one.safetensors", 8, 40), ("one.safetensors", 48, 40), ("one.safetensors", 88, 20)]


def test_a_block_may_end_inside_the_second_of_two_neighbours():
    schedule = schedule_reads([tensor("a", 8, 30), tensor("b", 38, 30)], block_bytes=40)
    assert schedule.jobs == (
        ReadJob("one.safetensors", 8, (Piece(0, 0, 30), Piece(0, 64, 74))),
        ReadJob("one.safetensors", 48, (Piece(0, 74, 94),)),
    )


def test_every_file_has_a_buffer_and_reads_of_its_own():
    schedule = schedule_reads([tensor("b", 8, 10, file="b"), tensor("a", 18, 10, file="a")])
    assert reads(schedule) == [("a", 18, 10), ("b", 8, 10)]
    assert starts(schedule) == {"a": (0, 0), "b": (1, 0)}
    assert schedule.buffers == (64, 64)


def test_a_tensor_without_bytes_has_a_slot_and_no_read():
    schedule = schedule_reads([tensor("empty", 8, 0)])
    assert (schedule.jobs, schedule.buffers, set(schedule.slots)) == ((), (0,), {"empty"})


def test_nothing_wanted_is_nothing_read():
    schedule = schedule_reads([])
    assert (schedule.buffers, schedule.jobs, dict(schedule.slots), schedule.num_bytes) == ((), (), {}, 0)


def test_a_block_has_sixteen_mebibytes_unless_told():
    assert BLOCK_BYTES == 16 * 2**20
    schedule = schedule_reads([tensor("a", 8, 3 * BLOCK_BYTES + 1)])
    assert [job.num_bytes for job in schedule.jobs] == [BLOCK_BYTES] * 3 + [1]


@given(spread_tensors(), st.integers(1, 128))
def test_every_byte_of_every_tensor_is_read_once_and_into_its_slot(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    came_from = {}
    for job in schedule.jobs:
        offset = job.offset
        for piece in job.pieces:
            for place in range(piece.start, piece.stop):
                assert (piece.buffer, place) not in came_from
                came_from[piece.buffer, place] = (job.file, offset + place - piece.start)
            offset += piece.stop - piece.start
    expected = {
        (slot.buffer, slot.start + index): (slot.tensor.span.file, slot.tensor.span.start + index)
        for slot in schedule.slots.values()
        for index in range(slot.tensor.num_bytes)
    }
    assert came_from == expected
    assert schedule.slots.keys() == {tensor.name for tensor in tensors}


@given(spread_tensors(), st.integers(1, 128))
def test_slots_are_aligned_inside_their_buffer_and_never_overlap(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    slots = sorted(schedule.slots.values(), key=lambda slot: (slot.buffer, slot.start, slot.tensor.num_bytes))
    for slot in slots:
        assert slot.start % ALIGNMENT == 0
        assert slot.start + slot.tensor.num_bytes <= schedule.buffers[slot.buffer]
    for slot, following in pairwise(slots):
        assert slot.buffer < following.buffer or slot.start + slot.tensor.num_bytes <= following.start


@given(spread_tensors(), st.integers(1, 128))
def test_no_read_is_longer_than_a_block_and_none_is_empty(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    assert all(0 < job.num_bytes <= block_bytes for job in schedule.jobs)
    assert all(piece.start < piece.stop for job in schedule.jobs for piece in job.pieces)


@given(spread_tensors())
def test_reads_of_a_file_go_forward(tensors):
    places = [(job.file, job.offset) for job in schedule_reads(tensors, block_bytes=16).jobs]
    assert places == sorted(places)


@given(spread_tensors().flatmap(lambda tensors: st.tuples(st.just(tensors), st.permutations(tensors))))
def test_the_order_in_which_tensors_are_asked_for_does_not_matter(orders):
    first, second = (schedule_reads([t for t in tensors if t.num_bytes], block_bytes=16) for tensors in orders)
    assert (first.jobs, first.buffers, first.slots) == (second.jobs, second.buffers, second.slots)
