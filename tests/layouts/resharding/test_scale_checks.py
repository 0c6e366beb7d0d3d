"""Numbers that are not finite are found among any others, without torch."""

import pytest
import torch

from bigload.dtypes import DTYPES
from bigload.layouts.resharding.scale_checks import all_finite

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "largest", "-largest", "0", "smallest"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, value):
    limits = torch.finfo(FLOATS[name])
    number = {"largest": limits.max, "-largest": limits.min, "smallest": limits.smallest_normal / 4}.get(value)
    values = torch.randn(101).to(FLOATS[name])
    for place in (0, 57, 100):
        changed = values.clone()
        changed[place] = float(value) if number is None else number
        memory = bytearray(changed.view(torch.uint8).numpy().tobytes())
        assert all_finite(memory, DTYPES[name]) == bool(changed.isfinite().all())


@pytest.mark.parametrize(("byte", "expected"), [(0, True), (254, True), (255, False)])
def test_powers_of_two(byte, expected):
    assert all_finite(bytearray([127, byte, 1]), DTYPES["F8_E8M0"]) is expected
