import subprocess
import sys

import pytest

from bigload.devices import CPU
from bigload.machine.memory.ram import available_memory, detect_ram

GIB = 1 << 30


class Machine:
    """A /proc and a /sys/fs/cgroup that are ordinary folders."""

    def __init__(self, folder):
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def has_available(self, num_bytes):
        lines = ("MemTotal:       99999999 kB", "MemFree:  12 kB", f"MemAvailable:   {num_bytes // 1024} kB")
        (self.proc / "meminfo").write_text("\n".join(lines) + "\n")

    def is_in(self, *lines):
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path, **files):
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"memory.{name}").write_text(f"{content}\n")

    def available(self):
        return available_memory(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.has_available(64 * GIB)
    return machine


def test_a_system_that_tells_nothing_gives_nothing(tmp_path):
    assert Machine(tmp_path).available() is None
    assert available_memory(proc=tmp_path / "no", cgroup=tmp_path / "no") is None


def test_a_kernel_without_the_figure_gives_nothing(machine):
    (machine.proc / "meminfo").write_text("MemTotal: 1 kB\nMemFree: 1 kB\n")
    assert machine.available() is None


UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("lines", "groups", "left"),
    [
        ([], {}, 64),
        (["0::/job"], {"job": {"max": 8 * GIB, "current": 3 * GIB}}, 5),
        (["0::/job:1:2"], {"job:1:2": {"max": 8 * GIB, "current": 3 * GIB}}, 5),
        (["0::/job"], {"job": {"max": 800 * GIB, "current": 3 * GIB}}, 64),  # the machine has less
        (["0::/job"], {"job": {"max": "max", "current": 3 * GIB}}, 64),
        (["0::/job"], {"job": {"max": GIB, "current": 2 * GIB}}, 0),
        # page cache that can go does not count as used
        (
            ["0::/job"],
            {"job": {"max": 8 * GIB, "current": 7 * GIB, "stat": f"anon 5\ninactive_file {2 * GIB}\nx 9"}},
            3,
        ),
        # the least of all enclosing groups counts
        (
            ["0::/slice/job/step"],
            {
                "slice": {"max": 4 * GIB, "current": GIB},
                "slice/job": {"max": 16 * GIB, "current": GIB},
                "slice/job/step": {"max": "max", "current": GIB},
            },
            3,
        ),
        (["0::/"], {"": {"max": 2 * GIB, "current": GIB}}, 1),  # the root of a container
        (["0::/host/side/name"], {"": {"max": 2 * GIB, "current": GIB}}, 1),  # its own folder is not visible
        # a group that does not tell everything is passed over
        *((["0::/job"], {"job": files}, 64) for files in ({"max": 8 * GIB}, {"current": GIB}, {})),
        (["0::/job"], {"job": {"max": "", "current": GIB}}, 64),
        # version 1
        (
            ["12:pids:/x", "11:cpu,memory:/docker/id", "0::/"],
            {
                "memory/docker/id": {
                    **{"limit_in_bytes": 8 * GIB, "usage_in_bytes": 6 * GIB},
                    "stat": f"total_inactive_file {GIB}",
                },
                "pids/x": {"max": 1, "current": 0},
            },
            3,
        ),
        (["11:memory:/id"], {"memory/id": {"limit_in_bytes": UNLIMITED, "usage_in_bytes": GIB}}, 64),
    ],
)
def test_what_every_limited_group_leaves_counts_where_it_is_less_than_the_machine_has(machine, lines, groups, left):
    machine.is_in(*lines)
    for path, files in groups.items():
        machine.group(path, **files)
    assert machine.available() == left * GIB


@pytest.mark.parametrize("line", ["0::/job", "0::/../../job"], ids=["outside", "another namespace"])
def test_groups_outside_of_the_file_system_are_not_looked_at(machine, tmp_path, line):
    (tmp_path / "memory.max").write_text("1")
    (tmp_path / "memory.current").write_text("0")
    machine.is_in(line)
    assert machine.available() == 64 * GIB


def test_this_machine_says_how_much_it_has():
    found = available_memory()
    assert found is None or found > 0


def test_the_figure_comes_with_its_source_and_what_there_is_in_all(machine):
    found = detect_ram(proc=machine.proc, cgroup=machine.cgroup)
    assert (found.device, found.source) == (CPU, "MemAvailable")
    assert (found.free_bytes, found.total_bytes) == (64 * GIB, 99999999 * 1024)


def test_where_a_group_leaves_less_its_limit_is_what_there_is_in_all(machine):
    machine.is_in("0::/slice/job")
    machine.group("slice", max=16 * GIB, current=14 * GIB)
    machine.group("slice/job", max=8 * GIB, current=3 * GIB)
    found = detect_ram(proc=machine.proc, cgroup=machine.cgroup)
    assert (found.source, found.free_bytes, found.total_bytes) == ("cgroup", 2 * GIB, 16 * GIB)


def test_page_cache_never_makes_more_of_a_group_than_its_limit(machine):
    machine.is_in("0::/job")
    machine.group("job", max=8 * GIB, current=1 * GIB, stat=f"inactive_file {3 * GIB}")
    found = detect_ram(proc=machine.proc, cgroup=machine.cgroup)
    assert found.free_bytes == found.total_bytes == 8 * GIB


def test_a_kernel_that_tells_only_what_is_available_has_that_in_all(machine):
    (machine.proc / "meminfo").write_text("MemAvailable: 7 kB\nHugePages_Total: 3\nodd line\n")
    found = detect_ram(proc=machine.proc, cgroup=machine.cgroup)
    assert found.free_bytes == found.total_bytes == 7 * 1024


def test_a_budget_of_sizes_looks_at_nothing(monkeypatch):
    program = (
        "import sys\nfrom bigload.planning.budget.budget import MemoryBudget\n"
        "MemoryBudget.parse(['cuda:0=22GiB,cpu=64GiB'])\n"
        "late = {'subprocess', 'tomllib', 'shutil', 'bigload.machine.accelerators', 'bigload.machine.memory.ram'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
