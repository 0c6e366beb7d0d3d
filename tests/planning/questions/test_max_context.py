"""The largest context: so many tokens fit, and one more does not."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bigload.devices import CPU
from bigload.errors import DoesNotFitError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.model.structure import read_structure
from bigload.planning.options import options_of
from bigload.planning.placement.policies.optimal import token_cost
from bigload.planning.placement.solve import Solution
from bigload.planning.planner import place
from bigload.planning.questions.max_context import max_context
from builders import checkpoint_of, llama_config, llama_tensors

CONFIG = {**llama_config(), "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 32}
CHECKPOINT = checkpoint_of(llama_tensors(), config=CONFIG)
OPTIONS = options_of(overhead=0)
STRUCTURE = read_structure(CHECKPOINT, OPTIONS)
TOTAL = CHECKPOINT.total_bytes


def at(options, context):
    return replace(options, workload=replace(options.workload, context=context))


def cost(structure, budget, options, context):
    """Return whether accelerators stay unused and what a token costs, or `None`, by a plan made for this context."""
    found = place(structure, budget, at(options, context))
    if not isinstance(found, Solution):
        return None
    unused = bool(budget.accelerators) and found.placement.execution_device == CPU
    return unused, token_cost(found.problem, found.placement)


@st.composite
def budgets(draw):
    limits = st.integers(TOTAL // 8, 40 * TOTAL)
    named = {f"cuda:{index}": draw(limits) for index in range(draw(st.integers(0, 3)))}
    if not named or draw(st.booleans()):
        named["cpu"] = draw(limits)
    return MemoryBudget.of(named, use_disk=draw(st.booleans()))


@given(budget=budgets(), batch=st.sampled_from([1, 3]), any_order=st.booleans())
def test_so_many_tokens_fit_and_one_more_does_not(budget, batch, any_order):
    options = options_of(overhead=0, batch=batch, order="any" if any_order else "keep")
    base = cost(STRUCTURE, budget, options, 0)
    assume(base is not None)
    answer = max_context(STRUCTURE, budget, options)
    assert answer.unslowed_tokens <= answer.most_tokens
    assert answer.is_offloaded == (base != (False, 0))
    assert cost(STRUCTURE, budget, options, answer.unslowed_tokens) <= base
    more = cost(STRUCTURE, budget, options, answer.unslowed_tokens + 1)
    assert more is None or more > base
    assert cost(STRUCTURE, budget, options, answer.most_tokens)[0] <= base[0]
    more = cost(STRUCTURE, budget, options, answer.most_tokens + 1)
    assert more is None or more[0] > base[0]


@given(budget=budgets(), one=st.integers(0, 5_000), other=st.integers(0, 5_000))
def test_a_longer_context_never_costs_less_and_never_needs_less(budget, one, other):
    shorter, longer = sorted((one, other))
    less, more = (STRUCTURE.memory.at(at(OPTIONS, context).workload) for context in (shorter, longer))
    assert less.logits_bytes <= more.logits_bytes
    assert less.activation_bytes <= more.activation_bytes
    assert all(num_bytes <= more.cache_bytes[block] for block, num_bytes in less.cache_bytes.items())
    costs = [cost(STRUCTURE, budget, OPTIONS, context) for context in (shorter, longer)]
    assert costs[1] is None or (costs[0] is not None and costs[0] <= costs[1])


@pytest.mark.parametrize("policy", [each for each in Policy if each is not Policy.STREAMED])  # which needs RAM
def test_every_policy_has_an_answer_of_its_own(policy):
    options = options_of(overhead=0, policy=policy)
    budget = MemoryBudget.of({"cuda:0": 4 * TOTAL}, use_disk=False)
    answer = max_context(STRUCTURE, budget, options)
    assert answer.unslowed_tokens == answer.most_tokens > 0
    assert cost(STRUCTURE, budget, options, answer.most_tokens) == (False, 0)
    assert cost(STRUCTURE, budget, options, answer.most_tokens + 1) is None


def test_two_sequences_have_at_most_half_as_much_room():
    budget = MemoryBudget.of({"cuda:0": 60 * TOTAL}, use_disk=False)
    one = max_context(STRUCTURE, budget, OPTIONS).most_tokens
    two = max_context(STRUCTURE, budget, options_of(overhead=0, batch=2)).most_tokens
    assert 0 < two <= one // 2  # they may be padded, which takes a mask


def test_no_room_for_a_token_is_0():
    answer = max_context(STRUCTURE, MemoryBudget.of({"cuda:0": TOTAL}, use_disk=False), OPTIONS)
    assert (answer.unslowed_tokens, answer.most_tokens) == (0, 0)
    assert str(answer) == "no context fits: there is no room for one token beside the weights"


def test_no_room_for_the_weights_is_an_error():
    with pytest.raises(DoesNotFitError):
        max_context(STRUCTURE, MemoryBudget.of({"cuda:0": TOTAL - 1}, use_disk=False), OPTIONS)


def test_a_model_without_a_cache_has_no_limit():
    structure = read_structure(checkpoint_of({"a.weight": 5, "b.weight": 6}), OPTIONS)
    answer = max_context(structure, MemoryBudget.of({"cuda:0": 11}), OPTIONS)
    assert (answer.unslowed_tokens, answer.most_tokens, answer.grows) == (None, None, False)
    assert str(answer) == "largest context: no limit"
    assert any("takes no more memory" in remark for remark in answer.remarks)


def test_what_the_model_was_made_for_is_a_remark_where_it_is_less():
    checkpoint = checkpoint_of(llama_tensors(), config={**CONFIG, "max_position_embeddings": 64})
    structure = read_structure(checkpoint, OPTIONS)
    roomy = max_context(structure, MemoryBudget.of({"cuda:0": 1000 * TOTAL}), OPTIONS)
    assert roomy.trained_tokens == 64
    assert "the config says that the model was made for 64 tokens" in roomy.remarks
    tight = max_context(structure, MemoryBudget.of({"cuda:0": TOTAL}, use_disk=False), OPTIONS)
    assert tight.remarks == ()


@pytest.mark.parametrize("said", [-1, "x", 1e9, [4096], True, 10**400, None])
def test_a_config_that_lies_about_its_length_is_not_believed(said):
    checkpoint = checkpoint_of(llama_tensors(), config={**CONFIG, "max_position_embeddings": said})
    structure = read_structure(checkpoint, OPTIONS)
    assert max_context(structure, MemoryBudget.of({"cuda:0": 1000 * TOTAL}), OPTIONS).trained_tokens is None


def test_the_cpu_running_the_model_is_no_answer_while_accelerators_can():
    budget = MemoryBudget.of({"cuda:0": 4 * TOTAL, "cpu": 1000 * TOTAL})
    answer = max_context(STRUCTURE, budget, OPTIONS)
    assert cost(STRUCTURE, budget, OPTIONS, answer.most_tokens)[0] is False
    assert cost(STRUCTURE, budget, OPTIONS, answer.most_tokens + 1)[0] is True


def test_sentences_tell_with_and_without_offload_apart():
    budget = MemoryBudget.of({"cuda:0": 4 * TOTAL, "cpu": TOTAL})
    answer = max_context(STRUCTURE, budget, OPTIONS)
    words = f"{answer.unslowed_tokens} tokens without offload; {answer.most_tokens} tokens with offload"
    assert str(answer) == f"largest context: {words}"
    assert 0 < answer.unslowed_tokens < answer.most_tokens
