"""Tensors that are compared with a manifest while they are loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.errors import DamagedOutputError, ManifestNotFoundError, OptionError
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES
from bigload.loading.scheduling.schedule import schedule_reads
from bigload.loading.selection import select

LARGE = 3 * BLOCK_BYTES + 12  # bytes: of several reads


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digests") / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "large": torch.randint(0, 255, (LARGE,), dtype=torch.uint8, generator=generator),
        "a.weight": torch.randn(64, 48, generator=generator).bfloat16(),
        "b.weight": torch.randn(48, 64, generator=generator),
        "none": torch.empty(0, 3),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bigload.write_manifest(folder)
    return folder, tensors


@pytest.fixture
def damaged(made):
    """Give what flips a byte of a tensor, which is mended at the end."""
    folder, _ = made
    path, flipped = folder / "model.safetensors", []

    def flip(name, position):
        at = bigload.open_checkpoint(folder).tensors[name].span.start + position
        flipped.append(at)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))

    yield flip
    for at in flipped:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


WAYS = [
    {},
    {"threads": 1},
    {"threads": 5, "max_inflight": "8MiB"},
    {"method": "mmap"},
    {"method": "mmap", "populate": False},
    {"dtype": "float32"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.sample(2)
def test_what_is_right_is_loaded_as_without(made, way):
    folder, _ = made
    plain, checked = bigload.load(folder, **way), bigload.load(folder, verify=True, **way)
    assert list(plain) == list(checked)
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


@pytest.mark.parametrize(
    ("name", "position", "way"),
    [
        *(("large", LARGE - 1, way) for way in WAYS),
        *((name, position, {}) for name, position in (("large", 0), ("a.weight", 77), ("b.weight", -1))),
    ],
)
@pytest.mark.sample(3)
def test_one_wrong_bit_is_an_error_that_names_file_and_tensor(made, damaged, way, name, position):
    folder, tensors = made
    damaged(name, position if position >= 0 else tensors[name].nbytes - 1)
    with pytest.raises(DamagedOutputError, match=rf"tensor '{name}' in model\.safetensors"):
        bigload.load(folder, verify=True, **way)
    bigload.load(folder, **way)


def test_only_what_is_loaded_is_compared(made, damaged):
    folder, tensors = made
    damaged("large", 3)
    loaded = bigload.load(folder, only=["a.weight", "none"], verify=True)
    assert torch.equal(loaded["a.weight"], tensors["a.weight"])


def test_a_module_is_left_as_it_was(made, damaged):
    folder, _ = made
    model = nn.ModuleDict({"a": nn.Linear(48, 64, bias=False), "b": nn.Linear(64, 48, bias=False)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    damaged("b.weight", 9)
    with pytest.raises(DamagedOutputError):
        bigload.load(folder, into=model, only=["a.weight", "b.weight"], verify=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_of_tensors_have_no_digest(made):
    folder, _ = made
    with pytest.raises(OptionError, match=r"only parts are read, such as b\.weight"):
        bigload.load(folder, slices={"b.weight": bigload.Slice(0, 2, 9)}, verify=True)


def test_without_a_manifest_the_error_says_what_makes_one(made, tmp_path):
    _, tensors = made
    save_file({"w": tensors["a.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ManifestNotFoundError) as caught:
        bigload.load(tmp_path, verify=True)
    assert f"bigload manifest {tmp_path}" in caught.value.hint
    bigload.write_manifest(tmp_path, tmp_path / "elsewhere.json")
    assert bigload.load(tmp_path, verify=tmp_path / "elsewhere.json").keys() == {"w"}


def test_a_manifest_without_digests_of_tensors_is_not_enough(tmp_path):
    (tmp_path / "source").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "source" / "model.safetensors")
    bigload.fetch(tmp_path / "source", tmp_path / "copy")
    with pytest.raises(ManifestNotFoundError, match="no digest of 1 tensor, such as w"):
        bigload.load(tmp_path / "copy", verify=True)
    bigload.write_manifest(tmp_path / "copy")
    bigload.load(tmp_path / "copy", verify=True)


def test_a_changed_header_is_found_although_no_tensor_changed(tmp_path):
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    bigload.write_manifest(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"F32", b"I32"))
    with pytest.raises(DamagedOutputError, match="header is not what the manifest says"):
        bigload.load(tmp_path, verify=True)


def test_a_folder_of_one_device_is_compared_with_the_manifest_above(made, tmp_path):
    folder, tensors = made
    bigload.reshard(bigload.plan(folder, {"cpu": "1GiB"}), tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST_FILE).exists()
    (device,) = {path.parent for path in (tmp_path / "out").glob("*/*.safetensors")}
    assert not (device / MANIFEST_FILE).exists()
    assert torch.equal(bigload.load(device, verify=True)["a.weight"], tensors["a.weight"])
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    for record in manifest["files"].values():
        record["tensors"] = dict.fromkeys(record["tensors"], "0" * 32)
    (tmp_path / "out" / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(DamagedOutputError):
        bigload.load(device, verify=True)


def test_torch_files_are_compared_too(tmp_path):
    weight = torch.randn(8, 8)
    torch.save({"w": weight, "tied": weight, "t": torch.randn(5, 6).t()}, tmp_path / "pytorch_model.bin")
    bigload.write_manifest(tmp_path)
    assert torch.equal(bigload.load(tmp_path, verify=True)["tied"], weight)
    content = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    content[bigload.open_checkpoint(tmp_path).tensors["w"].span.start] ^= 1
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(DamagedOutputError):
        bigload.load(tmp_path, verify=True)


def test_a_read_is_of_whole_tensors_or_of_a_part_of_one(made):
    folder, _ = made
    view = CheckpointView.of(bigload.open_checkpoint(folder))
    wanted = select(view, only=None, slices=None, dtype=None, device="cpu").wanted
    schedule = schedule_reads(wanted, ends_with_tensors=True)
    edges = {each.tensor.span.start for each in wanted} | {each.tensor.span.stop for each in wanted}
    assert schedule.num_bytes == schedule_reads(wanted).num_bytes
    for job in schedule.jobs:
        inside = [edge for edge in edges if job.offset < edge < job.offset + job.num_bytes]
        ends = {job.offset, job.offset + job.num_bytes}
        assert not inside or ends <= edges


def test_a_plan_is_dispatched_with_all_of_it_compared_what_stays_on_disk_too(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    bigload.write_manifest(tmp_path)
    plan = bigload.plan(tmp_path, {"cpu": 50_000}, overhead=0)
    with bigload.init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    filled = bigload.load_and_dispatch(empty, plan, verify=True)
    assert set(filled.hf_device_map.values()) == {"cpu", "disk"}
    given = torch.randn(3, 64)
    assert torch.equal(filled(given), model(given))
    for name in model.state_dict():
        content = (tmp_path / "model.safetensors").read_bytes()
        changed = bytearray(content)
        changed[bigload.open_checkpoint(tmp_path).tensors[name].span.start + 1] ^= 16
        (tmp_path / "model.safetensors").write_bytes(changed)
        with bigload.init_empty_weights():
            empty = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        with pytest.raises(DamagedOutputError, match=rf"'{name}'"):
            bigload.load_and_dispatch(empty, plan, verify=True)
        (tmp_path / "model.safetensors").write_bytes(content)
