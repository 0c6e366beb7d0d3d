"""accelerate's own checks of process control, in real processes, with bigload's `Accelerator` in place of accelerate's.

They are functions of its launch script, `accelerate.test_utils.scripts.test_script`, that ask an `Accelerator` or a
state. Here they get bigload's.
"""

import inspect
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import bigload

CHECKS = (
    "init_state_check",
    "process_execution_check",
    "test_split_between_processes_list",
    "test_split_between_processes_nested_dict",
    "test_split_between_processes_tensor",
    "test_split_between_processes_evenly",
    "test_split_between_processes_dataset",
    "test_trigger",
)

PROPERTIES = (
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_process_index",
    "num_processes",
    "process_index",
)
METHODS = (
    "check_trigger",
    "local_main_process_first",
    "main_process_first",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "print",
    "set_trigger",
    "split_between_processes",
    "wait_for_everyone",
)

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def launch(folder, who, size):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, __file__, who]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("who", "size"),
    [("bigload", 2), ("bigload", 4), ("accelerate", 2)],
)
@pytest.mark.slow
def test_the_checks_of_accelerates_launch_script_pass(tmp_path, who, size):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    done = launch(tmp_path, who, size)
    assert done.returncode == 0, done.stderr[-4000:]
    passed = [(tmp_path / f"passed-{rank}").read_text().split() for rank in range(size)]
    assert passed == [[check for check in CHECKS if is_checked(check, who, size)]] * size


def is_checked(check, who, size):
    if check == "test_split_between_processes_tensor":
        return size < 3  # it takes two rows to be those of two processes
    # accelerate knows none but the class of the package.
    return who == "bigload" or check != "test_split_between_processes_dataset"


def test_functions_take_the_arguments_of_accelerates_methods():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    for name in METHODS:
        theirs = getattr(accelerate.Accelerator, name)
        ours = inspect.signature(getattr(bigload, name))
        if name != "print":
            expected = list(inspect.signature(theirs).parameters.values())[1:]
            assert [(each.name, each.default) for each in ours.parameters.values()] == [
                (each.name, inspect.Parameter.empty if name in NEEDS_FUNCTION else each.default) for each in expected
            ], name
    theirs = inspect.signature(accelerate.utils.save).parameters.values()
    ours = inspect.signature(bigload.save).parameters.values()
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]


NEEDS_FUNCTION = ("on_main_process", "on_local_main_process")
"""accelerate refuses these without one, when they are called."""


def test_every_method_of_process_control_that_accelerate_has_is_here():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    state = accelerate.PartialState
    public = {name for name in vars(state) if not name.startswith("_")}
    elsewhere = {"initialized", "use_distributed", "default_device", "set_device", "destroy_process_group"}
    assert public - elsewhere <= {*PROPERTIES, *METHODS}


GUIDE = {
    *(*PROPERTIES, *METHODS),
    *("unwrap_model", "save", "device", "state", "use_distributed"),
}
"""Members of the guide to deferred execution, and those of process control beside them."""


def test_objects_have_the_members_of_accelerates_and_properties_where_it_has_them():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    for ours, theirs in (
        (bigload.Accelerator, accelerate.Accelerator),
        (bigload.PartialState, accelerate.PartialState),
    ):
        names = {name for name in GUIDE if hasattr(theirs, name)}
        assert {name for name in names if not hasattr(ours, name)} == set()
        for name in names:
            is_property = isinstance(inspect.getattr_static(theirs, name), property)
            assert isinstance(inspect.getattr_static(ours, name), property) == is_property, name


class Rows:
    """What the check of datasets needs of the package `datasets`, which is large: rows, columns, `select`."""

    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def from_list(cls, rows):
        return cls(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]

    def select(self, rows):
        return Rows([self.rows[row] for row in rows])


def main(who):
    import torch.distributed as dist
    from accelerate.test_utils.scripts import test_script

    if who == "bigload":
        test_script.Accelerator = test_script.AcceleratorState = partial(bigload.Accelerator, cpu=True)
        test_script.gather_object = gathered
    test_script.Accelerator()
    for name in CHECKS:
        check = getattr(test_script, name)
        if is_checked(name, who, dist.get_world_size()):
            check(Rows) if name.endswith("_dataset") else check()
            with Path(f"passed-{dist.get_rank()}").open("a") as passed:
                passed.write(f"{name}\n")
    dist.destroy_process_group()


def gathered(items):
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, items)
    return [item for part in found for item in part]


if __name__ == "__main__":
    main(sys.argv[1])
