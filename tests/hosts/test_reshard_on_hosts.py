"""One reshard by several hosts: the bytes of one, clear errors without a shared folder, and nobody waits for ever."""

import os
import shutil
import sys
import time

import pytest
from host_ranks import SILENCE_SECONDS, launched, rank_command, torchrun
from patience import ends, wait_for_line

from bigload.distributed.process_group import SingleProcess
from bigload.layouts.resharding.reshard import reshard
from bigload.loading.progress import Tally
from builders import contents, make_checkpoint

pytestmark = pytest.mark.slow

LONG_SECONDS = 1000
SHARD_BYTES = 1500
BIGLOAD = (sys.executable, "-m", "bigload")


@pytest.fixture
def source(tmp_path):
    return make_checkpoint(tmp_path / "source", blocks=5, shards=3)


@pytest.fixture
def expected(source, tmp_path):
    reshard(source, tmp_path / "expected", max_shard_bytes=SHARD_BYTES, team=SingleProcess())
    return weights(tmp_path / "expected")


def weights(folder):
    """Return the files of weights: a manifest says where the source was."""
    return {name: content for name, content in contents(folder).items() if name.endswith(".safetensors")}


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def command(source, out, *options):
    return [*BIGLOAD, "reshard", source, out, "--max-shard-size", SHARD_BYTES, "-q", *options]


@pytest.mark.parametrize(("count", "per_host", "is_static"), [(2, 2, False), (3, 1, False), (2, 1, True)])
def test_hosts_with_a_shared_folder_write_what_one_writes(  # noqa: PLR0917
    make_hosts, source, expected, tmp_path, count, per_host, is_static
):
    hosts = make_hosts(count, has_shared=True)
    shutil.copytree(source, tmp_path / "shared" / "model")
    run = torchrun(hosts, *command("/tmp/shared/model", "/tmp/shared/out"), per_host=per_host, is_static=is_static)
    written = ends(run)
    assert [process.returncode for process in run] == [0] * count, written
    assert [output for output, _ in written] == ["/tmp/shared/out\n", *[""] * (count - 1)]
    assert weights(tmp_path / "shared" / "out") == expected
    assert entries(tmp_path / "shared") == ["model", "out"]


def test_each_host_may_read_a_copy_that_keeps_the_times(make_hosts, source, expected, tmp_path):
    hosts = make_hosts(2, has_shared=True)
    for host in hosts:
        shutil.copytree(source, host.tmp / "model")  # as cp -p: the time of the last change differs nevertheless
    run = torchrun(hosts, *command("/tmp/model", "/tmp/shared/out"))
    written = ends(run)
    assert [process.returncode for process in run] == [0, 0], written
    assert weights(tmp_path / "shared" / "out") == expected


def test_a_copy_written_at_another_time_is_refused(make_hosts, source, tmp_path):
    hosts = make_hosts(2, has_shared=True)
    for number, host in enumerate(hosts):
        shutil.copytree(source, host.tmp / "model")
        os.utime(host.tmp / "model" / "model-00001-of-00003.safetensors", (number, number))
    run = torchrun(hosts, *command("/tmp/model", "/tmp/shared/out"))
    for _, errors in ends(run):
        assert "process 1 failed: it differs from process 0 in its source (names, sizes or times" in errors
        assert "rsync -a" in errors
    assert entries(tmp_path / "shared") == []


def test_an_output_that_is_not_shared_is_refused_on_both(make_hosts, source, tmp_path):
    hosts = make_hosts(2, has_shared=True)
    shutil.copytree(source, tmp_path / "shared" / "model")
    run = launched(hosts, *rank_command(impatient, "/tmp/shared/model", "/tmp/out", is_joined=False))
    for process, (_, errors) in zip(run, ends(run), strict=True):
        assert process.returncode == 1
        assert "process 1 failed" in errors
        assert "on host-1 it does not see /tmp/out.partial, which process 0 has made" in errors
        assert "on a file system that all hosts share" in errors
    assert [name for host in hosts for name in entries(host.tmp) if "out" in name] == []


def test_a_source_that_one_host_lacks_is_named_on_both(make_hosts, source, tmp_path):
    hosts = make_hosts(2, has_shared=True)
    shutil.copytree(source, hosts[0].tmp / "model")
    run = torchrun(hosts, *command("/tmp/model", "/tmp/shared/out"))
    here, there = (errors for _, errors in ends(run))
    assert [process.returncode for process in run] == [1, 1]
    assert "process 1 failed: CheckpointNotFoundError: " in here
    assert "/tmp/model" in here
    assert "/tmp/model" in there
    assert entries(tmp_path / "shared") == []


# What ranks run in place of the program


def impatient(source, out):
    """Reshard, with little patience for a folder that another host has made."""
    from bigload.layouts.writing import staging

    staging._SIGHT_SECONDS = 1
    _run_program(source, out)


