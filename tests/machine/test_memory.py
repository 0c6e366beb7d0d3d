import subprocess
import sys

import pytest

from bigload.devices import CPU
from bigload.machine.memory import available_memory, detect_ram

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


def test_without_groups_the_kernels_figure_counts(machine):
    assert machine.available() == 64 * GIB


def test_a_system_that_tells_nothing_gives_nothing(tmp_path):
    assert Machine(tmp_path).available() is None
    assert available_memory(proc=tmp_path / "no", cgroup=tmp_path / "no") is None


def test_a_kernel_without_the_figure_gives_nothing(machine):
    (machine.proc / "meminfo").write_text("MemTotal: 1 kB\nMemFree: 1 kB\n")
    assert machine.available() is None


def test_a_limit_of_the_group_leaves_what_is_not_used(machine):
    machine.is_in("0::/job")
    machine.group("job", max=8 * GIB, current=3 * GIB)
    assert machine.available() == 5 * GIB


def test_the_machine_counts_where_the_group_leaves_more(machine):
    machine.is_in("0::/job")
    machine.group("job", max=800 * GIB, current=3 * GIB)
    assert machine.available() == 64 * GIB


def test_page_cache_that_can_go_does_not_count_as_used(machine):
    machine.is_in("0::/job")
    machine.group("job", max=8 * GIB, current=7 * GIB, stat=f"anon 5\ninactive_file {2 * GIB}\nactive_file 9")
    assert machine.available() == 3 * GIB


def test_the_least_of_all_enclosing_groups_counts(machine):
    machine.is_in("0::/slice/job/step")
    machine.group("slice", max=4 * GIB, current=1 * GIB)
    machine.group("slice/job", max=16 * GIB, current=1 * GIB)
    machine.group("slice/job/step", max="max", current=1 * GIB)
    assert machine.available() == 3 * GIB


def test_a_limit_at_the_root_of_a_container_counts(machine):
    machine.is_in("0::/")
    machine.group("", max=2 * GIB, current=1 * GIB)
    assert machine.available() == 1 * GIB


def test_max_is_no_limit(machine):
    machine.is_in("0::/job")
    machine.group("job", max="max", current=3 * GIB)
    assert machine.available() == 64 * GIB


@pytest.mark.parametrize("files", [{"max": 8 * GIB}, {"current": GIB}, {}, {"max": "", "current": GIB}])
def test_a_group_that_does_not_tell_everything_is_passed_over(machine, files):
    machine.is_in("0::/job")
    machine.group("job", **files)
    assert machine.available() == 64 * GIB


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(machine):
    machine.is_in("0::/job")
    machine.group("job", max=GIB, current=2 * GIB)
    assert machine.available() == 0


def test_a_group_whose_folder_is_not_visible_leaves_its_parents(machine):
    machine.is_in("0::/host/side/name")
    machine.group("", max=2 * GIB, current=1 * GIB)
    assert machine.available() == 1 * GIB


def test_the_memory_controller_of_version_one_counts(machine):
    machine.is_in("12:pids:/x", "11:cpu,memory:/docker/id", "0::/")
    machine.group("memory/docker/id", limit_in_bytes=8 * GIB, usage_in_bytes=6 * GIB, stat=f"total_inactive_file {GIB}")
    machine.group("pids/x", max=1, current=0)
    assert machine.available() == 3 * GIB


def test_version_one_without_a_limit_has_a_number_too_large_to_matter(machine):
    machine.is_in("11:memory:/docker/id")
    machine.group("memory/docker/id", limit_in_bytes=9223372036854771712, usage_in_bytes=GIB)
    assert machine.available() == 64 * GIB


def test_a_group_path_that_contains_colons_is_read(machine):
    machine.is_in("0::/job:1:2")
    machine.group("job:1:2", max=8 * GIB, current=3 * GIB)
    assert machine.available() == 5 * GIB


def test_groups_outside_of_the_file_system_are_not_looked_at(machine, tmp_path):
    (tmp_path / "memory.max").write_text("1")
    (tmp_path / "memory.current").write_text("0")
    machine.is_in("0::/job")
    assert machine.available() == 64 * GIB


def test_a_process_in_another_namespace_is_read_without_leaving_the_root(machine, tmp_path):
    (tmp_path / "memory.max").write_text("1")
    (tmp_path / "memory.current").write_text("0")
    machine.is_in("0::/../../job")
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
        "late = {'subprocess', 'tomllib', 'shutil', 'bigload.machine.gpus', 'bigload.machine.memory'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
