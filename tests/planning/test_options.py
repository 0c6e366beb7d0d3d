import pytest

from bigload.devices import Device
from bigload.dtypes import DTYPES
from bigload.errors import OptionError
from bigload.planning.choices import Attention, Balance, Experts, NameScheme, Policy
from bigload.planning.options import Bandwidth, PlanOptions, options_of
from bigload.planning.workload import Workload
from bigload.units import GIB, MIB

CUDA, XPU, CPU = Device("cuda", 0), Device("xpu", 0), Device("cpu")


def test_without_words_the_options_are_the_defaults():
    assert options_of() == PlanOptions()


def test_every_word_is_understood():
    assert options_of(
        policy="balanced",
        context=100,
        batch=2,
        dtype="bfloat16",
        kv_dtype="F8_E4M3",
        attention="eager",
        overhead="300MiB",
        disk_bandwidth="2GiB",
        link_bandwidth="9GiB",
        balance="fill",
        order="any",
        experts="block",
        prefetch=True,
        no_split=["model.layers.*"],
        mtp=True,
        names="transformers",
    ) == PlanOptions(
        policy=Policy.BALANCED,
        workload=Workload(
            context=100,
            batch=2,
            load_dtype=DTYPES["BF16"],
            kv_dtype=DTYPES["F8_E4M3"],
            attention=Attention.EAGER,
        ),
        overhead=300 * MIB,
        bandwidth=Bandwidth(disk=2 * GIB, link=9 * GIB),
        balance=Balance.FILL,
        any_order=True,
        experts=Experts.BLOCK,
        prefetch=True,
        no_split=("model.layers.*",),
        keep_extra_layers=True,
        names=NameScheme.TRANSFORMERS,
    )


def test_values_do_for_words():
    assert options_of(
        policy=Policy.SEQUENTIAL, dtype=DTYPES["F16"], kv_dtype=None, overhead=0, balance=Balance.FILL
    ) == options_of(policy="sequential", dtype="float16", overhead="0B", balance="fill")


def test_one_pattern_does_for_a_list_of_one():
    assert options_of(no_split="model.layers.*").no_split == ("model.layers.*",)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"policy": "fastest"}, "no policy 'fastest'"),
        ({"policy": None}, "no policy None"),
        ({"balance": "tight"}, "no balance 'tight'"),
        ({"order": "random"}, "no order 'random'"),
        ({"experts": ["split"]}, "no experts"),
        ({"names": "accelerate"}, "no names 'accelerate'"),
        ({"context": -1}, "context has to be"),
        ({"context": "8k"}, "context has to be"),
        ({"batch": 0}, "batch has to be"),
        ({"dtype": "F33"}, "dtype: "),
        ({"dtype": "I8"}, "load_dtype has to be floating-point"),
        ({"dtype": "fp8"}, "8 bits need scales"),
        ({"dtype": 16}, "dtype: "),
        ({"kv_dtype": "word"}, "kv_dtype: "),
        ({"attention": "flash"}, "no attention 'flash'"),
        ({"kv_dtype": "I64"}, "kv_dtype has to be a floating-point type"),
        ({"overhead": -1}, "less than nothing"),
        ({"overhead": "some"}, "overhead: "),
        ({"overhead": 0.5}, "overhead: "),
        ({"overhead": True}, "overhead: "),
        ({"disk_bandwidth": 0}, "make no sense"),
        ({"disk_bandwidth": "30GiB"}, "make no sense"),
        ({"link_bandwidth": "1GiB"}, "make no sense"),
        ({"link_bandwidth": "fast"}, "link_bandwidth: "),
        ({"link_bandwidth": 24.5}, "link_bandwidth: "),
        ({"link_bandwidth": None}, "link_bandwidth: "),
        ({"prefetch": "no"}, "prefetch"),
        ({"mtp": 1}, "mtp"),
        ({"no_split": [1]}, "no_split"),
        ({"no_split": None}, "no_split"),
        ({"experts": "split", "policy": "sequential"}, "keeps experts with their block"),
    ],
)
def test_what_cannot_be_is_refused_with_the_word_that_is_wrong(wrong, text):
    with pytest.raises(OptionError, match=text):
        options_of(**wrong)


def test_an_option_that_does_not_exist_is_not_passed_over():
    with pytest.raises(TypeError, match="no option contxt; known are context, batch"):
        options_of(contxt=8192)


def test_a_word_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(OptionError) as caught:
        options_of(experts="some")
    assert caught.value.hint == "known are auto, block, split"


@pytest.mark.parametrize(
    ("overhead", "device", "num_bytes"),
    [
        (None, CUDA, GIB // 2),
        (None, XPU, 0),
        (None, CPU, 0),
        (0, CUDA, 0),
        (7, CUDA, 7),
        (7, XPU, 7),
        (7, CPU, 0),
    ],
)
def test_overhead_is_on_accelerators_and_by_default_on_those_of_cuda(overhead, device, num_bytes):
    assert PlanOptions(overhead=overhead).overhead_of(device) == num_bytes
