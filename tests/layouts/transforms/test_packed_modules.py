"""Weights of GPTQ, AWQ and MXFP4 come out as the definitions of their formats say, in every layout."""

import json

import pytest

import bigload
from bigload.conversion import computed_tensor
from bigload.dtypes import DTYPES
from bigload.errors import BigloadError, CheckpointError, InvalidCheckpointError, ReadError
from bigload.layouts.transforms import packed_modules
from bigload.layouts.transforms.dequantize import Dequantize
from bigload.layouts.writing import windows, writer
from bigload.loading.staging import row_computer
from bigload.units import KIB

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _saved(folder, tensors, quantization):
    folder.mkdir()
    safe.save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _undone(source, out, dtype="BF16", **options):
    bigload.reshard(source, out, transforms=[Dequantize(DTYPES[dtype])], **options)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert bigload.verify(out).ok
    return bigload.load(out)


def _drawn(*shape, below, seed=0):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _words(numbers, bits):
    """Pack each column of `numbers` as one integer of Python, lowest first, and cut it into words."""
    columns = []
    for column in numbers.t().tolist():
        stream = sum(number << (bits * index) for index, number in enumerate(column))
        data = stream.to_bytes(len(column) * bits // 8, "little")
        columns.append(torch.frombuffer(bytearray(data), dtype=torch.int32))
    return torch.stack(columns, dim=1).contiguous()


def _gptq(bits, inputs, outputs, group, *, version="gptq", order=None):
    """Return the tensors of a layer and its weight, [outputs, inputs] in float32."""
    numbers = _drawn(inputs, outputs, below=2**bits, seed=bits)
    count = -(-inputs // group)
    zeros = _drawn(count, outputs, below=2**bits, seed=1)
    scales = (torch.rand(count, outputs) + 0.01).half()
    index = torch.arange(inputs) // group if order is None else order
    stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
    tensors = {"a.qweight": _words(numbers, bits), "a.qzeros": _words(stored.t(), bits).t().contiguous()}
    tensors |= {"a.scales": scales, "a.g_idx": index.to(torch.int32), "a.bias": torch.ones(outputs)}
    weight = (numbers - zeros[index]).float() * scales[index].float()
    return tensors, weight.t()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.sample(3)
def test_integers_of_gptq(tmp_path, bits, version):
    tensors, weight = _gptq(bits, 160, 96, 64, version=version)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 64, "checkpoint_format": version}
    found = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out", "F32")
    assert torch.equal(found["a.weight"], weight)
    assert found.keys() == {"a.weight", "a.bias"}


@pytest.mark.parametrize("has_order", [True, False])
def test_inputs_of_gptq_in_any_order(tmp_path, has_order):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3)) // 32 if has_order else None
    tensors, weight = _gptq(4, 128, 64, 32, order=order)
    if not has_order:
        del tensors["a.g_idx"]
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": has_order}
    found = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out", "F32")
    assert torch.equal(found["a.weight"], weight)


