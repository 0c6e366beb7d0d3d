"""Reshards that are killed or interrupted leave resumable output: real processes, real signals."""

import random
import shutil
import signal
import subprocess
import sys

import pytest

import bigload
from bigload.errors import OutputExistsError
from bigload.layouts.resharding.reshard import reshard
from bigload.planning.plan_file import write_plan
from builders import contents, make_checkpoint, stored_tensors

RESHARD = """
import os, sys
from bigload.layouts.writing import files_in_progress, writer
from bigload.layouts.resharding.reshard import reshard

plan, out, threads, resume, force, answers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
writer.WINDOW_BYTES, files_in_progress.NOTE_EVERY_BYTES = 1 << 20, 4 << 20  # more to tell, more places to be killed at

def tell(progress):
    os.write(1, f"{progress.phase} {progress.done_bytes}\\n".encode())  # print() of two threads would mix
    if answers:
        os.read(0, 1)

report = reshard(plan, out, threads=threads, resume=bool(resume), force=bool(force), on_progress=tell)
print("published", report.kept_files, report.kept_bytes, flush=True)
"""
ALONE, TALKING = 0, 1


def run_python(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def check_complete(out, source):
    assert stored_tensors(*out.rglob("*.safetensors")) == stored_tensors(*source.glob("*.safetensors"))
    assert bigload.open_checkpoint(out).tensors.keys() == bigload.open_checkpoint(source).tensors.keys()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of about 60 MB with its plan: two thirds on cpu, the rest on disk."""
    folder = tmp_path_factory.mktemp("large")
    source = make_checkpoint(folder / "source", blocks=3, shards=3, hidden=1024, vocab=2048)
    write_plan(bigload.plan(source, {"cpu": "56MiB"}), folder / "plan.json")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tiny(tmp_path):
    """A tiny checkpoint with its plan, on two devices."""
    source = make_checkpoint(tmp_path / "source", blocks=4, shards=2)
    write_plan(bigload.plan(source, {"cpu": 4200}), tmp_path / "plan.json")
    return tmp_path


def run_reshard(plan, out, threads=2, *, resume=0, force=0, answers=ALONE):
    return run_python(RESHARD, plan, out, threads, resume, force, answers)


def kill_after(process, lines):
    """Kill `process` when it has told so many lines."""
    for _, line in zip(range(lines), process.stdout, strict=False):
        assert not line.startswith("published")
    process.kill()


@pytest.mark.slow
def test_a_kill_leaves_no_incomplete_output_and_the_next_run_goes_on(large, tmp_path):
    out, choose = tmp_path / "out", random.Random(5)
    for _ in range(3):
        with run_reshard(large / "plan.json", out, resume=1) as process:
            kill_after(process, choose.randrange(20, 40))
        assert process.returncode == -signal.SIGKILL
        assert entries(tmp_path) == ["out.partial"]
    with run_reshard(large / "plan.json", out, resume=1) as process:
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    kept = int(output.split()[-1])
    assert kept > 4 << 20
    check_complete(out, large / "source")
    assert entries(tmp_path) == ["out"]


def test_without_being_told_nothing_is_gone_on_with_nor_thrown_away(tiny):
    with run_reshard(tiny / "plan.json", tiny / "out", 1, answers=TALKING) as process:
        assert process.stdout.readline().startswith("write")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("write")  # each of the two files has one window
        process.kill()
    before = contents(tiny)
    with pytest.raises(OutputExistsError, match="an interrupted run left 1 finished file") as caught:
        reshard(tiny / "plan.json", tiny / "out")
    assert caught.value.path == tiny / "out.partial"
    assert "--resume" in caught.value.hint
    assert "--force" in caught.value.hint
    assert contents(tiny) == before
    assert reshard(tiny / "plan.json", tiny / "out", force=True).kept_files == 0
    check_complete(tiny / "out", tiny / "source")


def test_of_two_processes_at_once_one_is_refused_and_the_other_succeeds(tiny):
    with run_reshard(tiny / "plan.json", tiny / "out", answers=TALKING) as first:
        assert first.stdout.readline().startswith("write")
        for wishes in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(OutputExistsError, match="another process is writing it now"):
                reshard(tiny / "plan.json", tiny / "out", **wishes)
        _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")
    check_complete(tiny / "out", tiny / "source")
