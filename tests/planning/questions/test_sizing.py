"""Questions about size: what is found is enough, and one byte less is not."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.devices import CPU, Device
from bigload.errors import OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.model.structure import read_structure
from bigload.planning.options import options_of
from bigload.planning.placement.problem import Misfit
from bigload.planning.placement.solve import Solution
from bigload.planning.planner import place
from bigload.planning.questions.sizing import GpuNeeds, GpuSizes, GpusWithRam, LeastMemory, fits, gpus
from bigload.units import GIB
from builders import checkpoint_of, llama_config, llama_tensors

LLAMA = {**llama_config(), "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 32}


@st.composite
def models(draw, *, max_blocks=6):
    """A model of unlike blocks, some of them with routed experts."""
    tensors = {"model.embed_tokens.weight": draw(st.integers(1, 40))}
    for index in range(draw(st.integers(1, max_blocks))):
        tensors[f"model.layers.{index}.attn.weight"] = draw(st.integers(1, 30))
        if draw(st.booleans()):
            for expert in range(2):
                tensors[f"model.layers.{index}.mlp.experts.{expert}.up.weight"] = draw(st.integers(1, 30))
    tensors["lm_head.weight"] = draw(st.integers(1, 40))
    return checkpoint_of(tensors, config={"model_type": "x", "num_experts_per_tok": 1})


def structure_of(checkpoint, options):
    return read_structure(checkpoint, options)


def equal(count, num_bytes, ram=None):
    limits = tuple((Device("cuda", index), num_bytes) for index in range(count))
    return MemoryBudget(limits if ram is None else (*limits, (CPU, ram)))


def runs_on_gpus(found) -> bool:
    return isinstance(found, Solution) and found.placement.execution_device != CPU


def llama(**wishes):
    options = options_of(**wishes)
    return read_structure(checkpoint_of(llama_tensors(), config=LLAMA), options), options


RESIDENT = sorted(set(Policy) - {Policy.STREAMED})


@given(
    checkpoint=models(), counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), policy=st.sampled_from(RESIDENT)
)
def test_what_fits_says_is_enough_and_one_byte_less_is_not(checkpoint, counts, policy):
    options = options_of(overhead=7, policy=policy)
    structure = structure_of(checkpoint, options)
    for least in fits(structure, options, counts).least:
        assert isinstance(place(structure, equal(least.num_gpus, least.gpu_bytes), options), Solution)
        assert isinstance(place(structure, equal(least.num_gpus, least.gpu_bytes - 1), options), Misfit)


def test_what_keeps_no_weights_on_gpus_is_not_asked_where_they_fit():
    structure, options = llama(policy=Policy.STREAMED)
    with pytest.raises(OptionError, match="keeps weights on GPUs"):
        fits(structure, options, [1])


@given(checkpoint=models(), count=st.integers(1, 4))
def test_no_way_to_cut_the_model_into_stretches_needs_less(checkpoint, count):
    options = options_of(overhead=3)
    structure = structure_of(checkpoint, options)
    sizes = [unit.num_bytes for unit in structure.units(options.workload)]
    cuts = (
        (0, *inner, len(sizes))
        for number in range(min(count, len(sizes)))
        for inner in combinations(range(1, len(sizes)), number)
    )
    brute = min(max(sum(sizes[start:end]) for start, end in pairwise(cut)) for cut in cuts)
    (least,) = fits(structure, options, [count]).least
    assert least.gpu_bytes == brute + 3


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_caches_logits_activations_and_overhead_are_counted(count):
    structure, options = llama(context=100, batch=2, overhead="1KiB")
    (least,) = fits(structure, options, [count]).least
    (bare,) = fits(*llama(overhead=0), [count]).least
    assert least.gpu_bytes > bare.gpu_bytes + 1024
    assert isinstance(place(structure, equal(count, least.gpu_bytes), options), Solution)
    assert isinstance(place(structure, equal(count, least.gpu_bytes - 1), options), Misfit)


def test_the_largest_unit_is_told_and_no_gpu_can_be_smaller():
    structure, options = llama(overhead=5)
    answer = fits(structure, options, [64])
    assert answer.largest is not None
    assert answer.least[0].gpu_bytes == answer.largest.num_bytes + answer.largest.run_bytes + answer.fixed_bytes
    assert answer.fixed_bytes == 5


def test_an_empty_model_needs_nothing():
    options = options_of()
    structure = read_structure(checkpoint_of({}), options)
    assert [least.gpu_bytes for least in fits(structure, options).least] == [0, 0, 0, 0]
    assert fits(structure, options).largest is None
    assert gpus(structure, options, GIB).without_offload == 1


def test_a_size_beyond_any_device_is_none():
    options = options_of(overhead=2**63 - 1)
    structure = read_structure(checkpoint_of({"a.weight": 1}), options)
    answer = fits(structure, options, [1, 2])
    assert [least.gpu_bytes for least in answer.least] == [None, None]
    assert str(answer) == "smallest memory per GPU without offload: 1 x more than any device | 2 x more than any device"


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_a_number_of_gpus_that_makes_no_sense_is_refused(count):
    structure, options = llama()
    with pytest.raises(OptionError, match="GPUs"):
        fits(structure, options, [count])


@pytest.mark.parametrize("size", [0, -1, 2**63])
def test_a_size_of_gpus_that_makes_no_sense_is_refused(size):
    structure, options = llama()
    with pytest.raises(OptionError):
        gpus(structure, options, size)


@given(checkpoint=models(), size=st.integers(1, 200))
def test_the_number_of_gpus_and_their_least_size_agree(checkpoint, size):
    options = options_of(overhead=4)
    structure = structure_of(checkpoint, options)
    number = gpus(structure, options, size).without_offload
    if number is None:
        (many,) = fits(structure, options, [100]).least
        assert many.gpu_bytes > size
        return
    (enough,) = fits(structure, options, [number]).least
    assert enough.gpu_bytes <= size
    if number > 1:
        (fewer,) = fits(structure, options, [number - 1]).least
        assert fewer.gpu_bytes > size


@given(checkpoint=models(), size=st.integers(20, 200), policy=st.sampled_from(Policy))
def test_the_ram_beside_fewer_gpus_is_enough_without_a_disk(checkpoint, size, policy):
    options = options_of(overhead=4, policy=policy)
    structure = structure_of(checkpoint, options)
    for row in gpus(structure, options, size).with_ram:
        assert runs_on_gpus(place(structure, equal(row.num_gpus, size, row.ram_bytes), options))


@given(checkpoint=models(max_blocks=4), size=st.integers(20, 200))
def test_no_choice_for_one_gpu_leaves_less_in_ram(checkpoint, size):
    options = options_of(overhead=4, experts="block")
    structure = structure_of(checkpoint, options)
    sizes = [unit.num_bytes for unit in structure.units(options.workload)]
    needs = gpus(structure, options, size)
    if needs.without_offload == 1:
        assert needs.with_ram == ()
        return
    possible = [
        sum(off)
        for number in range(1, len(sizes) + 1)
        for off in combinations(sizes, number)
        if sum(sizes) - sum(off) + max(off) + 4 <= size
    ]
    rows = [row for row in needs.with_ram if row.num_gpus == 1]
    assert [row.ram_bytes for row in rows] == ([min(possible)] if possible else [])
    assert all(row.is_least for row in rows)


def mixture():
    tensors = {"model.embed_tokens.weight": 40}
    for index in range(4):
        tensors[f"model.layers.{index}.attn.weight"] = 20
        for expert in range(8):
            tensors[f"model.layers.{index}.mlp.experts.{expert}.up.weight"] = 30
    return checkpoint_of(tensors | {"lm_head.weight": 40}, config={"model_type": "x", "num_experts_per_tok": 2})


def test_routed_experts_alone_are_in_ram_where_the_rest_fits():
    options = options_of(overhead=0, link_bandwidth=3 * GIB)
    structure = read_structure(mixture(), options)
    # 160 bytes of dense parts and a workspace of 2 x 30 leave room for no block of experts, 8 x 30.
    (row,) = gpus(structure, options, 400).with_ram[-1:]
    assert (row.num_gpus, row.ram_bytes, row.only_experts) == (1, 4 * 240, True)
    assert row.token_seconds == pytest.approx(4 * 60 / (3 * GIB))
    whole = options_of(overhead=0, experts="block")
    assert not any(row.only_experts for row in gpus(structure, whole, 400).with_ram)


def test_rounding_is_upwards_so_that_what_is_shown_is_enough():
    answer = GpuSizes(
        least=(LeastMemory(num_gpus=1, gpu_bytes=3 * GIB + 1), LeastMemory(num_gpus=2, gpu_bytes=2 * GIB)),
        fixed_bytes=0,
        largest=None,
        unknown=(),
    )
    assert str(answer) == "smallest memory per GPU without offload: 1 x 3.1 GiB | 2 x 2.0"


def test_a_sentence_says_what_is_needed():
    rows = [
        GpusWithRam(num_gpus=5, ram_bytes=12 * GIB, only_experts=False, token_seconds=0.5, is_least=True),
        GpusWithRam(num_gpus=1, ram_bytes=46 * GIB, only_experts=True, token_seconds=0.5, is_least=True),
    ]
    answer = GpuNeeds(
        gpu_bytes=24 * GIB, without_offload=6, with_ram=tuple(rows), fixed_bytes=0, largest=None, unknown=()
    )
    assert str(answer) == (
        "needs 6 x 24.00 GiB without offload; 5 x 24.00 GiB + 12.0 GiB of RAM; "
        "1 x 24.00 GiB + 46.0 GiB of RAM with experts in RAM"
    )


def test_a_gpu_that_cannot_even_stream_the_largest_module_is_no_answer():
    options = options_of(overhead=0)
    structure = read_structure(checkpoint_of({"a.weight": 50, "b.weight": 100}), options)
    answer = gpus(structure, options, 99)
    assert (answer.without_offload, answer.with_ram) == (None, ())
    assert "no number of GPUs" in str(answer)


def test_a_gpu_that_streams_experts_is_used_although_the_cpu_could_run_the_model():
    options = options_of(overhead=0)
    structure = read_structure(mixture(), options)
    # No block of 260 bytes passes through 250, but its experts do, two at a time.
    found = place(structure, equal(1, 250, 4 * GIB), options)
    assert runs_on_gpus(found)
