import logging

import pytest
import torch
from torch import nn

import bigload


def layers(count):
    with torch.device("meta"):
        return nn.ModuleDict({f"l{index}": nn.Linear(2, 2) for index in range(count)})


def test_groups_are_sorted_and_in_the_order_of_the_model():
    model = layers(5)
    model["l4"].weight = model["l1"].weight
    model["l3"].weight = model["l1"].weight
    model["l2"].bias = model["l0"].bias
    assert bigload.find_tied_parameters(model) == [["l0.bias", "l2.bias"], ["l1.weight", "l3.weight", "l4.weight"]]


def test_a_shared_module_ties_all_its_parameters():
    layer = nn.Linear(2, 2)
    assert bigload.find_tied_parameters(nn.Sequential(layer, layer)) == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


def test_equal_tensors_that_are_not_one_are_not_tied():
    assert bigload.find_tied_parameters(layers(3)) == []


class Config:
    def __init__(self, **said):
        self.__dict__.update(said)


class PreTrainedModel(nn.Module):
    """Stands for the class that models of transformers derive from; it is told by its name."""

    def __init__(self, head=None, **config):
        super().__init__()
        self.config, self.head = Config(**config), head

    def get_output_embeddings(self):
        return self.head


class TiesItself(nn.Module):
    def _tie_weights(self):
        """Tie something."""


def test_a_config_that_asks_for_a_tied_head():
    assert bigload.check_tied_parameters_in_config(PreTrainedModel(nn.Linear(2, 2), tie_word_embeddings=True))
    assert not bigload.check_tied_parameters_in_config(PreTrainedModel(nn.Linear(2, 2), tie_word_embeddings=False))
    assert not bigload.check_tied_parameters_in_config(PreTrainedModel(None, tie_word_embeddings=True))


def test_the_config_of_the_text_decoder_is_the_one_that_counts():
    text = Config(tie_word_embeddings=True)
    model = PreTrainedModel(nn.Linear(2, 2), get_text_config=lambda decoder: text if decoder else None)
    assert bigload.check_tied_parameters_in_config(model)


def test_tied_stacks_and_modules_that_tie_count_too():
    assert bigload.check_tied_parameters_in_config(PreTrainedModel(is_encoder_decoder=True, tie_encoder_decoder=True))
    assert bigload.check_tied_parameters_in_config(PreTrainedModel(TiesItself()))


def test_models_of_others_say_nothing_of_ties():
    assert not bigload.check_tied_parameters_in_config(TiesItself())
    assert not bigload.check_tied_parameters_in_config(PreTrainedModel())


def test_a_group_on_two_devices_is_warned_of_and_one_on_one_device_is_not(caplog):
    with caplog.at_level(logging.WARNING):
        bigload.check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": 0})
    assert not caplog.records
    bigload.check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": "cpu"})
    assert "on different devices: {'a.w': 0, 'b.w': 'cpu'}" in caplog.text


def test_the_innermost_module_in_the_map_has_the_say(caplog):
    bigload.check_tied_parameters_on_same_device([["a.w", "b.x.w"]], {"": 0, "b": 1, "b.x": 0})
    assert not caplog.records


def test_a_tied_parameter_without_a_device_is_an_error():
    with pytest.raises(ValueError, match=r"no device for b\.w"):
        bigload.check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0})


def test_a_module_with_its_ties_weighs_the_holders_without_the_shared_parts():
    modules = [(f"{index}", nn.Identity()) for index in range(1, 12)]
    sizes = {f"{index}": 5 for index in range(12)} | {f"{index}.weight": 4 for index in range(12)}
    total, names, found = bigload.get_module_size_with_ties(["10.weight", "1.weight"], 5, sizes, modules)
    assert (total, names) == (7, ["10", "1"])
    assert found == [modules[9][1], modules[0][1]]


def test_a_tied_parameter_that_is_itself_listed_is_its_own_holder():
    weight = nn.Parameter(torch.empty(2))
    assert bigload.get_module_size_with_ties(["w"], 5, {"w": 8}, [("w", weight)])[:2] == (5, ["w"])


def test_a_tied_parameter_that_lies_nowhere_adds_nothing():
    assert bigload.get_module_size_with_ties(["gone.w"], 5, {}, []) == (5, [], [])
