"""Small functions that transformers, diffusers and peft import from accelerate do here what they do there."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import bigload

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import data_loader, utils
from accelerate.utils import dataclasses, memory

pytestmark = pytest.mark.peers
BOTH = pytest.mark.parametrize("functions", [bigload, utils], ids=["bigload", "accelerate"])


@BOTH
@pytest.mark.parametrize(
    ("fits", "options", "tried"),
    [
        (128, {}, [128]),
        (100, {}, [128, 115, 103, 92]),
        (9, {"starting_batch_size": 12}, [12, 10, 9]),
        (1, {"starting_batch_size": 3}, [3, 2, 1]),
        (2, {"starting_batch_size": 8, "reduce_batch_size_fn": iter([4, 2]).__next__}, [8, 4, 2]),
    ],
)
def test_a_batch_size_is_found_by_trying(functions, fits, options, tried):
    sizes = []
    if "reduce_batch_size_fn" in options:
        options = {**options, "reduce_batch_size_fn": iter([4, 2]).__next__}

    @functions.find_executable_batch_size(**options)
    def run(batch_size, given, *, named):
        sizes.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate more")
        return given, named

    assert run("a", named="b") == ("a", "b")
    assert sizes == tried
    run("a", named="b")
    assert sizes == [*tried, tried[-1]]


@BOTH
def test_other_errors_and_mistakes_are_raised(functions):
    def run(batch_size):
        raise RuntimeError("CUDA out of memory. " if batch_size > given else "other")

    given = -1
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        functions.find_executable_batch_size(run, starting_batch_size=4)()
    given = 4
    with pytest.raises(RuntimeError, match="other"):
        functions.find_executable_batch_size(run, starting_batch_size=4)()
    with pytest.raises(TypeError, match="Batch size was passed into `run`"):
        functions.find_executable_batch_size(run)(4)


@BOTH
def test_environment_variables_are_set_for_a_while(functions, monkeypatch):
    monkeypatch.setenv("BIGLOAD_TEST_SET", "before")
    monkeypatch.delenv("BIGLOAD_TEST_UNSET", raising=False)
    with functions.patch_environment(bigload_test_set=1, BIGLOAD_TEST_UNSET="x"):
        assert (os.environ["BIGLOAD_TEST_SET"], os.environ["BIGLOAD_TEST_UNSET"]) == ("1", "x")
    assert os.environ["BIGLOAD_TEST_SET"] == "before"
    assert "BIGLOAD_TEST_UNSET" not in os.environ


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(10))

    def __len__(self):
        return 10


@pytest.mark.parametrize("dataset", [list(range(10)), Counting()], ids=["map", "iterable"])
@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_batches_are_skipped(dataset, skipped):
    loader = DataLoader(dataset, batch_size=3)
    theirs, ours = (each.skip_first_batches(loader, skipped) for each in (data_loader, bigload))
    for _ in range(2):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    assert len(ours) == len(theirs) == 4 - skipped


@BOTH
def test_wrapped_models_are_found(functions):
    model = nn.Sequential(nn.Linear(2, 2))
    assert functions.extract_model_from_parallel(model) is model
    assert functions.extract_model_from_parallel(nn.DataParallel(model)) is model
    compiled = torch.compile(model, backend="eager")
    assert functions.extract_model_from_parallel(compiled) is compiled
    assert functions.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    inside = nn.Sequential(nn.DataParallel(model))
    assert functions.extract_model_from_parallel(inside, recursive=True)[0] is model


def test_classes_and_dtypes_are_found_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    for name in ("Sequential", "ReLU", "Linear", "Conv2d"):
        found = bigload.get_module_class_from_name(model, name)
        assert found is dataclasses.get_module_class_from_name(model, name)
    assert {each.name: each.value for each in bigload.CustomDtype} == {
        each.name: each.value for each in utils.CustomDtype
    }
    for ours, theirs in zip(bigload.CustomDtype, utils.CustomDtype, strict=True):
        assert bigload.dtype_byte_size(ours) == utils.dtype_byte_size(theirs)


@pytest.mark.parametrize("functions", [bigload, memory], ids=["bigload", "accelerate"])
def test_released_objects_are_none(functions):
    functions.clear_device_cache(garbage_collection=True)
    assert functions.release_memory(torch.ones(2), []) == [None, None]
