"""Ranks divide models of transformers, and answer as one process does."""

from math import prod

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.apply import plan_tensor_parallel
from bigload.planning.tensor_parallel.division import WHOLE
from bigload.planning.tensor_parallel.partition import partition
from family_ranks import WAYS, compare
from parallel_families import FAMILIES, make
from rank_processes import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

WITHOUT_RULES = {"deberta-v2": "no rules", "vit": "rules for names on disk, which are not those of the model"}
MOSTLY_WHOLE = {
    **dict.fromkeys(("opt", "bart"), "tables of positions that add an offset themselves"),
    **dict.fromkeys(
        ("whisper", "wav2vec2", "vit", "clip"), "convolutions, tables of positions that are read as weights"
    ),
    **dict.fromkeys(
        ("gemma", "llama-mqa", "llama-gqa", "falcon", "falcon-grouped"), "a key and a value that all queries share"
    ),
}
"""Families of which some percent stay whole in models as small as these, and what."""


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_divided_without_its_values(family, size):
    model = make(transformers, family, "meta")
    plan = plan_tensor_parallel(model, size)
    assert plan.source == ("inferred" if family in WITHOUT_RULES else "family")
    assert not [note for note in plan.notes if note.code in ("unproven", "gathered")]
    first = dict(model.named_parameters())
    share = max(sum(prod(plan.local_shape(name, rank)) for name in first) for rank in range(size))
    share /= sum(parameter.numel() for parameter in first.values())
    assert share < 1 / size + (0.15 if family in MOSTLY_WHOLE else 0.025)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_ranks_are_divided_alike(family, size, tmp_path):
    """What the rules of `reshard` divide, plans divide in the same way; some of what those leave whole, too."""
    model = make(transformers, family)
    model.save_pretrained(tmp_path)
    plan = plan_tensor_parallel(model, size)
    try:
        divisions = partition(open_checkpoint(tmp_path), tp=size).divisions
    except PartitionError as error:
        pytest.skip(str(error).partition("\n")[0])
    common = {
        name: division
        for name, division in divisions.items()
        if name in plan.shapes and not _is_whole(division, plan.shapes[name])
    }
    if family == "vit" and not common:
        pytest.skip("names on disk are not those of the model")
    assert common
    assert {name: plan.division(name) for name in common} == common


def _is_whole(division, shape):
    return division == WHOLE or all(pairs == ((0, shape[division.dim]),) for pairs in division.ranges)


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    return run_ranks(request.param, compare, list(FAMILIES), patience_seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_process(found, family):
    assert max(rank[family]["difference"] for rank in found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_process(found, family):
    for rank in found:
        assert all(rank[family]["same_tokens"].values())
        assert rank[family]["same_tokens"].keys() in (WAYS.keys(), set())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_what_is_planned(found, family):
    model = make(transformers, family, "meta")
    plan = plan_tensor_parallel(model, len(found))
    first = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in first.values())
    for rank, held in enumerate(found):
        planned = sum(prod(plan.local_shape(name, rank)) for name in first)
        assert held[family]["share"] == pytest.approx(planned / total)
