"""Index of this process by the environment; test_main_process_first.py has process groups."""

import subprocess
import sys

import pytest

import bigload
from bigload.distributed.launchers import launched_on_host
from bigload.errors import OptionError, ProcessControlError


def place():
    return bigload.num_processes(), bigload.process_index(), bigload.local_process_index()


def roles():
    return bigload.is_main_process(), bigload.is_local_main_process(), bigload.is_last_process()


def test_alone():
    assert place() == (1, 0, 0)
    assert roles() == (True, True, True)


TORCHRUN = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, (4, 2, 0)),
        (SRUN, (4, 3, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (4, 3, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, (2, 1, 1)),
        ({**SRUN, **TORCHRUN}, (4, 2, 0)),  # torchrun in a step of Slurm
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (1, 0, 0)),  # a batch script
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, (1, 0, 0)),
        ({"WORLD_SIZE": ""}, (1, 0, 0)),
    ],
)
def test_the_variables_of_launchers_are_understood(launched_by, variables, expected):
    launched_by(**variables)
    assert place() == expected


def test_roles_follow_from_the_place(launched_by):
    launched_by(**TORCHRUN)
    assert roles() == (False, True, False)
    launched_by(RANK="3", LOCAL_RANK="1")
    assert roles() == (False, False, True)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "many"}, 'WORLD_SIZE is "many"; expected a number'),
        ({"WORLD_SIZE": "-2"}, 'WORLD_SIZE is "-2"; expected a number'),
        ({"WORLD_SIZE": "4"}, "RANK is not given; expected the number of this process, below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "RANK is 4; expected the number of this process, below WORLD_SIZE=4"),
    ],
)
def test_variables_that_make_no_sense_are_errors(launched_by, variables, text):
    launched_by(**variables)
    with pytest.raises(OptionError, match=text):
        bigload.is_main_process()


def test_a_local_index_that_nobody_tells_is_an_error(launched_by):
    launched_by(WORLD_SIZE="4", RANK="1")
    with pytest.raises(ProcessControlError, match="which of the 4 processes share this host"):
        bigload.local_process_index()


@pytest.mark.parametrize(
    ("variables", "local_rank", "node"),
    [
        (TORCHRUN, 0, "GROUP_RANK=1"),
        ({**TORCHRUN, "RANK": "1"}, None, None),  # inherited from another process, which started this one
        ({**TORCHRUN, "WORLD_SIZE": "2", "RANK": "0"}, None, None),
        ({"LOCAL_RANK": "1"}, 1, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, None, None),
    ],
)
def test_a_local_rank_is_believed_if_it_is_of_this_process(launched_by, variables, local_rank, node):
    launched_by(**variables)
    found = launched_on_host(2, 4)
    assert (found.local_rank, found.node) == (local_rank, node)


def test_print_prints_once_per_host(launched_by, capsys):
    bigload.print("one", 2, sep="-", end=";")
    launched_by(**TORCHRUN)
    bigload.print("host")
    launched_by(RANK="3", LOCAL_RANK="1")
    bigload.print("nobody")
    assert capsys.readouterr().out == "one-2;host\n"


def run_python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_importing_everything_leaves_the_builtin_print_alone():
    assert "print" not in bigload.__all__
    assert "print" in dir(bigload)


def test_alone_or_asked_for_its_place_a_program_needs_no_torch():
    program = """
import os, sys
import bigload
bigload.wait_for_everyone(); bigload.set_trigger(); assert bigload.check_trigger()
with bigload.main_process_first(), bigload.local_main_process_first(), bigload.split_between_processes([1, 2]) as part:
    assert part == [1, 2]
assert bigload.on_main_process(len)("ab") == 2
os.environ |= {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
assert not bigload.is_main_process() and bigload.on_main_process(len)("ab") is None
bigload.print("not seen"); bigload.save({}, "not-written")
with bigload.split_between_processes([1, 2]) as part:
    assert part == [2]
assert not os.path.exists("not-written")
assert {"torch", "numpy"}.isdisjoint(sys.modules)
"""
    assert run_python(program) == ""
