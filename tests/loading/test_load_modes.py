"""The same weights in every mode: other dtypes, parts, maps, direct reads, plans, from many threads at once."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import bigload
import make as fixtures
from bigload.checkpoint.byte_source import PositionalReader
from bigload.errors import OptionError, ReadError, StalePlanError, StateDictMismatchError, UnsupportedMethodError
from bigload.loading.scheduling.slices import Slice
from bigload.loading.settings import Method
from bigload.machine.threads.activities import Phase
from builders import make_checkpoint, open_descriptors, write_shard

UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random values, in two dtypes."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    fixtures.make(fixtures.load_recipe("tiny-llama"), folder, data="random")
    return folder


@pytest.fixture(scope="module")
def stored(folder):
    return dict(bigload.load(folder, method="read"))


def load(folder, **options):
    try:
        return bigload.load(folder, **options)
    except UnsupportedMethodError as error:
        pytest.skip(str(error))


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.cpu(), expected[name]), name


def mapped_files(folder):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]


methods = pytest.mark.parametrize("method", [Method.READ, Method.DIRECT, Method.MMAP])


@methods
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.sample(3)
def test_every_method_brings_the_same_tensors(folder, stored, method, threads):
    loaded = load(folder, method=method, threads=threads)
    same(loaded, stored)
    assert (loaded.report.method, loaded.report.threads) == (method, threads)
    assert loaded.report.read_bytes == loaded.report.tensor_bytes == bigload.open_checkpoint(folder).total_bytes


@methods
@pytest.mark.parametrize("dtype", ["float32", "bf16", torch.float16, "fp64"])
@pytest.mark.sample(4)
def test_floating_point_tensors_are_cast_on_the_way_as_torch_casts(folder, stored, method, dtype):
    loaded = load(folder, method=method, dtype=dtype, threads=2)
    wanted = getattr(torch, {"bf16": "bfloat16", "fp64": "float64"}.get(dtype, str(dtype).removeprefix("torch.")))
    same(loaded, {name: tensor.to(wanted) for name, tensor in stored.items()})


def test_integers_and_scales_keep_the_dtypes_they_mean_something_in(tmp_path):
    tensors = {
        "a.weight": ("F16", [3]),
        "a.qweight": ("I32", [3]),
        "a.weight_scale": ("F16", [3]),
        "b": ("F8_E4M3", [2]),
    }
    write_shard(tmp_path / "model.safetensors", tensors)
    dtypes = {name: tensor.dtype for name, tensor in bigload.load(tmp_path, dtype="float32").items()}
    expected = (torch.float32, torch.int32, torch.float16, torch.float8_e4m3fn)
    assert dtypes == dict(zip(tensors, expected, strict=True))


@pytest.mark.parametrize("dtype", ["fp8", torch.float8_e5m2, "int8", "F4"])
def test_weights_are_not_cast_to_what_needs_scales(tmp_path, dtype):
    write_shard(tmp_path / "model.safetensors", {"norm.weight": ("F32", [2])})
    with pytest.raises(bigload.OptionError, match="8 bits need scales"):
        bigload.load(tmp_path, dtype=dtype)


def test_a_cast_of_many_blocks_is_right_in_every_element(tmp_path):
    from safetensors.torch import save_file

    values = torch.randn(3, 700_001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "b": values}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(bigload.load(tmp_path, dtype=dtype, threads=2)["b"], values.to(dtype))


@methods
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.sample(3)
def test_rows_and_columns_are_those_of_the_whole_tensor(folder, stored, method, dtype):
    slices = {UP: Slice(0, 3, 7), DOWN: Slice(1, 2, 5), "model.embed_tokens.weight": Slice(1, 0, 1)}
    loaded = load(folder, slices=slices, method=method, dtype=dtype, threads=2)
    expected = {}
    for name, tensor in stored.items():
        part = slices.get(name)
        whole = tensor if part is None else tensor.narrow(part.dim, part.start, part.stop - part.start)
        expected[name] = whole.to(dtype or whole.dtype)
    same(loaded, expected)
    assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_of_rows_only_their_bytes_are_read(folder, stored):
    loaded = bigload.load(folder, only=[UP], slices={UP: Slice(0, 3, 7)})
    assert loaded.report.read_bytes == 4 * stored[UP].shape[1] * stored[UP].element_size()


@pytest.mark.parametrize(
    ("part", "words"),
    [(Slice(2, 0, 1), "dimension 2"), (Slice(0, 0, 10**9), "elements 0 to 1000000000")],
)
def test_a_part_that_the_tensor_lacks_is_refused_with_its_name(folder, part, words):
    with pytest.raises(OptionError, match=words) as raised:
        bigload.load(folder, slices={UP: part})
    assert UP in str(raised.value)


def test_a_slice_of_an_unknown_tensor_is_refused(folder):
    with pytest.raises(KeyError, match="nope"):
        bigload.load(folder, slices={"nope": Slice(0, 0, 1)})


def test_a_module_takes_the_part_that_fits_it(folder, stored):
    module = nn.Module()
    module.model = nn.Module()
    rows = stored["model.norm.weight"].shape[0]
    module.model.norm = nn.RMSNorm(rows - 2, device="meta")
    slices = {"model.norm.weight": Slice(0, 1, rows - 1)}
    bigload.load(folder, into=module, strict=False, slices=slices, dtype=torch.float64)
    assert module.model.norm.weight.dtype == torch.float64
    assert torch.equal(module.model.norm.weight.detach(), stored["model.norm.weight"][1:-1].double())


def test_mapped_tensors_are_pages_of_the_file_until_they_are_written_to(folder, stored):
    before = {file: file.read_bytes() for file in folder.glob("*.safetensors")}
    loaded = bigload.load(folder, method="mmap")
    assert mapped_files(folder)
    for tensor in loaded.values():
        tensor.zero_()
    assert {file: file.read_bytes() for file in before} == before
    loaded.clear()
    del tensor
    assert not mapped_files(folder)
    same(bigload.load(folder, method="mmap", populate=False), stored)


def test_a_lazy_map_reads_nothing(folder):
    seen = []
    report = bigload.load(folder, method="mmap", populate=False, on_progress=seen.append).report
    assert (report.read_bytes, seen) == (0, [])


def test_maps_leave_no_descriptor_open(folder):
    before = open_descriptors()
    loaded = bigload.load(folder, method="mmap")
    assert open_descriptors() == before
    assert loaded


def test_a_device_map_leaves_on_disk_what_it_says_and_a_module_stays_meta_there(folder, stored):
    device_map = {"": "cpu", "model.layers.1": "disk"}
    loaded = bigload.load(folder, device=device_map)
    on_disk = {name for name in stored if name.startswith("model.layers.1.")}
    assert set(loaded.report.left_on_disk) == on_disk
    same(loaded, {name: tensor for name, tensor in stored.items() if name not in on_disk})


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda:x", "unknown device"), ({"model": "cpu"}, "lm_head.weight"), ({"": "tpu"}, "unknown device")],
)
def test_a_device_that_is_none_and_a_tensor_without_one_are_refused(folder, device, words):
    with pytest.raises(OptionError, match=words):
        bigload.load(folder, device=device)


def test_a_plan_says_what_stays_on_disk_and_in_which_dtype(folder, stored):
    total = sum(tensor.nbytes for tensor in stored.values())
    plan = bigload.plan(folder, {"cpu": total, "disk": "1GiB"}, dtype="float32")
    loaded = bigload.load(folder, device=plan)
    left = {name for name in stored if str(plan.device_of(name)) == "disk"}
    assert left
    assert set(loaded.report.left_on_disk) == left
    same(loaded, {name: tensor.float() for name, tensor in stored.items() if name not in left})


def test_a_plan_for_another_version_of_the_checkpoint_is_refused(tmp_path):
    plan = bigload.plan(make_checkpoint(tmp_path / "tiny", blocks=4), {"cpu": "1GiB"})
    with pytest.raises(StalePlanError):
        bigload.load(make_checkpoint(tmp_path / "other", blocks=5), device=plan)


def test_a_module_is_filled_but_for_what_a_plan_keeps_on_disk(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny", blocks=1)
    module = nn.Module()
    module.lm_head = nn.Linear(8, 32, bias=False, device="meta")
    module.model = nn.Module()
    module.model.norm = nn.RMSNorm(8, device="meta")
    device_map = {"": "disk", "lm_head": "cpu"}
    with pytest.raises(StateDictMismatchError):
        bigload.load(folder, into=module, device=device_map)
    loaded = bigload.load(folder, into=module, device=device_map, strict=False)
    assert loaded.keys() == {"lm_head.weight"}
    assert not module.lm_head.weight.is_meta
    assert module.model.norm.weight.is_meta


def test_what_a_plan_leaves_out_is_neither_read_nor_expected_of_a_module(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"norm.weight": ("F32", [8]), "mtp.layers.0.weight": ("F32", [8])})
    plan = bigload.plan(tmp_path, {"cpu": "1GiB"})
    assert plan.left_out == ("mtp",)
    module = nn.Module()
    module.norm = nn.RMSNorm(8, device="meta")
    loaded = bigload.load(tmp_path, into=module, device=plan)
    assert loaded.keys() == {"norm.weight"}
    assert loaded.report.left_on_disk == ()
    assert not module.norm.weight.is_meta


def test_a_file_that_changes_while_it_is_read_is_told_and_the_module_untouched(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny", shards=2)
    checkpoint = bigload.open_checkpoint(folder)
    shard = folder / checkpoint.tensors["lm_head.weight"].span.file

    class Overwritten(PositionalReader):
        def read_into(self, buffers, offset):
            super().read_into(buffers, offset)
            with shard.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xff")

    module = nn.Module()
    module.lm_head = nn.Linear(8, 32, bias=False, device="meta")
    with pytest.raises(ReadError, match="it changed while it was being loaded"):
        bigload.load(checkpoint, into=module, strict=False, open_source=Overwritten)
    assert module.lm_head.weight.is_meta


def test_loads_from_many_threads_at_once_do_not_disturb_each_other(folder, stored):
    found, errors = [], []

    def one(options):
        try:
            found.append(bigload.load(folder, **options))
        except Exception as error:
            errors.append(error)

    wishes = [{"threads": 2}, {"method": "mmap"}, {"dtype": "float32"}, {"threads": 1}, {"only": [UP]}] * 3
    callers = [threading.Thread(target=one, args=(wish,)) for wish in wishes]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert errors == []
    assert len(found) == len(wishes)
    for loaded in found:
        for name, tensor in loaded.items():
            assert torch.equal(tensor, stored[name].to(tensor.dtype))


def test_a_small_bound_on_bytes_in_flight_loads_the_same(folder, stored):
    loaded = bigload.load(folder, max_inflight="1MiB", threads=7)
    same(loaded, stored)
    assert loaded.report.max_inflight_bytes == 2**20


def test_small_loads_are_serial_unless_told(folder):
    assert bigload.load(folder).report.threads == 1
    assert bigload.load(folder, threads=3).report.threads == 3


def test_the_variables_of_transformers_are_honoured(folder, monkeypatch):
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "true")
    assert bigload.load(folder).report.threads == 8
    monkeypatch.setenv("HF_PARALLEL_LOADING_WORKERS", "3")
    assert bigload.load(folder).report.threads == 3
    monkeypatch.setenv("HF_ENABLE_PARALLEL_LOADING", "false")
    assert bigload.load(folder).report.threads == 1


def test_the_report_says_how_and_why(folder):
    report = bigload.load(folder, trace=True, dtype="float32").report
    assert report.method is Method.READ
    assert report.reason
    assert report.seconds > 0
    assert {Phase.READ, Phase.CAST, Phase.ASSIGN} <= report.phase_seconds.keys()
    assert bigload.load(folder).report.phase_seconds == {}


@pytest.mark.parametrize("dtype", ["int32", torch.bool, "complex64", "F4", "F6_E2M3"])
def test_weights_are_cast_only_to_what_holds_weights(folder, dtype):
    with pytest.raises(OptionError, match="floating-point"):
        bigload.load(folder, dtype=dtype)


def test_a_slice_of_another_kind_is_refused_with_its_tensor(folder):
    with pytest.raises(OptionError, match=rf"slices\['{UP}'\].*Slice\(dim, start, stop\)"):
        bigload.load(folder, slices={UP: slice(0, 2)})


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_the_cpu_by_its_number_is_the_cpu(folder, stored, device):
    same(bigload.load(folder, device=device), stored)


def test_a_device_that_holds_no_bytes_is_refused(folder):
    with pytest.raises(OptionError, match="meta"):
        bigload.load(folder, device=torch.device("meta"))
