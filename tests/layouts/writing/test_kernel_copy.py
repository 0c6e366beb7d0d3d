"""Ranges that the kernel copies by itself. Sharing blocks is tried where `BIGLOAD_REFLINK_DIR` is on XFS or Btrfs."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.checkpoint.model import Span, TensorInfo
from bigload.checkpoint.records.manifest import read_manifest
from bigload.dtypes import DTYPES
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import DATA_ALIGNMENT, OutputFile, OutputTensor
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import reshard, run_reshard
from bigload.layouts.writing import kernel_copy as in_kernel_module
from bigload.layouts.writing.kernel_copy import KernelCopy, copy_in_kernel, data_offset, kernel_copy
from bigload.layouts.writing.windows import DataRanges
from bigload.loading.scheduling.slices import Slice
from bigload.machine.files.file_systems import FileSystem
from builders import contents, make_checkpoint, stored_tensors

BLOCK = 4096


def tensor(name, start, num_bytes, *, file="source", to="U8", parts=()):
    info = TensorInfo(name, DTYPES["U8"], (num_bytes,), Span(file, start, start + num_bytes))
    return OutputTensor(source=info, dtype=DTYPES[to], parts=parts)


def raw(*tensors):
    return OutputFile(file="out.dat", tensors=tensors, is_raw=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("xfs", KernelCopy.CLONE), ("btrfs", KernelCopy.CLONE), ("nfs4", KernelCopy.COPY), ("ext4", KernelCopy.NOTHING)],
)
def test_what_the_kernel_can_do_is_told_by_the_file_system(tmp_path, monkeypatch, kind, expected):
    system = FileSystem(kind=kind, device="")
    monkeypatch.setattr(in_kernel_module, "file_system_of", lambda path: system)
    assert kernel_copy(tmp_path, tmp_path) is expected
    assert kernel_copy(Path("/proc"), tmp_path) is KernelCopy.NOTHING
    monkeypatch.setattr(in_kernel_module, "file_system_of", lambda path: None)
    assert kernel_copy(tmp_path, tmp_path) is KernelCopy.NOTHING


def test_the_data_starts_where_in_a_block_most_of_it_does_in_the_source():
    assert data_offset([tensor("a", 8, 10_000_000), tensor("b", 100_000_000, 1_000)]) == 8
    assert data_offset([tensor("a", 3 * BLOCK, 1_000), tensor("b", 3 * BLOCK + 1_000, 9_000)]) == 0
    assert data_offset([tensor("a", 16, 1_000), tensor("b", 50_000 * 8, 9_000)]) == (400_000 - 1_000) % BLOCK
    assert data_offset([tensor("a", 3, 1_000)]) == 0  # safetensors' data begins at a multiple of 8
    assert data_offset([tensor("a", 8, 1_000, to="F32")]) == 0
    assert data_offset([]) == 0


@given(st.integers(0, 10**6).map(lambda n: 8 * n), st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_neighbours_that_stay_neighbours_fit_whole(start, sizes):
    tensors, position = [], start
    for size in sizes:
        tensors.append(tensor(f"t{position}", position, size))
        position += size
    assert data_offset(tensors) == start % DATA_ALIGNMENT


@pytest.fixture
def copied(monkeypatch):
    """What the kernel is asked for, as (source, start, at, num_bytes), by way of a kernel that does as it is told."""
    asked = []

    def take(source, start, target, at, num_bytes):
        asked.append((source, start, at, num_bytes))

    monkeypatch.setattr(in_kernel_module, "_clone", take)
    monkeypatch.setattr(in_kernel_module, "_copy", take)
    monkeypatch.setattr(in_kernel_module, "_LEAST_BYTES", BLOCK)
    return asked


def run(output, way=KernelCopy.CLONE):
    return copy_in_kernel(output, 9, {"source": 5, "other": 6}, way, block_bytes=BLOCK).pairs


def test_neighbours_are_one_range_of_whole_blocks(copied):
    output = raw(tensor("a", 0, 6_000), tensor("b", 6_000, 6_000), tensor("c", 0, 9_000, file="other"))
    assert run(output, KernelCopy.COPY) == ((0, 8192), (12288, 20480))
    assert copied == [(5, 0, 0, 8192), (6, 288, 12288, 8192)]


def test_only_blocks_that_stay_blocks_can_be_shared(copied):
    output = raw(tensor("a", 0, 6_000), tensor("b", 6_000, 6_000), tensor("c", 0, 9_000, file="other"))
    assert run(output) == ((0, 8192),)
    fitting = raw(tensor("a", 100, 6_000), tensor("b", BLOCK * 7 + 6_000, 20_000))
    assert run(fitting) == ((8192, 24576),)
    assert copied[1:] == [(5, BLOCK * 7 + 8192, 8192, 16384)]


def test_what_is_altered_or_rearranged_is_not_copied(copied):
    output = raw(
        tensor("a", 0, BLOCK),
        tensor("b", BLOCK, BLOCK, to="F16"),
        tensor("c", 3 * BLOCK, 2 * BLOCK, parts=(Slice(0, 0, BLOCK),)),
        tensor("d", 4 * BLOCK, BLOCK),
    )
    assert run(output) == ((0, BLOCK), (4 * BLOCK, 5 * BLOCK))


def test_little_is_not_worth_asking_for(copied, monkeypatch):
    monkeypatch.setattr(in_kernel_module, "_LEAST_BYTES", 2 * BLOCK)
    assert run(raw(tensor("a", 0, 2 * BLOCK - 1))) == ()
    assert run(raw(tensor("a", 0, 2 * BLOCK))) == ((0, 2 * BLOCK),)
    assert run(raw(tensor("a", 0, 2 * BLOCK)), KernelCopy.NOTHING) == ()


def test_a_kernel_that_refuses_is_not_asked_again_and_an_error_of_the_disk_is_one(copied, monkeypatch):
    output = raw(tensor("a", 0, BLOCK), tensor("b", 2 * BLOCK, BLOCK), tensor("c", 4 * BLOCK, BLOCK))
    take, number = in_kernel_module._clone, errno.EOPNOTSUPP

    def refuse_the_second(*arguments):
        if copied:
            copied.append("refused")
            raise OSError(number, os.strerror(number))
        take(*arguments)

    monkeypatch.setattr(in_kernel_module, "_clone", refuse_the_second)
    assert run(output) == ((0, BLOCK),)
    assert len(copied) == 2
    copied.clear()
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        run(output)


def test_the_server_copies_what_it_is_asked_for_in_pieces(tmp_path, monkeypatch):
    copy_file_range = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: copy_file_range(a, b, min(n, 1000), *at))
    monkeypatch.setattr(in_kernel_module, "_LEAST_BYTES", BLOCK)
    content = bytes(range(251)) * 100
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "out").write_bytes(bytes(3 * BLOCK))
    output = raw(tensor("a", 77, 3 * BLOCK))
    with (tmp_path / "source").open("rb") as source, (tmp_path / "out").open("r+b") as target:
        descriptors = {"source": source.fileno()}
        found = copy_in_kernel(output, target.fileno(), descriptors, KernelCopy.COPY, block_bytes=BLOCK)
        assert found == DataRanges(((0, 3 * BLOCK),))
        assert (tmp_path / "out").read_bytes() == content[77 : 77 + 3 * BLOCK]
        os.truncate(tmp_path / "source", BLOCK)
        assert copy_in_kernel(output, target.fileno(), descriptors, KernelCopy.COPY, block_bytes=BLOCK).pairs == ()


# Where blocks can be shared


@pytest.fixture
def reflinks():
    place = os.environ.get("BIGLOAD_REFLINK_DIR")
    if not place:
        pytest.skip("BIGLOAD_REFLINK_DIR names no folder on XFS or Btrfs")
    folder = Path(mkdtemp(dir=place))
    assert kernel_copy(folder, folder) is KernelCopy.CLONE
    yield folder
    shutil.rmtree(folder)


def make_source(folder, **size):
    """Write a checkpoint whose data starts at a multiple of 8, as writers of safetensors have it, and of no block."""
    for file in make_checkpoint(folder, **size).glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        padding = -length % 8 + 8 * ((length + 8) % BLOCK in range(BLOCK - 8, BLOCK))
        header = content[8 : 8 + length] + b" " * padding
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    os.sync()
    return folder


def used(folder):
    os.sync()
    return shutil.disk_usage(folder).used


@pytest.mark.parametrize("verify", ["full", "none", "size"])
def test_an_output_shares_the_blocks_of_its_source(reflinks, verify):
    source = make_source(reflinks / "source", blocks=4, shards=1, hidden=1024, vocab=2048)
    before = used(reflinks)
    report = reshard(source, reflinks / "out", verify=verify, max_shard_bytes=None)
    assert report.num_bytes > 60 << 20
    assert used(reflinks) - before < report.num_bytes // 4  # what has another neighbour may lie elsewhere in a block
    written = stored_tensors(reflinks / "out" / "model.safetensors")
    assert written == stored_tensors(*source.glob("*.safetensors"))
    record = read_manifest(reflinks / "out").files["model.safetensors"]
    assert (record.digest is not None) == (verify == "full")
    assert {digest is not None for digest in record.tensors.values()} == {verify == "full"}


def test_shared_blocks_part_when_the_source_is_written_to(reflinks):
    source = make_source(reflinks / "source", blocks=2, shards=1, hidden=1024, vocab=2048)
    reshard(source, reflinks / "out", verify="none")
    before = contents(reflinks / "out")
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(1 << 20)
        file.write(bytes(4 << 20))
    os.sync()
    assert contents(reflinks / "out") == before


def test_what_was_interrupted_is_gone_on_with(reflinks):
    source = make_source(reflinks / "source", blocks=4, shards=2, hidden=1024, vocab=2048)
    plan = bigload.plan(source, {"cuda:0": "60MiB", "cpu": "40MiB"}, overhead=0)
    reshard(plan, reflinks / "expected")
    calls = []

    def stop(progress):
        calls.append(progress)
        if len(calls) == 6:
            raise KeyboardInterrupt

    options = ReshardOptions(max_shard_bytes=20 << 20, threads=1)
    with pytest.raises(KeyboardInterrupt):
        run_reshard(prepare_reshard(plan, reflinks / "out", options), on_progress=stop)
    reshard(plan, reflinks / "whole", max_shard_bytes=20 << 20)
    report = reshard(plan, reflinks / "out", max_shard_bytes=20 << 20, resume=True)
    assert report.kept_bytes > 0
    assert contents(reflinks / "out") == contents(reflinks / "whole")


def test_the_system_says_that_the_blocks_are_shared(reflinks):
    if shutil.which("filefrag") is None:
        pytest.skip("there is no filefrag here")
    source = make_source(reflinks / "source", blocks=2, shards=1, hidden=1024, vocab=2048)
    reshard(source, reflinks / "out", verify="none")
    os.sync()
    told = subprocess.run(
        ["filefrag", "-v", reflinks / "out" / "model.safetensors"], capture_output=True, text=True, check=True
    )
    assert "shared" in told.stdout
