"""accelerate's objects of process control, and functions that are read as if they were its properties."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import bigload
from bigload.errors import ProcessControlError
from rank_processes import returned_by_all, run_launched

QUESTIONS = (
    *("is_main_process", "is_local_main_process", "is_last_process"),
    *("num_processes", "process_index", "local_process_index"),
)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_function_that_is_not_called_is_no_answer(name):
    function = getattr(bigload, name)
    with pytest.raises(ProcessControlError, match=f"bigload.{name} is a function, and has no truth value") as caught:
        assert function
    assert f"bigload.{name}()" in caught.value.hint
    with pytest.raises(ProcessControlError, match="cannot be compared with 0"):
        assert function == 0
    with pytest.raises(ProcessControlError, match="cannot be compared with 0"):
        assert 0 != function  # noqa: SIM300 - as people write it
    assert function == getattr(bigload, name)
    assert {function: 1}[function] == 1
    assert function.__name__ == name


@pytest.mark.parametrize("kind", [bigload.PartialState, bigload.Accelerator])
def test_alone_members_are_what_the_functions_return(kind, capsys):
    state = kind(cpu=True)
    assert {name: getattr(state, name) for name in QUESTIONS} == {name: getattr(bigload, name)() for name in QUESTIONS}
    assert state.device == torch.device("cpu")
    assert not state.use_distributed
    assert repr(state) == f"{kind.__name__}(process 0 of 1)"
    state.print("once")
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first(), state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    assert state.on_main_process(lambda: 1)() == state.on_process(process_index=3)(lambda: 1)() == 1
    assert capsys.readouterr().out == "once\n"


def test_alone_it_needs_no_torch():
    program = "import sys, bigload; assert bigload.PartialState().is_main_process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_accelerator_saves_and_has_a_trigger(tmp_path):
    accelerator = bigload.Accelerator()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert bigload.load(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]
    accelerator.set_trigger()
    assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)
    assert accelerator.state.is_main_process


@pytest.mark.slow  # to import the compiler takes seconds
@pytest.mark.filterwarnings("default")
def test_a_model_is_taken_out_of_wrappers_and_stays_compiled():
    accelerator = bigload.Accelerator()
    model = nn.Linear(2, 2)
    assert accelerator.unwrap_model(model) is model
    wrapped = nn.DataParallel(model)
    assert accelerator.unwrap_model(wrapped) is model
    compiled = torch.compile(wrapped, backend="eager")
    kept = accelerator.unwrap_model(compiled)
    assert type(kept) is type(compiled)
    assert kept._orig_mod is model
    assert compiled._orig_mod is wrapped
    assert accelerator.unwrap_model(kept) is kept
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(nn.DataParallel(torch.compile(model)), keep_torch_compile=False) is model


def test_a_launcher_that_says_too_little_is_named(launched_by):
    launched_by(WORLD_SIZE=2, RANK=0)
    with pytest.raises(ProcessControlError, match=r"process 0 cannot join the 2 of this job: .*MASTER_ADDR"):
        bigload.PartialState(cpu=True)
    assert not torch.distributed.is_initialized()


def join(rank, size, folder):
    import torch.distributed as dist

    store = folder / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    state = bigload.PartialState(cpu=True)
    seen = [state.num_processes, state.process_index, state.is_main_process, state.is_last_process, str(state.device)]
    state.wait_for_everyone()
    state.destroy_process_group()
    return [*seen, dist.is_initialized()]


def test_a_process_group_that_is_there_is_used(tmp_path):
    expected = [[2, 0, True, False, "cpu", False], [2, 1, False, True, "cpu", False]]
    assert returned_by_all(run_launched(__file__, "join", 2, tmp_path)) == expected
