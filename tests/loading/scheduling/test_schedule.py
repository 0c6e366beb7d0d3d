from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.loading.scheduling.read_jobs import ALIGNMENT, BLOCK_BYTES, Delivery, Destination, DTypeCast, ReadJob
from bigload.loading.scheduling.read_requests import MAX_GAP_BYTES, STAGED_BLOCK_BYTES
from bigload.loading.scheduling.schedule import BufferSpec, RequestedTensor, schedule_reads
from bigload.loading.scheduling.slices import Slice

FILE = "one.safetensors"


def tensor(name, start, num_bytes, file=FILE):
    return stored(name, start, (num_bytes,), file=file)


def stored(name, start, shape, *, dtype="U8", file=FILE, wanted=None, part=None, device="cpu"):
    num_bytes = prod(shape) * DTYPES[dtype].bits // 8
    info = TensorInfo(name, DTYPES[dtype], tuple(shape), Span(file, start, start + num_bytes))
    return RequestedTensor(tensor=info, dtype=DTYPES[wanted or dtype], part=part, device=device)


def sizes(schedule):
    return tuple(buffer.num_bytes for buffer in schedule.buffers)


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
    assert schedule.jobs == (
        ReadJob(FILE, 100, 16, (Destination(0, 10, 0, 0), Destination(10, 6, 0, 64))),
        ReadJob(FILE, 200, 32, (Destination(0, 32, 0, 128),)),
        ReadJob(FILE, 232, 8, (Destination(0, 8, 0, 160),)),
    )
    assert starts(schedule) == {"a": (0, 0), "b": (0, 64), "c": (0, 128)}
    assert schedule.buffers == (BufferSpec("cpu", FILE, 192),)
    assert schedule.num_bytes == 56


def test_neighbours_are_one_read():
    schedule = schedule_reads([tensor(str(index), 8 + 10 * index, 10) for index in range(50)])
    assert reads(schedule) == [("one.safetensors", 8, 500)]


def test_neighbours_that_are_neighbours_in_their_buffer_are_one_destination():
    schedule = schedule_reads([tensor("a", 100, 64), tensor("b", 164, 128), tensor("c", 292, 8)])
    assert schedule.jobs == (ReadJob(FILE, 100, 200, (Destination(0, 200, 0, 0),)),)


def test_a_hole_between_wanted_tensors_is_not_read():
    schedule = schedule_reads([tensor("a", 8, 10), tensor("b", 19, 10)])
    assert reads(schedule) == [("one.safetensors", 8, 10), ("one.safetensors", 19, 10)]


def test_a_read_ends_at_the_size_of_a_block():
    schedule = schedule_reads([tensor("a", 8, 100)], block_bytes=40)
    assert reads(schedule) == [("one.safetensors", 8, 40), ("one.safetensors", 48, 40), ("one.safetensors", 88, 20)]


def test_a_block_may_end_inside_the_second_of_two_neighbours():
    schedule = schedule_reads([tensor("a", 8, 30), tensor("b", 38, 30)], block_bytes=40)
    assert schedule.jobs == (
        ReadJob(FILE, 8, 40, (Destination(0, 30, 0, 0), Destination(30, 10, 0, 64))),
        ReadJob(FILE, 48, 20, (Destination(0, 20, 0, 74),)),
    )


def test_every_file_has_a_buffer_and_reads_of_its_own():
    schedule = schedule_reads([tensor("b", 8, 10, file="b"), tensor("a", 18, 10, file="a")])
    assert reads(schedule) == [("a", 18, 10), ("b", 8, 10)]
    assert starts(schedule) == {"a": (0, 0), "b": (1, 0)}
    assert sizes(schedule) == (64, 64)


def test_a_tensor_without_bytes_has_a_slot_and_no_read():
    schedule = schedule_reads([tensor("empty", 8, 0)])
    assert (schedule.jobs, sizes(schedule), set(schedule.slots)) == ((), (0,), {"empty"})


def test_nothing_wanted_is_nothing_read():
    schedule = schedule_reads([])
    assert (schedule.buffers, schedule.jobs, dict(schedule.slots), schedule.num_bytes) == ((), (), {}, 0)


def test_a_block_has_sixteen_mebibytes_unless_told():
    assert BLOCK_BYTES == 16 * 2**20
    schedule = schedule_reads([tensor("a", 8, 3 * BLOCK_BYTES + 1)])
    assert [job.num_bytes for job in schedule.jobs] == [BLOCK_BYTES - 8, BLOCK_BYTES, BLOCK_BYTES, 9]


def test_reads_after_the_first_of_neighbours_begin_at_a_page_of_the_file():
    tensors = [tensor("a", 4104, 3 * BLOCK_BYTES), tensor("b", 4104 + 3 * BLOCK_BYTES, BLOCK_BYTES + 7)]
    offsets = [job.offset for job in schedule_reads(tensors).jobs]
    assert offsets == [4104, *range(4096 + BLOCK_BYTES, 4096 + 5 * BLOCK_BYTES, BLOCK_BYTES)]


