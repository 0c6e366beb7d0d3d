"""A large file is written by several ranks in parts: the bytes and the manifest of one rank, also after failures."""

import os
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.distributed.process_group import SingleProcess
from bigload.dtypes import DTYPES
from bigload.errors import DamagedOutputError, RankError
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import output_file_writer, shares, writer
from bigload.layouts.writing.journal import read_progress
from bigload.layouts.writing.shares import shares_of
from bigload.loading.scheduling.slices import Slice
from builders import contents, make_checkpoint
from reshard_teams import check_resumed as check_resumed_in_teams
from reshard_teams import entries, make_impatient
from reshard_teams import run as run_in_team
from thread_process_groups import GoneError, outcomes

WINDOW = 16 * 1024
MEETINGS = 12
"""How often ranks meet that write parts of a file."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("parts") / "source", blocks=4, shards=2, hidden=64, vocab=512)


@pytest.fixture(scope="module")
def expected(source):
    reshard(source, source.with_name("expected"), max_shard_bytes=None, team=SingleProcess())
    return contents(source.with_name("expected"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shares, "LEAST_GAIN_BYTES", 0)
    monkeypatch.setattr(shares, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(writer, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(writer, "NOTE_PART_EVERY_BYTES", WINDOW)
    make_impatient(monkeypatch)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


run = partial(run_in_team, max_shard_bytes=None)
check_resumed = partial(check_resumed_in_teams, run=run)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.sample(2)
def test_all_ranks_write_of_one_file(source, expected, out, size, verify):
    written = [0] * size

    def work(team):
        def count(done):
            written[team.rank] = done.done_bytes

        return run(source, out, team, verify=verify, on_progress=count)

    reports = outcomes(size, work)
    assert [getattr(report, "out", report) for report in reports] == [out] * size
    assert contents(out) == expected
    assert entries(out.parent) == ["out"]
    num_bytes = len(expected["model.safetensors"])
    assert written[0] - num_bytes == pytest.approx(num_bytes / size, abs=WINDOW)  # and all of it is read back
    assert written[1:] == pytest.approx([num_bytes / size] * (size - 1), abs=WINDOW)


@pytest.mark.parametrize("is_direct", [True, False])
def test_several_files_some_of_which_are_cut(source, tmp_path, monkeypatch, is_direct):
    if not is_direct:
        monkeypatch.setattr(writer, "direct_write_alignment", lambda *_, **__: None, raising=False)
        monkeypatch.setattr(output_file_writer, "direct_alignment", lambda _: None)
    options = {"max_shard_bytes": 200_000, "dtype": "fp32"}
    reshard(source, tmp_path / "alone", team=SingleProcess(), **options)
    outcomes(3, lambda team: run(source, tmp_path / "out", team, **options))
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize("number", range(MEETINGS))
@pytest.mark.parametrize("dying", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.sample(3)
def test_who_dies_between_steps_is_named_and_any_number_resumes(source, expected, out, dying, number):
    ends = outcomes(3, lambda team: run(source, out, team), dies_at={dying: number})
    assert isinstance(ends[dying], GoneError)
    assert not out.exists() or contents(out) == expected
    check_resumed(source, out, expected, random.Random(number).choice([1, 2, 4]))


def test_there_are_so_many_meetings(source, out):
    ends = outcomes(2, lambda team: (run(source, out, team), team.num_shares))
    assert {end[1] for end in ends} == {MEETINGS}


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.sample(2)
def test_windows_that_were_written_are_kept(  # noqa: PLR0917
    source, expected, out, monkeypatch, failing, size
):
    """A failure in one rank after half of its windows is one in all; what others wrote is not written again."""
    write, count = output_file_writer.OutputFileWriter.write, iter(range(1000))

    def refused(self, view, offset):
        if offset >= {0: 2 * WINDOW, 2: 0}[failing] and offset % (2 * WINDOW) and _rank_of(offset) == failing:
            raise output_file_writer.WriteError(self.path, OSError(5, "input/output error"))
        next(count)
        write(self, view, offset)

    num_bytes = len(expected["model.safetensors"])

    def _rank_of(offset):
        return min(offset * 3 // num_bytes, 2)

    with monkeypatch.context() as patched:
        patched.setattr(output_file_writer.OutputFileWriter, "write", refused)
        ends = outcomes(3, lambda team: run(source, out, team))
    assert isinstance(ends[failing], output_file_writer.WriteError)
    assert all(isinstance(end, RankError) and end.rank == failing for n, end in enumerate(ends) if n != failing)
    assert not out.exists()
    left = read_progress(out.with_name("out.partial")).files["model.safetensors"]
    assert left.windows
    report = check_resumed(source, out, expected, size)
    assert report.kept_bytes == sum(stop - start for start, stop in left.windows)


def test_a_window_that_was_damaged_since_is_found(source, out, monkeypatch):
    original = writer.Writer.write_parts

    def damaged(self, parts):
        found = original(self, parts)
        with (out.with_name("out.partial") / "model.safetensors").open("r+b") as file:
            file.seek(3 * WINDOW + 5)
            file.write(b"?")
            os.fsync(file.fileno())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(writer.Writer, "write_parts", damaged)
        ends = outcomes(2, lambda team: run(source, out, team))
    assert isinstance(ends[0], DamagedOutputError)
    assert isinstance(ends[1], RankError)
    assert not out.exists()


def test_damage_of_an_interrupted_run_is_written_again(source, expected, out):
    outcomes(2, lambda team: run(source, out, team), dies_at={1: MEETINGS - 6})
    partial = out.with_name("out.partial") / "model.safetensors"
    with partial.open("r+b") as file:
        file.seek(WINDOW)
        file.write(b"?" * 10)
    check_resumed(source, out, expected, 2)


def test_bytes_that_no_rank_wrote_are_an_error(source, out, monkeypatch):
    original = writer.Writer.write_parts

    def forgetful(self, parts):
        found = original(self, parts)
        return {file: dict(list(windows.items())[1:]) for file, windows in found.items()}

    with monkeypatch.context() as patched:
        patched.setattr(writer.Writer, "write_parts", forgetful)
        ends = outcomes(2, lambda team: run(source, out, team))
    assert all(isinstance(end, RankError) and "written by no process" in end.reason for end in ends)
    assert not out.exists()


def test_a_file_in_parts_is_refused_by_readers_until_it_is_finished(source, out):
    from safetensors import SafetensorError, safe_open

    outcomes(2, lambda team: run(source, out, team), dies_at={1: MEETINGS - 6})
    with pytest.raises(SafetensorError):
        safe_open(out.with_name("out.partial") / "model.safetensors", "np")


def test_overflows_of_a_tensor_in_parts_are_added(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "source").mkdir()
    save_file({"a": torch.full((4 * WINDOW,), 1e9)}, tmp_path / "source" / "model.safetensors")
    reports = outcomes(2, lambda team: run(tmp_path / "source", tmp_path / "out", team, dtype="fp16"))
    assert [report.overflows for report in reports] == [{"a": 4 * WINDOW}] * 2


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 9))
def test_shares_cover_each_byte_once(sizes, size):
    files = [OutputFile.copy_of(f"{number}", num_bytes) for number, num_bytes in enumerate(sizes)]
    found = shares_of(files, size, may_cut=True)
    for output in files:
        parts = sorted((s.start, s.stop) for mine in found for s in mine if s.output is output)
        edges = [edge for part in parts for edge in part]
        assert (edges[0], edges[-1]) == (0, output.num_bytes)
        assert sum(share.is_first for mine in found for share in mine if share.output is output) == 1
        assert edges[1:-1:2] == edges[2::2]
    assert len(found) == size


def test_files_that_ranks_share_evenly_are_not_cut(monkeypatch):
    monkeypatch.setattr(shares, "LEAST_GAIN_BYTES", 1000)
    files = [OutputFile.copy_of(f"{number}", 500) for number in range(5)]
    assert all(share.is_whole for mine in shares_of(files, 2, may_cut=True) for share in mine)


def test_slices_for_ranks_are_not_cut():
    stored = TensorInfo("a", DTYPES["U8"], (1000,), Span("model.safetensors", 0, 1000))
    half = OutputTensor(source=stored, dtype=stored.dtype, parts=(Slice(dim=0, start=0, stop=500),))
    files = [OutputFile(file=name, tensors=(half,)) for name in ("rank-0", "rank-1")]
    assert all(share.is_whole for mine in shares_of(files, 3, may_cut=True) for share in mine)
