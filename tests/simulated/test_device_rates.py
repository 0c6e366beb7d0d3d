import torch

from bigload.bench.rates import device_rates
from bigload.bench.rates.device_rates import DTYPES_MEASURED, device_profile
from bigload.units import MIB


def test_an_accelerator_is_measured_with_its_link(simulation, monkeypatch):
    monkeypatch.setattr(device_rates, "_LINK_BYTES", MIB)
    monkeypatch.setattr(device_rates, "_FIRST_SIZE", 64)
    monkeypatch.setattr(device_rates, "_LAST_SIZE", 128)
    words = []
    found = device_profile(
        torch.device("sim:1"), name="simulated", weight_bytes=64 * 2**20, seconds=0.0, on_run=words.append
    )
    assert (found.device, found.name) == ("sim:1", "simulated")
    assert set(found.weight_rate) == set(found.flops) == set(DTYPES_MEASURED)
    assert found.narrow_weight_rate == {}
    assert min(found.link_in, found.link_out) > 0
    assert "sim:1: copies from it" in words
    assert simulation.races == []