def slow(source, out, gone=None, shard_bytes=SHARD_BYTES):
    """Reshard slowly, and tell the test of windows that are written; rank `gone` stays at its first one."""
    add = Tally.add

    def add_slowly(self, num_bytes, *, phase, file):
        add(self, num_bytes, phase=phase, file=file)
        if phase == "write":
            sys.stdout.write("writes\n")
            sys.stdout.flush()
            time.sleep(LONG_SECONDS if os.environ["RANK"] == str(gone) else 0.7)

    Tally.add = add_slowly
    _run_program(source, out, shard_bytes)


def in_parts(source, out, gone=None):
    """Reshard to one file, of which each rank writes a part, however small it is; slowly, as `slow`."""
    from bigload.layouts.writing import shares, writer

    shares.LEAST_GAIN_BYTES = 0
    shares.WINDOW_BYTES = writer.WINDOW_BYTES = writer.NOTE_PART_EVERY_BYTES = 16 * 1024
    slow(source, out, gone, "none")


def _run_program(source, out, shard_bytes=SHARD_BYTES):
    from bigload_cli import app

    sys.argv = ["bigload", "reshard", source, out, "--max-shard-size", str(shard_bytes), "--io-threads", "1"]
    app.main()


@pytest.mark.parametrize("end", ["die", "unplug"])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_goes_ends_the_run_and_another_resumes_it(  # noqa: PLR0917
    make_hosts, source, expected, tmp_path, end, gone
):
    hosts = make_hosts(2, has_shared=True)
    shutil.copytree(source, tmp_path / "shared" / "model")
    arguments = ("/tmp/shared/model", "/tmp/shared/out")
    run = launched(hosts, *rank_command(slow, *arguments, gone, is_joined=False), LOCAL_RANK="0")
    wait_for_line(run, "writes")
    began = time.monotonic()
    getattr(hosts[gone], end)()
    ((_, errors),) = ends([run[1 - gone]])
    assert run[1 - gone].returncode == 1
    assert f"process {gone} failed" in errors or "can no longer be reached" in errors, errors
    assert time.monotonic() - began < SILENCE_SECONDS + 30
    hosts[gone].die()
    ends([run[gone]])
    assert not (tmp_path / "shared" / "out").exists()
    resumed = hosts[1 - gone].start(*command(*arguments, "--resume"), PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    ((_, errors),) = ends([resumed])
    assert resumed.returncode == 0, errors
    assert weights(tmp_path / "shared" / "out") == expected
    assert entries(tmp_path / "shared") == ["model", "out"]


def test_hosts_write_parts_of_one_file_and_another_number_resumes(make_hosts, tmp_path):
    source = make_checkpoint(tmp_path / "source", blocks=1, hidden=64, vocab=256)
    reshard(source, tmp_path / "expected", max_shard_bytes=None, team=SingleProcess())
    hosts = make_hosts(3, has_shared=True)
    shared = tmp_path / "shared"
    shutil.copytree(source, shared / "model")
    first = launched(hosts, *rank_command(in_parts, "/tmp/shared/model", "/tmp/shared/out", 2, is_joined=False))
    wait_for_line(first, "writes")
    hosts[2].die()
    told = [errors for _, errors in ends(first[:2])]
    assert [process.returncode for process in first[:2]] == [1, 1]
    assert any("process 2 failed" in errors for errors in told)  # who is slow may find only who has heard it first gone
    assert {path.name for path in (shared / "out.partial").iterdir()} >= {"model.safetensors"}
    resumed = hosts[1].start(*command("/tmp/shared/model", "/tmp/shared/out", "--max-shard-size", "none", "--resume"))
    ((_, errors),) = ends([resumed])
    assert resumed.returncode == 0, errors
    assert weights(shared / "out") == weights(tmp_path / "expected")
    second = launched(hosts[:2], *rank_command(in_parts, "/tmp/shared/model", "/tmp/shared/again", is_joined=False))
    written = ends(second)
    assert [process.returncode for process in second] == [0, 0], written
    assert weights(shared / "again") == weights(tmp_path / "expected")


@pytest.mark.parametrize("is_static", [False, True])
def test_under_torchrun_a_host_that_dies_ends_the_others(make_hosts, source, tmp_path, is_static):
    hosts = make_hosts(2, has_shared=True)
    shutil.copytree(source, tmp_path / "shared" / "model")
    ranks = rank_command(slow, "/tmp/shared/model", "/tmp/shared/out", 1, is_joined=False)
    run = torchrun(hosts, *ranks, is_static=is_static)
    wait_for_line(run, "writes")
    hosts[1].die()
    (_, errors), _ = ends(run)
    assert run[0].returncode == 1
    assert "process 1 failed: it can no longer be reached" in errors
    assert not (tmp_path / "shared" / "out").exists()
