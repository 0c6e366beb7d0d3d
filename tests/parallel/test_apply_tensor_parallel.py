import pytest

from parallel_models import MODELS
from rank_jobs import all_jobs
from rank_processes import run_ranks


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request):
    return run_ranks(request.param, all_jobs)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_what_one_process_gives(found, name):
    for rank in found:
        assert rank["divided"][name]["difference"] < 1e-5
        assert rank["divided"][name]["inferred"] < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_has_its_part_of_the_values_and_nothing_besides(found, name):
    for rank in found:
        divided = rank["divided"][name]
        assert divided["shapes"]
        assert divided["values"]
        assert divided["storage"] == 1


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_dtensors_that_know_the_whole(found, name):
    for rank in found:
        divided = rank["divided"][name]
        assert divided["full"]
        # Torch has no placement for two key heads on four ranks; weights of convolutions are plain tensors.
        if name not in {"two key heads", "convolved"}:
            assert divided["num_placed"] == divided["num_divided"] > 0


def test_tied_parameters_stay_tied(found):
    assert {rank["divided"]["heads"]["ties"] for rank in found} == {1}
    assert {rank["divided"]["untied"]["ties"] for rank in found} == {0}


def test_a_model_on_the_meta_device_is_divided_there_and_filled_later(found):
    for rank in found:
        assert rank["meta"]["is_meta"]
        assert rank["meta"]["difference"] < 1e-5


def test_a_plan_for_another_model_or_other_ranks_is_refused(found):
    for rank in found:
        assert "the plan was made for another model" in rank["refused"]["model"]
        assert "blocks.0.attention.qkv.weight: expected None, found (24, 72)" in rank["refused"]["model"]
        assert f"a plan for {len(found) + 1} ranks, and a mesh of shape ({len(found)},)" in rank["refused"]["ranks"]