@given(spread_tensors(), st.integers(1, 128))
def test_every_byte_of_every_tensor_is_read_once_and_into_its_slot(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    came_from = {}
    for job in schedule.jobs:
        for destination in job.destinations:
            for index in range(destination.num_bytes):
                assert (destination.buffer, destination.start + index) not in came_from
                came_from[destination.buffer, destination.start + index] = (
                    job.file,
                    job.offset + destination.source + index,
                )
    expected = {
        (slot.buffer, slot.start + index): (slot.wanted.tensor.span.file, slot.wanted.tensor.span.start + index)
        for slot in schedule.slots.values()
        for index in range(slot.wanted.num_bytes)
    }
    assert came_from == expected
    assert schedule.slots.keys() == {tensor.name for tensor in tensors}


@given(spread_tensors(), st.integers(1, 128))
def test_slots_are_aligned_inside_their_buffer_and_never_overlap(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    slots = sorted(schedule.slots.values(), key=lambda slot: (slot.buffer, slot.start, slot.wanted.num_bytes))
    for slot in slots:
        assert slot.start % ALIGNMENT == 0
        assert slot.start + slot.wanted.num_bytes <= schedule.buffers[slot.buffer].num_bytes
    for slot, following in pairwise(slots):
        assert slot.buffer < following.buffer or slot.start + slot.wanted.num_bytes <= following.start


@given(spread_tensors(), st.integers(1, 128))
def test_no_read_is_longer_than_a_block_and_none_is_empty(tensors, block_bytes):
    schedule = schedule_reads(tensors, block_bytes=block_bytes)
    assert all(0 < job.num_bytes <= block_bytes for job in schedule.jobs)
    assert all(destination.num_bytes for job in schedule.jobs for destination in job.destinations)


@given(spread_tensors())
def test_reads_of_a_file_go_forward(tensors):
    places = [(job.file, job.offset) for job in schedule_reads(tensors, block_bytes=16).jobs]
    assert places == sorted(places)


@given(spread_tensors().flatmap(lambda tensors: st.tuples(st.just(tensors), st.permutations(tensors))))
def test_the_order_in_which_tensors_are_asked_for_does_not_matter(orders):
    first, second = (schedule_reads([t for t in tensors if t.num_bytes], block_bytes=16) for tensors in orders)
    assert (first.jobs, first.buffers, first.slots) == (second.jobs, second.buffers, second.slots)


def carried_out(schedule, files):
    """What the slots hold after the jobs, carried out byte by byte; casts only from 1 to 2 bytes, by doubling each."""
    memory = [bytearray(buffer.num_bytes) for buffer in schedule.buffers]
    for job in schedule.jobs:
        read = files[job.file][job.offset : job.offset + job.num_bytes]
        assert len(read) == job.num_bytes
        for destination in job.destinations:
            starts = [destination.source + row * destination.stride for row in range(destination.rows)]
            content = b"".join(read[start : start + destination.row_bytes] for start in starts)
            assert len(content) == destination.num_bytes
            content = content if destination.cast is None else bytes(byte for byte in content for _ in range(2))
            assert len(content) == destination.memory_bytes
            memory[destination.buffer][destination.start : destination.start + destination.memory_bytes] = content
    return {
        name: bytes(memory[slot.buffer][slot.start : slot.start + slot.wanted.num_bytes])
        for name, slot in schedule.slots.items()
    }


@st.composite
def parts(draw):
    """A tensor of bytes of up to three dimensions, a part of it, and whether it is cast, at some offset."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    part = draw(st.none() | st.just(Slice(dim, start, draw(st.integers(start, shape[dim])))))
    place = draw(st.sampled_from(("cpu", "cuda:0")))
    return shape, part, draw(st.booleans()), place


@given(st.lists(parts(), min_size=1, max_size=4), st.integers(1, 64))
def test_parts_casts_and_devices_end_up_with_the_right_bytes_in_their_slots(wanted, block_bytes):
    content = bytes(range(1, 256)) * 20
    position, tensors, expected = 3, [], {}
    for number, (shape, part, is_cast, place) in enumerate(wanted):
        want = stored(str(number), position, shape, part=part, device=place, wanted="I16" if is_cast else None)
        tensors.append(want)
        numbers = torch.tensor(list(content[position : position + prod(shape)])).view(shape)
        chosen = numbers if part is None else numbers.narrow(part.dim, part.start, part.stop - part.start)
        raw = bytes(chosen.flatten().tolist())
        expected[str(number)] = bytes(byte for byte in raw for _ in range(2)) if is_cast else raw
        position += prod(shape)
    assert carried_out(schedule_reads(tensors, block_bytes=block_bytes), {FILE: content}) == expected


def test_columns_close_together_are_read_with_what_lies_between_and_gathered():
    columns = stored("a", 100, (4, 10), part=Slice(1, 2, 5))
    (job,) = schedule_reads([columns]).jobs
    assert (job.offset, job.num_bytes, job.delivery) == (102, 33, Delivery.STAGED)
    assert job.destinations == (Destination(0, 3, 0, 0, rows=4, stride=10),)


def test_columns_far_apart_are_read_one_by_one_and_in_place():
    width = MAX_GAP_BYTES + 10
    schedule = schedule_reads([stored("a", 0, (3, width), part=Slice(1, 0, 8))])
    assert reads(schedule) == [(FILE, 0, 8), (FILE, width, 8), (FILE, 2 * width, 8)]
    assert {job.delivery for job in schedule.jobs} == {Delivery.STRAIGHT}
    assert schedule.num_bytes == 24


def test_rows_are_one_read_of_their_own_bytes():
    (job,) = schedule_reads([stored("a", 100, (4, 10), part=Slice(0, 1, 3))]).jobs
    assert (job.offset, job.num_bytes, job.delivery) == (110, 20, Delivery.STRAIGHT)


def test_what_is_cast_comes_in_small_blocks_that_end_between_elements():
    schedule = schedule_reads([stored("a", 8, (STAGED_BLOCK_BYTES,), dtype="BF16", wanted="F32")])
    assert [job.num_bytes for job in schedule.jobs] == [STAGED_BLOCK_BYTES] * 2
    odd = schedule_reads([stored("a", 8, (9,), dtype="BF16", wanted="F32")], block_bytes=5)
    assert [job.num_bytes for job in odd.jobs] == [4, 4, 4, 4, 2]
    assert [destination.start for job in odd.jobs for destination in job.destinations] == [0, 8, 16, 24, 32]
    assert odd.jobs[0].destinations[0].cast == DTypeCast(DTYPES["BF16"], DTYPES["F32"])


def test_jobs_never_mix_devices_or_ways():
    schedule = schedule_reads(
        [
            stored("a", 0, (8,)),
            stored("b", 8, (8,), device="cuda:0"),
            stored("c", 16, (8,), device="cuda:1"),
            stored("d", 24, (4,), dtype="BF16", wanted="F32"),
            stored("e", 32, (8,)),
        ]
    )
    assert [(job.device, job.delivery) for job in schedule.jobs] == [
        ("cpu", Delivery.STRAIGHT),
        ("cuda:0", Delivery.STAGED),
        ("cuda:1", Delivery.STAGED),
        ("cpu", Delivery.STAGED),
        ("cpu", Delivery.STRAIGHT),
    ]
    assert [schedule.bytes_on(place) for place in ("cpu", "cuda:0", "cuda:1")] == [192, 8, 8]


def test_on_an_accelerator_every_tensor_has_memory_of_its_own():
    schedule = schedule_reads([stored(name, 8 * index, (8,), device="cuda:0") for index, name in enumerate("abc")])
    assert schedule.buffers == (BufferSpec("cuda:0", FILE, 8),) * 3
    assert len(schedule.jobs) == 1


def test_tensors_in_the_same_bytes_are_read_once_and_share_memory():
    wanted = [stored("a", 0, (4, 2)), stored("b", 0, (8,)), stored("c", 0, (4,)), stored("d", 0, (8,), wanted="I16")]
    schedule = schedule_reads(wanted)
    starts = {name: slot.start for name, slot in schedule.slots.items()}
    assert starts == {"a": 0, "b": 0, "c": 64, "d": 128}
    assert reads(schedule) == [(FILE, 0, 8), (FILE, 0, 4), (FILE, 0, 8)]


def test_in_a_map_whole_tensors_and_rows_stay_where_they_are():
    wanted = [
        stored("whole", 8, (4, 2), dtype="F32"),
        stored("rows", 40, (4, 2), dtype="F32", part=Slice(0, 1, 3)),
        stored("columns", 72, (4, 2), dtype="F32", part=Slice(1, 0, 1)),
        stored("cast", 104, (4, 2), dtype="BF16", wanted="F32"),
        stored("astray", 121, (2,), dtype="F32"),
        stored("away", 132, (2,), dtype="F32", device="cuda:0"),
    ]
    schedule = schedule_reads(wanted, in_map=True)
    places = {name: (schedule.buffers[slot.buffer].is_map, slot.start) for name, slot in schedule.slots.items()}
    assert places == {
        "whole": (True, 8),
        "rows": (True, 48),
        "columns": (False, 0),
        "cast": (False, 64),
        "astray": (False, 128),
        "away": (False, 0),
    }
    assert [(job.offset, job.num_bytes) for job in schedule.jobs if job.delivery is Delivery.POPULATED] == [
        (8, 32),
        (48, 16),
    ]
    assert schedule.bytes_on("cpu") == 192


def test_a_lazy_map_reads_nothing_of_what_stays_in_it():
    wanted = [stored("a", 0, (8,)), stored("b", 8, (4,), dtype="BF16", wanted="F32")]
    schedule = schedule_reads(wanted, in_map=True, populate=False)
    assert [(job.offset, job.delivery) for job in schedule.jobs] == [(8, Delivery.STAGED)]
