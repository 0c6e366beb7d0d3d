from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.planning.model.structure import read_structure
from bigload.planning.options import PlanOptions, options_of
from bigload.planning.questions.concessions import concede
from builders import checkpoint_of, llama_config, llama_tensors


def conceded(is_enough, *, stored="BF16", **keywords):
    checkpoint = checkpoint_of(llama_tensors(dtype=stored), config=llama_config())
    return concede(read_structure(checkpoint, PlanOptions()), options_of(**keywords), is_enough)


def test_what_is_enough_as_it_is_gives_nothing_way():
    found = conceded(lambda _: True, context=9000, batch=4)
    assert (found.options, found.changes, found.is_enough) == (options_of(context=9000, batch=4), (), True)


@pytest.mark.parametrize(
    ("is_enough", "changes"),
    [
        (lambda asked: asked.context <= 10_000, ("context 32768 -> 9984",)),
        (lambda asked: asked.batch * asked.context <= 10_000, ("context 32768 -> 4864", "batch 4 -> 2")),
        (lambda asked: asked.kv_dtype and asked.context <= 9000, ("context 32768 -> 8960", "KV cache -> F8_E4M3")),
        (lambda asked: asked.load_dtype, ("KV cache -> F8_E4M3", "weights as stored -> BF16")),
    ],
)
def test_later_concessions_are_made_only_where_earlier_ones_are_not_enough(is_enough, changes):
    found = conceded(lambda asked: bool(is_enough(asked.workload)), stored="F32", context=32768, batch=4)
    assert (found.changes, found.is_enough) == (changes, True)


def test_what_was_pinned_stays_and_all_else_gives_way_where_nothing_is_enough():
    found = conceded(lambda _: False, stored="F32", context=9000, kv_dtype="bf16")
    assert (found.changes, found.is_enough) == (("context 9000 -> 4096", "weights as stored -> BF16"), False)


def test_a_context_below_the_floor_stays():
    assert conceded(lambda _: False, context=100, kv_dtype="bf16").changes == ()


@given(st.integers(1, 50_000), st.integers(1, 40), st.integers(1, 10**6))
def test_as_much_stays_as_is_enough(context, batch, tokens):
    def is_enough(asked):
        return asked.workload.context * asked.workload.batch <= tokens

    found = conceded(is_enough, context=context, batch=batch, kv_dtype="bf16")
    if not found.is_enough:
        assert min(context, 4096) > tokens
        return
    assert is_enough(found.options)
    workload = found.options.workload
    for larger in (replace(workload, batch=workload.batch + 1), replace(workload, context=workload.context + 256)):
        if larger.batch <= batch and larger.context <= context:
            assert not is_enough(replace(found.options, workload=larger))
