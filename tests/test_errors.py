import errno
import inspect
import pickle
from pathlib import Path

import pytest

from bigload import errors
from bigload.errors import (
    MAX_LISTED,
    BigloadError,
    CheckpointNotFoundError,
    DamagedOutputError,
    DoesNotFitError,
    InvalidCheckpointError,
    NotEnoughSpaceError,
    OptionError,
    OutputExistsError,
    Problem,
    ReadError,
    StalePlanError,
    StateDictMismatchError,
    UnsupportedDTypeError,
    WriteError,
    abridged,
)


def all_errors():
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


def problem(index=0, *, code="hole", file="a.safetensors"):
    return Problem(code=code, file=file, text=f"problem {index}")


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_is_a_bigload_error(kind):
    assert issubclass(kind, BigloadError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("CheckpointNotFoundError", FileNotFoundError),
        ("InvalidCheckpointError", ValueError),
        ("OptionError", ValueError),
        ("InvalidPlanError", ValueError),
        ("PlanNotFoundError", FileNotFoundError),
        ("OutputExistsError", FileExistsError),
        ("NotEnoughSpaceError", OSError),
        ("WriteError", OSError),
        ("ReadError", OSError),
        ("UnsupportedDTypeError", TypeError),
        ("UnsupportedMethodError", ValueError),
        ("NotEnoughMemoryError", MemoryError),
        ("StateDictMismatchError", ValueError),
        ("DamagedOutputError", ValueError),
        ("DeviceMapError", ValueError),
        ("AbsentWeightError", ValueError),
        ("AbsentWeightError", NotImplementedError),
        ("DispatchedModelError", RuntimeError),
        ("ModelNotSendableError", TypeError),
        ("WorkerError", RuntimeError),
        ("WorkerTimeoutError", TimeoutError),
    ],
)
def test_an_error_is_caught_as_the_builtin_that_callers_expect(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_the_text_of_an_error_is_message_details_and_hint():
    assert str(BigloadError("no", details=("first", "second"), hint="try")) == "no\n  first\n  second\nhint: try"


def test_an_error_without_details_and_hint_is_one_line():
    assert str(BigloadError("no")) == "no"


def test_an_error_that_doubles_as_an_os_error_keeps_its_text():
    assert str(CheckpointNotFoundError("x", "gone", hint="look")) == "no checkpoint at x: gone\nhint: look"


def test_details_up_to_the_limit_are_all_listed():
    assert abridged(["x"] * MAX_LISTED) == ["x"] * MAX_LISTED


def test_details_past_the_limit_are_counted():
    lines = abridged([str(index) for index in range(MAX_LISTED + 5)])
    assert len(lines) == MAX_LISTED
    assert "6 more" in lines[-1]


def test_one_problem_is_told_in_the_message():
    error = InvalidCheckpointError("x", [problem()])
    assert error.message == "x is not a valid checkpoint: a.safetensors: problem 0"
    assert error.details == ()


def test_several_problems_are_counted_with_their_files():
    error = InvalidCheckpointError("x", [problem(0), problem(1), problem(2, file="b.safetensors")])
    assert "3 problems in 2 files" in error.message
    assert len(error.details) == 3


def test_thousands_of_problems_stay_available_as_values():
    error = InvalidCheckpointError("x", [problem(index) for index in range(1000)])
    assert len(error.problems) == 1000
    assert len(str(error).splitlines()) < 30


@pytest.mark.parametrize("code", ["file-truncated", "missing-shard", "file-empty"])
def test_a_broken_download_is_hinted_at(code):
    assert "download" in InvalidCheckpointError("x", [problem(code=code)]).hint


def test_an_unsafe_path_hints_at_where_the_checkpoint_comes_from():
    assert "comes from" in InvalidCheckpointError("x", [problem(code="unsafe-path")]).hint


def test_an_error_of_fit_says_what_is_needed_and_what_there_is():
    error = DoesNotFitError("tiny", needed_bytes=3 * 1024**3, usable_bytes=2 * 1024**3, shortfalls={"total": 1024**3})
    assert "3.00 GiB" in error.message
    assert "2.00 GiB" in error.message
    assert "short by 1.00 GiB" in str(error)


def test_an_error_of_fit_names_the_device_that_is_too_small():
    error = DoesNotFitError("tiny", needed_bytes=3, usable_bytes=2, shortfalls={"cuda:0": 1})
    assert "cuda:0 is short by 1 B" in str(error)
    assert error.shortfalls == {"cuda:0": 1}


def test_a_stale_plan_lists_the_changes():
    assert "  a.safetensors is gone" in str(StalePlanError("plan.json", "tiny", ["a.safetensors is gone"]))


def test_an_error_of_space_says_how_much_is_missing():
    error = NotEnoughSpaceError(Path("out"), needed_bytes=3 * 1024, free_bytes=1024)
    assert "short by 2.0 KiB" in str(error)
    assert (error.needed_bytes, error.free_bytes) == (3072, 1024)


def test_an_error_of_writing_keeps_the_reason_of_the_system():
    assert "No space left" in str(WriteError(Path("out"), OSError(28, "No space left on device")))


def test_a_difference_names_file_offset_and_tensor():
    text = str(DamagedOutputError.while_writing(Path("out"), offset=42, tensor="a.weight"))
    assert "out" in text
    assert "byte 42" in text
    assert "a.weight" in text


def test_a_taken_output_names_the_path():
    assert OutputExistsError(Path("out"), "it exists", hint="choose another").path == Path("out")


def test_a_failed_read_names_the_file():
    assert "cannot read a.safetensors: gone" in str(ReadError("a.safetensors", "gone"))


def test_an_unsupported_dtype_lists_its_tensors():
    error = UnsupportedDTypeError("F6_E2M3", ["a", "b"])
    assert "2 tensors" in error.message
    assert error.details == ("a", "b")


def test_a_mismatch_counts_and_lists_all_three_kinds():
    error = StateDictMismatchError("Net", missing=["a"], unexpected=["b", "c"], misshapen=[])
    assert "1 missing, 2 unexpected, 0 of another shape" in error.message
    assert len(error.details) == 3


def test_strict_is_no_advice_where_tensors_cannot_be_converted():
    error = StateDictMismatchError("Net", problems=["a cannot be made"])
    assert "1 problem of conversion" in error.message
    assert "strict=False" not in error.hint


ERRORS = [
    errors.CheckpointNotFoundError("there", "gone", hint="look elsewhere"),
    errors.InvalidCheckpointError("there", [errors.Problem(code="hole", file="a", text="a hole")]),
    errors.DoesNotFitError("m", needed_bytes=2, usable_bytes=1, shortfalls={"total": 1}, details=("row",)),
    errors.StalePlanError("plan.json", "there", ["a   is gone"]),
    errors.OutputExistsError(Path("out"), "it exists", hint="choose another"),
    errors.NotEnoughSpaceError(Path("out"), needed_bytes=2, free_bytes=1),
    errors.WriteError(Path("out"), OSError(errno.ENOSPC, "No space left on device")),
    errors.DamagedOutputError.while_writing(Path("out"), offset=3, tensor="w"),
    errors.UnknownTensorError("m", ["w"]),
    errors.StateDictMismatchError("M", missing=["a"]),
    errors.RankError(0, "ValueError: x", function="main_process_first", traceback=["line"]),
    errors.WorkerTimeoutError([1], "running forward", seconds=2.0, stacks={1: "in sleep"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_processes_with_text_and_fields(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("error", "number"),
    [(ERRORS[0], errno.ENOENT), (ERRORS[4], errno.EEXIST), (ERRORS[5], errno.ENOSPC), (ERRORS[6], errno.ENOSPC)],
)
def test_the_doubles_of_system_errors_have_their_number(error, number):
    assert error.errno == number
    assert error.filename


def test_a_path_is_shown_to_its_end():
    path = Path("folder" * 20, "box.json")
    assert str(OptionError.of("profile", path, "a profile")) == f'profile is "{path}"; expected a profile'
    assert len(str(OptionError.of("dtype", "long" * 99, "the name of a dtype"))) < 150
