import pytest

from bigload.dtypes import DTYPES
from bigload.errors import OptionError
from bigload.planning.workload import MAX_BATCH, MAX_CONTEXT, Workload


def test_without_words_a_workload_is_weights_only():
    assert Workload() == Workload(context=0, batch=1, kv_dtype=None, load_dtype=None, attention=None)


def test_the_bounds_themselves_are_allowed():
    assert Workload(context=MAX_CONTEXT, batch=MAX_BATCH).context == MAX_CONTEXT


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "F4", "I8"])
def test_keys_and_values_may_be_floating_point_or_quantised(dtype):
    assert Workload(kv_dtype=DTYPES[dtype]).kv_dtype is DTYPES[dtype]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"context": -1}, "context has to be 0 to 1073741824 tokens, not -1"),
        ({"context": MAX_CONTEXT + 1}, "context has to be 0 to 1073741824 tokens, not 1073741825"),
        ({"context": 10**5000}, "not a number of more than 20 digits"),
        ({"context": 8192.0}, "context has to be a whole number of tokens, not 8192.0"),
        ({"context": "8k"}, "context has to be a whole number of tokens, not '8k'"),
        ({"context": True}, "context has to be a whole number of tokens, not True"),
        ({"batch": 0}, "batch has to be 1 to 1048576 sequences, not 0"),
        ({"batch": MAX_BATCH + 1}, "batch has to be 1 to 1048576 sequences"),
        ({"batch": None}, "batch has to be a whole number of sequences, not None"),
        ({"kv_dtype": "BF16"}, "kv_dtype has to be one of bigload's dtypes, not 'BF16'"),
        ({"kv_dtype": DTYPES["BOOL"]}, "kv_dtype has to be a floating-point type, not BOOL"),
        ({"attention": "eager"}, "attention has to be one of eager, sdpa, not 'eager'"),
        ({"load_dtype": DTYPES["F8_E4M3"]}, "load_dtype has to be floating-point of 16 bits or more"),
        ({"load_dtype": DTYPES["I8"]}, "not I8"),
    ],
)
def test_what_no_model_can_run_is_refused(wrong, text):
    with pytest.raises(OptionError) as error:
        Workload(**wrong)
    assert text in str(error.value)
