"""Files of torch before 1.6 come through torch itself, as weights only."""

import os

import pytest
import torch

from bigload.checkpoint.index import encode_index
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import InvalidCheckpointError, LegacyPickleError, ReadError
from bigload.loading.tensors.legacy_torch import load_legacy


def save_legacy(path, value):
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


class Call:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_checkpoint_that_only_torch_can_read_is_loaded_from_what_its_error_says(tmp_path):
    weight = torch.randn(3, 2)
    state = {"a": weight, "tied": weight, "t": weight.t(), "step": 3}
    with pytest.raises(LegacyPickleError) as caught:
        open_checkpoint(save_legacy(tmp_path / "pytorch_model.bin", state))
    tensors = load_legacy(caught.value.paths)
    assert list(tensors) == ["a", "tied", "t"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
    assert tensors["a"].data_ptr() == tensors["tied"].data_ptr()


def test_all_shards_of_an_index_are_loaded_also_those_in_todays_form(tmp_path):
    save_legacy(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": torch.ones(2)})
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_bytes(encode_index(weight_map, total_size=20))
    with pytest.raises(LegacyPickleError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.details == ("pytorch_model-00001-of-00002.bin",)
    assert load_legacy(caught.value.paths).keys() == {"a", "b"}


def test_a_tensor_in_two_files_is_refused(tmp_path):
    files = [save_legacy(tmp_path / name, {"a": torch.ones(2)}) for name in ("one.bin", "two.bin")]
    with pytest.raises(InvalidCheckpointError, match=r"two\.bin.*'a'"):
        load_legacy(files)


def test_a_pickle_that_calls_the_system_is_refused_and_not_run(tmp_path):
    marker = tmp_path / "marker"
    file = save_legacy(tmp_path / "a.bin", {"w": torch.ones(1), "x": Call(f"touch {marker}")})
    with pytest.raises(InvalidCheckpointError, match=r"a\.bin.*posix\.system") as caught:
        load_legacy([file])
    assert caught.value.problems[0].code == "forbidden-global"
    assert "weights_only=False" not in str(caught.value)
    assert not marker.exists()


def test_every_cut_of_a_file_is_refused_with_its_name(tmp_path):
    whole = save_legacy(tmp_path / "a.bin", {"w": torch.ones(4)}).read_bytes()
    for length in range(0, len(whole), 29):
        (tmp_path / "cut.bin").write_bytes(whole[:length])
        with pytest.raises(InvalidCheckpointError, match=r"cut\.bin"):
            load_legacy([tmp_path / "cut.bin"])


def test_a_file_that_is_gone_is_a_read_error(tmp_path):
    with pytest.raises(ReadError, match=r"gone\.bin"):
        load_legacy([tmp_path / "gone.bin"])


def test_what_holds_no_tensors_by_name_is_refused(tmp_path):
    with pytest.raises(InvalidCheckpointError, match="a list"):
        load_legacy([save_legacy(tmp_path / "a.bin", [torch.ones(1)])])
