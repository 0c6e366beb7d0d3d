"""Checkpoints that torch wrote load as torch loads them, in every mode."""

import pytest
import torch

import bigload
from bigload.errors import InvalidCheckpointError, OptionError
from bigload.loading.scheduling.slices import Slice


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(40, 6, generator=generator)
    return {
        "embed.weight": embed,
        "head.weight": embed,  # tied: one storage
        "flat": embed.view(-1),  # the same bytes in another shape
        "row": embed[3],
        "turned": torch.randn(5, 7, generator=generator).to(torch.bfloat16).t(),
        "columns": torch.randn(8, 9, generator=generator)[:, 2:5],
        "spread": torch.arange(3.0).expand(4, 3),
        "count": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "half": torch.randn(3, 700, generator=generator).half(),
    }


def saved(folder, tensors, **options):
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return folder


def same(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("method", ["read", "mmap"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_tensor_is_what_torch_saved(tmp_path, tensors, method, dtype, threads):
    loaded = bigload.load(saved(tmp_path / "old", tensors), method=method, dtype=dtype, threads=threads)
    same(loaded, {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors.items()})


def test_tied_weights_are_read_once_and_share_memory(tmp_path, tensors):
    loaded = bigload.load(saved(tmp_path / "old", tensors), only=["embed.weight", "head.weight", "flat"])
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 1
    assert loaded.report.read_bytes == tensors["embed.weight"].nbytes


def test_a_part_of_a_tensor_is_read_and_one_of_a_view_refused(tmp_path, tensors):
    folder = saved(tmp_path / "old", tensors)
    loaded = bigload.load(folder, only=["half"], slices={"half": Slice(1, 5, 9)})
    assert torch.equal(loaded["half"], tensors["half"][:, 5:9])
    with pytest.raises(OptionError, match=r"slices\['turned'\].*strides \[1, 7\]"):
        bigload.load(folder, slices={"turned": Slice(0, 0, 1)})


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_module_is_filled_from_either_form(tmp_path, tensors, zipped):
    folder = saved(tmp_path / "old", {"weight": tensors["half"]}, _use_new_zipfile_serialization=zipped)
    module = torch.nn.Linear(700, 3, bias=False, device="meta")
    bigload.load(folder, into=module)
    assert torch.equal(module.weight.detach(), tensors["half"])


def test_the_old_form_goes_through_torch_and_takes_every_wish(tmp_path, tensors):
    folder = saved(tmp_path / "old", tensors, _use_new_zipfile_serialization=False)
    same(bigload.load(folder), tensors)
    loaded = bigload.load(folder, only=["half", "embed.weight"], slices={"half": Slice(1, 5, 9)}, dtype="float32")
    same(loaded, {"half": tensors["half"][:, 5:9].float(), "embed.weight": tensors["embed.weight"]})
    assert loaded.report.reason == "torch reads files of this old form itself, as a whole"
    with pytest.raises(KeyError, match="nope"):
        bigload.load(folder, only=["nope"])
    assert bigload.load(folder, device={"": "cpu", "half": "disk"}).report.left_on_disk == ("half",)


def test_the_old_form_without_memory_for_it_is_refused_before_torch_sees_it(tmp_path, tensors, monkeypatch):
    from bigload.loading import checks as guards

    folder = saved(tmp_path / "old", tensors, _use_new_zipfile_serialization=False)
    monkeypatch.setattr(guards, "available_memory", lambda: 100)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was asked to load"))
    with pytest.raises(MemoryError, match="old does not fit into memory"):
        bigload.load(folder)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_pickle_that_runs_something_runs_nothing(tmp_path, zipped):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            import os

            return os.system, (f"touch {marker}",)

    folder = saved(tmp_path / "old", {"a": torch.ones(2), "b": Evil()}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InvalidCheckpointError, match="system"):
        bigload.load(folder)
    assert not marker.exists()
