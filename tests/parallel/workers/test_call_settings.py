"""Settings changed here between calls hold in the next call, and leave nothing behind."""

from types import SimpleNamespace

import torch
from torch import nn

from bigload.parallel.workers.call_settings import CallSettings, apply_settings, current_settings


def with_config(**values):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**values)
    return model


def test_autocast_goes_along_and_ends_with_the_call():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = current_settings(nn.Linear(1, 1))
    assert settings == CallSettings(autocast={"cpu": torch.bfloat16})
    assert current_settings(nn.Linear(1, 1)) == CallSettings()
    model = nn.Linear(2, 2)
    with apply_settings(settings, model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_values_of_the_config_that_a_forward_reads_go_along():
    theirs = with_config(use_cache=True, vocab_size=7)
    with apply_settings(current_settings(with_config(use_cache=False, vocab_size=9)), theirs):
        assert vars(theirs.config) == {"use_cache": False, "vocab_size": 7}
    with apply_settings(current_settings(with_config(use_cache=True)), theirs):
        assert theirs.config.use_cache is True


def test_settings_for_generation_are_those_of_the_call_whatever_the_last_one_made_of_them():
    here, there = with_config(), with_config()
    here.generation_config = SimpleNamespace(max_length=20)
    with apply_settings(current_settings(here), there):
        there.generation_config = SimpleNamespace(max_length=3)  # and fails before it is set back
    with apply_settings(current_settings(here), there):
        assert there.generation_config.max_length == 20
