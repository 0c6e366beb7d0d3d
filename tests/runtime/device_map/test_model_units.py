import torch
from torch import nn

from bigload.planning.model.units import UnitKind
from bigload.runtime.device_map.model_units import units_of_model


def holding(num_bytes, dtype=torch.int8):
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(num_bytes, dtype=dtype, device="meta"), requires_grad=False)
    return module


class Layer(nn.Module):
    """A block of attention and two plain layers: 4 + 6 bytes."""

    def __init__(self):
        super().__init__()
        self.attention = holding(4)
        self.mlp = nn.Sequential(holding(4), nn.ReLU(), holding(2))


class Model(nn.Module):
    """Registers the head before the blocks, and owns a parameter and an unsaved buffer itself."""

    def __init__(self, count=2):
        super().__init__()
        self.embed = holding(8)
        self.head = holding(8)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.dropout = nn.Dropout()
        self.token = nn.Parameter(torch.empty(3, dtype=torch.int8, device="meta"), requires_grad=False)
        self.register_buffer("cache", torch.empty(5, dtype=torch.int8, device="meta"), persistent=False)


def names(units):
    return [[part.name for part in unit.parts] for unit in units]


def kinds(units):
    return {part.name: part.kind for unit in units for part in unit.parts}


def test_blocks_are_found_by_name_and_units_come_as_registered():
    units = units_of_model(Model())
    assert names(units) == [["token"], ["cache"], ["embed"], ["head"], ["layers.0"], ["layers.1"]]
    assert [unit.num_bytes for unit in units] == [3, 5, 8, 8, 10, 10]
    assert kinds(units)["layers.0"] is UnitKind.BLOCK
    assert kinds(units)["cache"] is UnitKind.PARAMETER


def test_classes_that_the_model_names_are_blocks_beside_those_found_by_name():
    model = nn.ModuleDict({"text": Model(), "tower": nn.ModuleDict({"stem": nn.Sequential(holding(1), holding(1))})})
    model._no_split_modules = ["Sequential"]
    blocks = {name for name, kind in kinds(units_of_model(model)).items() if kind is UnitKind.BLOCK}
    assert blocks == {"text.layers.0.mlp", "text.layers.1.mlp", "tower.stem"}
    model._no_split_modules = {"ModuleDict"}
    blocks = {name for name, kind in kinds(units_of_model(model)).items() if kind is UnitKind.BLOCK}
    assert blocks == {"text.layers.0", "text.layers.1", "tower"}


def test_classes_that_the_caller_names_are_the_only_blocks():
    units = units_of_model(Model(1), ["Sequential"])
    assert names(units) == [["token"], ["cache"], ["embed"], ["head"], ["layers.0.attention"], ["layers.0.mlp"]]
    leaves = ["layers.0.attention", "layers.0.mlp.0", "layers.0.mlp.2"]
    assert [unit.name for unit in units_of_model(Model(1), [])][-3:] == leaves


def test_a_model_without_blocks_is_cut_at_its_layers():
    model = nn.ModuleDict({"inner": nn.ModuleDict({"a": holding(1), "b": holding(2)})})
    assert names(units_of_model(model)) == [["inner.a"], ["inner.b"]]


def test_modules_with_tied_parameters_are_one_unit_and_weigh_once():
    model = Model()
    model.head.weight = model.embed.weight
    model.layers[1].attention.weight = model.layers[0].attention.weight
    units = units_of_model(model)
    assert names(units)[2:] == [["embed", "head"], ["layers.0", "layers.1"]]
    assert [unit.num_bytes for unit in units][2:] == [8, 16]


def test_ties_of_ties_are_one_unit():
    model = nn.Sequential(holding(1), holding(1), nn.ModuleDict({"a": holding(1), "b": holding(1)}))
    model[2]["a"].weight, model[2]["b"].weight = model[1].weight, model[0].weight
    assert names(units_of_model(model, ["ModuleDict"])) == [["0", "1", "2"]]


def test_a_tied_root_parameter_joins_its_partner():
    model = Model()
    model.register_parameter("alias", model.layers[1].attention.weight)
    assert ["alias", "layers.1"] in names(units_of_model(model))


def test_sizes_are_those_at_load_dtype_in_whole_bytes():
    model = nn.Sequential(holding(3, torch.float32), holding(3, torch.bool))
    assert [unit.num_bytes for unit in units_of_model(model, dtype="float16")] == [6, 1]


def test_dtypes_that_no_file_has_are_fine():
    model = nn.Sequential(holding(3, torch.complex128))
    assert [unit.num_bytes for unit in units_of_model(model)] == [48]


def test_a_model_without_tensors_has_no_units():
    assert units_of_model(nn.Sequential(nn.ReLU())) == ()
