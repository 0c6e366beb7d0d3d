"""Archives of `torch.save` are read without torch; torch itself gives the expected values."""

import collections
import io
import os
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.byte_source import SourceIdentity, scheme_of
from bigload.checkpoint.records.fingerprint import changes, current_fingerprint, fingerprint, of_shard
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import CheckpointError, InvalidCheckpointError, LegacyPickleError
from bigload.loading.tensors.views import torch_dtype, torch_shape

FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.6 has none
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(dtype for dtype in (getattr(torch, "float8_e8m0fnu", None), FLOAT4) if dtype is not None),
]


def saved(path: Path, value: object, **options) -> Path:
    torch.save(value, path, **options)
    return path


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    content = bytes(byte & 1 for byte in os.urandom(num_bytes)) if dtype == torch.bool else os.urandom(num_bytes)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, made of nothing but its spans, dtypes, shapes and strides."""
    checkpoint = open_checkpoint(path)
    tensors = {}
    for name, info in checkpoint.tensors.items():
        with (checkpoint.root / info.span.file).open("rb") as file:
            file.seek(info.span.start)
            content = bytearray(file.read(info.span.num_bytes))
        dtype = torch_dtype(info.dtype)
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        shape = torch_shape(info.dtype, info.shape)
        tensors[name] = flat.view(shape) if info.strides is None else flat.as_strided(shape, info.strides)
    return tensors


def raw(tensor: torch.Tensor) -> tuple[object, ...]:
    plain = tensor.contiguous()
    return plain.dtype, plain.shape, bytes(plain.flatten().view(torch.uint8).numpy()) if plain.numel() else b""


def problems(path: Path) -> dict[str, str]:
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path)
    return {problem.code: problem.text for problem in caught.value.problems}


@st.composite
def state_dicts(draw) -> dict[str, torch.Tensor]:
    """Tensors and views of tensors: transposed, cut out, expanded, the same one twice."""
    state = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        tensor = random_tensor(dtype, draw(st.lists(st.integers(0, 4), max_size=3)))
        state[f"own.{number}"] = tensor
        for kind in draw(st.sets(st.sampled_from(["same", "t", "cut", "expand", "flat"]))):
            if tensor.ndim == 0 or (dtype == FLOAT4 and kind != "same"):
                continue
            state[f"{kind}.{number}"] = {
                "same": lambda tensor=tensor: tensor,
                "t": lambda tensor=tensor: tensor.transpose(0, -1),
                "cut": lambda tensor=tensor: tensor[1:],
                "expand": lambda tensor=tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
                "flat": lambda tensor=tensor: torch.nn.Parameter(tensor, requires_grad=False),
            }[kind]()
    if not all(tensor.ndim for tensor in state.values() if tensor.dtype == FLOAT4):
        return {}
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torch")


@given(state=state_dicts(), protocol=st.sampled_from([2, 2, 3, 4, 5]))
def test_every_tensor_has_the_bytes_that_torch_gives_it(folder, state, protocol):
    path = saved(folder / "a.bin", state, pickle_protocol=protocol)
    expected = torch.load(path, weights_only=True) if protocol == 2 else state
    found = read(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name
    assert open_checkpoint(path).total_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_a_module_is_read_with_the_attributes_that_its_state_dict_has(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    path = saved(tmp_path / "a.pt", module.state_dict())
    assert {name: raw(tensor) for name, tensor in read(path).items()} == {
        name: raw(tensor) for name, tensor in module.state_dict().items()
    }


def test_tensors_that_share_a_storage_share_a_span(tmp_path):
    weight = torch.ones(4, 2)
    tensors = open_checkpoint(saved(tmp_path / "a.bin", {"a": weight, "b": weight, "c": weight[1]})).tensors
    assert tensors["a"].span == tensors["b"].span
    assert tensors["a"].span.start < tensors["c"].span.start < tensors["c"].span.stop < tensors["a"].span.stop


def test_strides_are_given_for_what_is_not_stored_row_by_row_only(tmp_path):
    weight = torch.ones(4, 6)
    state = {"plain": weight, "t": weight.t(), "rows": weight[1:3], "columns": weight[:, :2], "one": weight[:, :1].t()}
    tensors = open_checkpoint(saved(tmp_path / "a.bin", state)).tensors
    strides = {name: info.strides for name, info in tensors.items()}
    assert strides == {"plain": None, "t": (1, 6), "rows": None, "columns": (6, 1), "one": (1, 6)}
    assert tensors["columns"].num_bytes == 4 * 2 * 4
    assert tensors["columns"].span.num_bytes == (3 * 6 + 2) * 4


def test_a_size_of_1_has_any_stride(tmp_path):
    state = {"a": torch.ones(2, 1, 3).as_strided((2, 1, 3), (3, 77, 1))}
    assert open_checkpoint(saved(tmp_path / "a.bin", state)).tensors["a"].strides is None


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module"])
def test_a_training_checkpoint_is_read_below_its_key_and_says_what_it_leaves_out(tmp_path, key):
    optimizer = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]}
    value = {"epoch": 3, key: {"w": torch.ones(2)}, "optimizer": optimizer, "loss": [0.5, None, "x"]}
    checkpoint = open_checkpoint(saved(tmp_path / "a.pt", value))
    assert list(checkpoint.tensors) == ["w"]
    (warning,) = checkpoint.warnings
    assert warning.code == "not-weights"
    assert "'epoch', 'optimizer', 'loss'" in warning.text


def test_values_beside_tensors_are_left_out_with_a_word(tmp_path):
    checkpoint = open_checkpoint(saved(tmp_path / "a.pt", {"w": torch.ones(2), "step": 7, "size": torch.Size([2])}))
    assert list(checkpoint.tensors) == ["w"]
    assert "'step', 'size'" in checkpoint.warnings[0].text


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ({"net": {"w": torch.ones(1)}}, "ambiguous-state-dict", "'net'"),
        ({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "ambiguous-state-dict", "'model', 'ema'"),
        ({"w": torch.ones(1), "deep": {"b": [torch.ones(1)]}}, "ambiguous-state-dict", "'deep'"),
        ({"epoch": 3}, "no-state-dict", "'epoch'"),
        ({3: torch.ones(1)}, "no-state-dict", "key 3"),
        ([torch.ones(1)], "no-state-dict", "a list"),
        (torch.ones(1), "no-state-dict", "one tensor"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_its_keys(tmp_path, value, code, words):
    found = problems(saved(tmp_path / "a.pt", value))
    assert list(found) == [code]
    assert words in found[code]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "unsupported-tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "unsupported-tensor"),
        (lambda: torch.ones(2, 2).to_sparse(), "unsupported-tensor"),
        (lambda: torch.ones(2, device="meta"), "unsupported-tensor"),
        (lambda: torch.ones(2, dtype=torch.complex128), "unknown-dtype"),
        (lambda: torch.ones(2, dtype=torch.complex32), "unknown-dtype"),
    ],
)
def test_a_tensor_that_safetensors_could_not_hold_is_named(tmp_path, make, code):
    found = problems(saved(tmp_path / "a.bin", {"fine": torch.ones(1), "odd.weight": make()}))
    assert list(found) == [code]
    assert "'odd.weight'" in found[code]


def test_a_tensor_subclass_is_refused(tmp_path):
    class Mine(torch.Tensor):
        pass

    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    found = problems(saved(tmp_path / "a.bin", {"w": torch.ones(2).as_subclass(Mine)}))
    assert "test_torch_archive.Mine" in found["forbidden-global"]


def test_a_file_of_old_torch_says_how_it_is_loaded(tmp_path):
    path = saved(tmp_path / "a.bin", {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(LegacyPickleError) as caught:
        open_checkpoint(path)
    assert caught.value.paths == (path,)
    assert "weights_only" in str(caught.value)
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_program_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "a.pt")
    assert "TorchScript" in problems(tmp_path / "a.pt")["torchscript"]


def reading(path):
    return lambda start, stop: path.read_bytes()[start:stop]


def test_saving_other_weights_of_the_same_form_changes_the_fingerprint(tmp_path):
    path = saved(tmp_path / "a.bin", {"w": torch.ones(1000)})
    before, size = open_checkpoint(path), path.stat().st_size
    saved(path, {"w": torch.ones(1000) * 2})
    assert path.stat().st_size == size
    assert changes(fingerprint(before), fingerprint(open_checkpoint(path)))
    identity = SourceIdentity(num_bytes=size, version=())
    assert current_fingerprint(before.shards[0], identity, reading(path)) != of_shard(before.shards[0])


def test_the_current_fingerprint_of_an_untouched_file_is_its_fingerprint(tmp_path):
    path = saved(tmp_path / "a.bin", {"w": torch.ones(10)})
    (shard,) = open_checkpoint(path).shards
    assert current_fingerprint(shard, scheme_of(path).identity(path), reading(path)) == of_shard(shard)


def test_every_cut_of_a_download_is_refused(tmp_path):
    whole = saved(tmp_path / "a.bin", {"w": torch.ones(30), "b": torch.ones(2)}).read_bytes()
    cut = tmp_path / "cut.bin"
    for length in range(0, len(whole), 23):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidCheckpointError) as caught:
            open_checkpoint(cut)
        assert length < 4 or "download" in str(caught.value)


def test_big_endian_numbers_are_refused(tmp_path):
    path = saved(tmp_path / "a.bin", {"w": torch.ones(2)})
    other = tmp_path / "b.bin"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    assert "big" in problems(other)["byte-order"]


def test_an_archive_that_was_packed_again_without_compression_is_read(tmp_path):
    state = {"w": torch.arange(6.0), "b": torch.ones(2)}
    other = tmp_path / "b.bin"
    with zipfile.ZipFile(saved(tmp_path / "a.bin", state)) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as record:
                record.write(old.read(name))
    assert {name: raw(tensor) for name, tensor in read(other).items()} == {n: raw(t) for n, t in state.items()}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "file-empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs-pointer"),
        (b"<html>not found</html>", "not-a-torch-file"),
        (b"\0" * 257 + b"ustar" + b"\0" * 250, "not-a-torch-file"),
    ],
)
def test_another_kind_of_file_is_called_by_its_kind(tmp_path, content, code):
    (tmp_path / "a.bin").write_bytes(content)
    assert list(problems(tmp_path / "a.bin")) == [code]


def test_a_zip_archive_of_something_else_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("weights/w.npy", b"123")
    assert list(problems(tmp_path / "a.pt")) == ["not-a-torch-file"]


def test_a_damaged_pickle_is_told_from_a_broken_one(tmp_path):
    path = saved(tmp_path / "a.bin", collections.OrderedDict(w=torch.ones(2)))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"FloatStorage", b"LongStorage\n", 1))
    assert "checksum" in problems(path)["bad-checksum"]


def test_a_file_in_memory_has_a_folder_of_its_own_name_too(tmp_path):
    buffer = io.BytesIO()  # torch calls the folder in the archive "archive" then
    torch.save({"w": torch.ones(3)}, buffer)
    (tmp_path / "a.bin").write_bytes(buffer.getvalue())
    assert list(open_checkpoint(tmp_path / "a.bin").tensors) == ["w"]
