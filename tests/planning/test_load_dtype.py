import pytest

from bigload.dtypes import DTYPES
from bigload.planning.load_dtype import as_dtype, as_loaded
from bigload.planning.planner import plan
from builders import checkpoint_of


def loaded(name, dtype, shape, into):
    tensor = checkpoint_of({name: (dtype, shape)}).tensors[name]
    return as_dtype(tensor, DTYPES[into])


@pytest.mark.parametrize(
    ("stored", "into", "num_bytes"),
    [("F32", "BF16", 12), ("F64", "F16", 12), ("BF16", "F32", 24), ("F16", "BF16", 12), ("F32", "F8_E4M3", 6)],
)
def test_plain_floating_point_weights_are_as_large_as_the_type_they_are_loaded_in(stored, into, num_bytes):
    tensor = loaded("a.weight", stored, [2, 3], into)
    assert (tensor.num_bytes, tensor.dtype, tensor.shape) == (num_bytes, DTYPES[into], (2, 3))


def test_a_size_is_rounded_up_to_whole_bytes():
    assert loaded("a.weight", "BF16", [3], "F4").num_bytes == 2


@pytest.mark.parametrize("stored", ["I64", "I32", "U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_integers_and_small_floats_stay_as_they_are(stored):
    assert loaded("a.weight", stored, [4], "F32").dtype.name == stored


@pytest.mark.parametrize(
    "name",
    [
        "a.weight_scale",
        "a.weight_scale_inv",
        "a.scales",
        "a.weight.absmax",
        "a.qzeros",
        "a.weight.quant_map",
        "a.SCALE",
    ],
)
def test_the_scales_of_quantised_weights_stay_as_they_are(name):
    assert loaded(name, "F32", [4], "BF16").dtype.name == "F32"


def test_a_module_called_as_scales_are_is_converted():
    assert loaded("rescale.weight", "F32", [4], "BF16").dtype.name == "BF16"


def test_without_a_type_tensors_stay_as_they_are():
    tensors = checkpoint_of({"a.weight": ("F32", [4]), "b.weight": 3}).tensors
    assert as_loaded(tensors, None) == tensors


def test_a_plan_counts_the_bytes_that_are_loaded():
    tensors = {"a.weight": ("F32", [4]), "b.scales": ("F32", [4]), "c.qweight": ("I32", [4])}
    made = plan(checkpoint_of(tensors), {"cpu": 100}, dtype="BF16")
    assert (made.weights_bytes, made.total_bytes) == (8 + 16 + 16, 48)