@pytest.mark.parametrize("group", [64, -1])
def test_integers_of_awq(tmp_path, group):
    inputs, outputs = 128, 96
    count = inputs // group if group > 0 else 1
    numbers, zeros = _drawn(inputs, outputs, below=16), _drawn(count, outputs, below=16, seed=1)
    scales = (torch.rand(count, outputs) + 0.01).half()

    def packed(matrix):
        return _words(matrix.view(-1, outputs // 8, 8)[:, :, AWQ_ORDER].flatten(1).t(), 4).t().contiguous()

    tensors = {"a.qweight": packed(numbers), "a.qzeros": packed(zeros), "a.scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    found = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out", "F32")
    wide = [each.float().repeat_interleave(inputs // count, 0) for each in (zeros, scales)]
    assert torch.equal(found["a.weight"], ((numbers - wide[0]) * wide[1]).t())
    assert found.keys() == {"a.weight"}


def _mxfp4(experts, outputs, groups):
    """Return the tensors of a layer of experts and its weight, [experts, inputs, outputs] in float32."""
    numbers = _drawn(experts, outputs, groups, 32, below=16)
    scales = _drawn(experts, outputs, groups, below=30, seed=1) + 112
    scales[0, 0, 0] = 0  # 2**-127
    values = torch.tensor(E2M1 + [-each for each in E2M1])[numbers]
    wide = (values * torch.pow(2.0, scales - 127).unsqueeze(-1)).flatten(2)
    blocks = (numbers[..., 0::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    tensors = {"mlp.down_proj_blocks": blocks, "mlp.down_proj_scales": scales.to(torch.uint8)}
    return tensors | {"mlp.down_proj_bias": torch.ones(experts, outputs)}, wide.transpose(1, 2)


@pytest.mark.parametrize("shape", [(1, 3, 1), (5, 40, 3), (3, 2000, 9)])
def test_experts_of_mxfp4_are_transposed(tmp_path, shape):
    tensors, weight = _mxfp4(*shape)
    source = _saved(tmp_path / "in", tensors, {"quant_method": "mxfp4"})
    found = _undone(source, tmp_path / "out")
    assert torch.equal(found["mlp.down_proj"].float(), weight)
    assert found.keys() == {"mlp.down_proj", "mlp.down_proj_bias"}


def test_experts_of_mxfp4_are_those_of_transformers(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors, _ = _mxfp4(4, 64, 6)
    found = _undone(_saved(tmp_path / "in", tensors, {"quant_method": "mxfp4"}), tmp_path / "out")
    theirs = mxfp4.convert_moe_packed_tensors(tensors["mlp.down_proj_blocks"], tensors["mlp.down_proj_scales"])
    assert torch.equal(found["mlp.down_proj"].view(torch.int16), theirs.view(torch.int16))


def test_an_operand_is_read_once_for_all_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "LEAST_CUT_BYTES", 16 * KIB)
    monkeypatch.setattr(writer, "window_bytes", lambda _: 16 * KIB)
    tensors, weight = _gptq(4, 128, 256, 128)  # 4 windows of bfloat16
    reads = []
    read = row_computer.RowComputer._read
    monkeypatch.setattr(
        row_computer.RowComputer,
        "_read",
        lambda self, rows, view: (reads.append(rows.tensor.name), read(self, rows, view))[1],
    )
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    found = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out")
    assert torch.equal(found["a.weight"], weight.bfloat16())
    assert sorted(reads) == ["a.g_idx", "a.qweight", "a.qzeros", "a.scales"]


@pytest.mark.parametrize("recent_bytes", [0, 4000])
def test_operands_that_left_are_read_again(tmp_path, monkeypatch, recent_bytes):
    monkeypatch.setattr(row_computer, "_RECENT_BYTES", recent_bytes)
    tensors, weight = _mxfp4(5, 40, 3)
    found = _undone(_saved(tmp_path / "in", tensors, {"quant_method": "mxfp4"}), tmp_path / "out")
    assert torch.equal(found["mlp.down_proj"].float(), weight)


def test_ranks_get_parts_of_unpacked_weights(tmp_path):
    tensors, weight = _gptq(4, 128, 64, 32)
    tensors = {name.replace("a.", "model.mlp.down_proj."): tensor for name, tensor in tensors.items()}
    source = _saved(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    rules = {"model.mlp.down_proj": "rowwise"}
    bigload.reshard(source, tmp_path / "ranks", tp=2, tp_rules=rules, transforms=[Dequantize()])
    parts = [bigload.load(tmp_path / "ranks" / f"rank-{rank}")["model.mlp.down_proj.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), weight.bfloat16())


def _changed(tensors, **changes):
    found = {**tensors, **{f"a.{name}": tensor for name, tensor in changes.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"scales": None}, {}, r"a.qweight \[16, 64\] has no a.scales"),
        ({"qzeros": None}, {}, r"a.qweight \[16, 64\] has no a.qzeros"),
        ({}, {"group_size": 48}, "has scales for 4 groups, expected 3 of 48 inputs in 128"),
        ({}, {"checkpoint_format": "marlin"}, "is in the format marlin, expected gptq"),
        ({"scales": torch.ones(4, 63)}, {}, "does not go with"),
        ({"g_idx": torch.zeros(5, dtype=torch.int32)}, {}, r"has a.g_idx \[5\]"),
        ({"qweight": torch.zeros(16, 64)}, {}, "is F32, I32 and F16, expected I32, I32"),
        ({"weight": torch.ones(64, 128)}, {}, "a.weight is stored beside a.qweight"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, changes, settings, message):
    tensors = _changed(_gptq(4, 128, 64, 32)[0], **changes)
    source = _saved(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, **settings})
    with pytest.raises(InvalidCheckpointError, match=message):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.down_proj_scales", torch.zeros(2, 40, 2, dtype=torch.uint8), r"has scales \[2, 40, 2\] in U8"),
        ("mlp.down_proj_blocks", torch.zeros(2, 40, 48, dtype=torch.uint8), "is no tensor of blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path, name, tensor, message):
    source = _saved(tmp_path / "in", _mxfp4(2, 40, 3)[0] | {name: tensor}, {"quant_method": "mxfp4"})
    with pytest.raises(InvalidCheckpointError, match=message):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


def test_what_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_modules, "MOST_RECENT_BYTES", 4095)
    source = _saved(tmp_path / "in", _gptq(4, 128, 64, 32)[0], {"quant_method": "gptq", "bits": 4})
    with pytest.raises(InvalidCheckpointError, match=r"takes 4\.0 KiB for one matrix, and 4\.0 KiB are kept"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert computed_tensor.MOST_RECENT_BYTES == 256 * 2**20


@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_scales_that_are_no_numbers_are_found_before_the_first_write(tmp_path, is_mxfp4):
    tensors, _ = _mxfp4(2, 40, 3) if is_mxfp4 else _gptq(4, 128, 64, 32)
    name = "mlp.down_proj_scales" if is_mxfp4 else "a.scales"
    tensors[name].view(-1)[77] = 255 if is_mxfp4 else float("nan")
    source = _saved(tmp_path / "in", tensors, {"quant_method": "mxfp4" if is_mxfp4 else "gptq"})
    with pytest.raises(CheckpointError, match=f"a number in {name} is not finite"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


def test_groups_that_do_not_exist_publish_nothing(tmp_path):
    tensors = _gptq(4, 128, 64, 32)[0] | {"a.g_idx": torch.full((128,), 4, dtype=torch.int32)}
    source = _saved(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(BigloadError, match=r"a.g_idx names groups beyond the 4 of a.scales"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not (tmp_path / "out").exists()


def test_unpacking_that_was_stopped_is_resumed(tmp_path, monkeypatch):
    first, weight = _gptq(4, 1024, 2048, 128)
    tensors = first | {name.replace("a.", "b."): tensor.clone() for name, tensor in first.items()}
    source = _saved(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    options = {"max_shard_bytes": "5MB", "threads": 1, "transforms": [Dequantize()]}
    compute = row_computer.RowComputer.compute

    def stopped(self, tensor, *args, **kwargs):
        if tensor.name == "b.weight":
            raise ReadError(tmp_path / "in", "stopped here")
        return compute(self, tensor, *args, **kwargs)

    monkeypatch.setattr(row_computer.RowComputer, "compute", stopped)
    with pytest.raises(ReadError, match="stopped here"):
        bigload.reshard(source, tmp_path / "out", **options)
    monkeypatch.setattr(row_computer.RowComputer, "compute", compute)
    report = bigload.reshard(source, tmp_path / "out", resume=True, **options)
    assert report.kept_bytes > weight.numel()
    found = bigload.load(tmp_path / "out")
    assert torch.equal(found["a.weight"], weight.bfloat16())
    assert torch.equal(found["b.weight"], weight.bfloat16())


@pytest.mark.parametrize("layout", ["shards", "offload", "dcp"])
def test_unpacked_weights_in_other_layouts(tmp_path, layout):
    tensors, weight = _gptq(4, 128, 64, 32)
    source = _saved(tmp_path / "in", tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    out = tmp_path / "out"
    bigload.reshard(source, out, layout=layout, transforms=[Dequantize()])
    written = weight.bfloat16().contiguous().view(torch.uint8).numpy().tobytes()
    assert bigload.verify(out).ok
    assert any(written in file.read_bytes() for file in out.rglob("*") if file.is_file())
