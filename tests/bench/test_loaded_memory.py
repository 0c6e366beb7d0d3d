import mmap

import torch

from bigload.bench.loaded_memory import touch

PAGE = mmap.PAGESIZE


def test_a_byte_of_every_page_and_the_last_one_are_read():
    assert touch([torch.zeros(3 * PAGE + 5, dtype=torch.uint8)]) == 4 + 1


def test_what_is_empty_and_what_is_on_meta_has_no_pages():
    assert touch([torch.empty(0), torch.empty(5, device="meta")]) == 0


def test_large_tensors_of_any_dtype_are_touched_in_pieces():
    num_bytes = 64 * 2**20 + PAGE
    assert touch([torch.zeros(num_bytes // 2, dtype=torch.bfloat16)]) == num_bytes // PAGE + 1


def test_touching_a_map_makes_its_pages_part_of_this_process(tmp_path):
    from bigload.machine.memory.process_memory import resident_memory

    size = 16 * 2**20
    (tmp_path / "file").write_bytes(b"\1" * size)
    mapped = torch.from_file(str(tmp_path / "file"), size=size, dtype=torch.uint8)
    before = resident_memory().file_bytes
    touch([mapped])
    assert resident_memory().file_bytes - before >= size * 0.9
