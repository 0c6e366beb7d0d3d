"""What a reshard leaves behind when its process is killed or interrupted: real processes, real signals."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

import bigload
from bigload.errors import OutputExistsError
from bigload.layouts.reshard import reshard
from bigload.planning.plan_file import write_plan
from builders import contents, make_checkpoint, stored_tensors

RESHARD = """
import sys
from bigload.layouts import reshard, writer

plan, out, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
writer.BLOCK_BYTES, writer.PART_BYTES = 1 << 20, 4 << 20  # more to tell, more places to be killed at
write_file = reshard.write_file

def write_and_tell(path, content):
    print("file", path, flush=True)
    write_file(path, content)

reshard.write_file = write_and_tell
reshard.reshard(plan, out, threads=threads, on_progress=lambda done: print(done.phase, done.done_bytes, flush=True))
print("published", flush=True)
"""

DIE_AT_EVERY_STEP = """
import os, signal, sys
from bigload.layouts.reshard import reshard

plan, base = sys.argv[1], sys.argv[2]
steps = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}

def die_at(step):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in steps:
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)

step = 1
while True:
    child = os.fork()
    if child == 0:
        die_at(step)
        reshard(plan, f"{base}/{step}/out", threads=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    step += 1
print(step)
"""

INTERRUPTIBLE = """
import sys
import os
from bigload.layouts import reshard
from bigload_cli import app

class WaitingTally(reshard.Tally):
    def add(self, num_bytes, *, phase, file):
        super().add(num_bytes, phase=phase, file=file)
        os.write(1, f"{phase}\\n".encode())  # print() and readline() of two threads would mix
        os.read(0, 1)

reshard.Tally = WaitingTally
app.main()
"""


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


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_leaves_no_incomplete_output_and_the_next_run_succeeds(large, tmp_path, seed):
    out, choose = tmp_path / "out", random.Random(seed)
    num_lines = 2 * 60 + 4  # blocks written, blocks verified, small files
    for _ in range(4):
        last_line = choose.randrange(1, num_lines)
        with run_python(RESHARD, large / "plan.json", out, 2) as process:
            for _, line in zip(range(last_line), process.stdout, strict=False):
                assert line != "published\n"
            process.kill()
        assert process.returncode == -signal.SIGKILL
        if out.exists():  # it was quicker than the signal
            check_complete(out, large / "source")
            shutil.rmtree(out)
        else:
            assert entries(tmp_path) == ["out.partial"]
    with run_python(RESHARD, large / "plan.json", out, 2) as process:
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert output.endswith("published\n")
    check_complete(out, large / "source")
    assert entries(tmp_path) == ["out"]


def test_a_kill_before_any_step_leaves_no_incomplete_output_and_the_next_run_succeeds(tiny, tmp_path):
    base = tmp_path / "runs"
    base.mkdir()
    with run_python(DIE_AT_EVERY_STEP, tiny / "plan.json", base) as process:
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    num_steps = int(output)
    assert num_steps > 15
    expected = contents(base / str(num_steps) / "out")
    published = []
    for step in range(1, num_steps):
        out = base / str(step) / "out"
        if out.exists():
            published.append(step)
        else:
            reshard(tiny / "plan.json", out)
        assert contents(out) == expected, f"killed before step {step}"
        assert entries(out.parent) == ["out"]
    assert published == list(range(num_steps - len(published), num_steps))
    check_complete(base / str(num_steps) / "out", tiny / "source")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lines", [1, 5])
def test_ctrl_c_ends_with_130_and_leaves_nothing(tiny, threads, lines):
    before = contents(tiny)
    program = INTERRUPTIBLE.replace(
        "import sys\n", f"import sys\nsys.argv[1:1] = ['reshard', '--threads={threads}']\n", 1
    )
    with run_python(program, tiny / "plan.json", tiny / "out") as process:
        assert process.stdout.readline() == "write\n"
        for _ in range(lines - 1):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted: nothing half-written was left" in errors
    assert contents(tiny) == before
    assert entries(tiny) == ["plan.json", "source"]


def test_of_two_processes_at_once_one_is_refused_and_the_other_succeeds(tiny):
    program = INTERRUPTIBLE.replace("import sys\n", "import sys\nsys.argv[1:1] = ['reshard', '-q']\n", 1)
    with run_python(program, tiny / "plan.json", tiny / "out") as first:
        assert first.stdout.readline() == "write\n"
        with pytest.raises(OutputExistsError, match="another process is writing it now"):
            reshard(tiny / "plan.json", tiny / "out")
        with run_python(program, tiny / "plan.json", tiny / "out") as second:
            output, errors = second.communicate()
        assert (second.returncode, output) == (2, "")
        assert "another process is writing it now" in errors
        _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")
    check_complete(tiny / "out", tiny / "source")


def test_a_killed_process_no_longer_holds_the_output(tiny):
    program = INTERRUPTIBLE.replace("import sys\n", "import sys\nsys.argv[1:1] = ['reshard', '-q']\n", 1)
    with run_python(program, tiny / "plan.json", tiny / "out") as first:
        assert first.stdout.readline() == "write\n"
        os.kill(first.pid, signal.SIGKILL)
    assert entries(tiny) == ["out.partial", "plan.json", "source"]
    reshard(tiny / "plan.json", tiny / "out")
    check_complete(tiny / "out", tiny / "source")
