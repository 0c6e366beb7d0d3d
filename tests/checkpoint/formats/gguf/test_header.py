"""GGUF headers are read as ggml reads them, and whatever a file holds, only bigload's own errors come out."""

import random
import struct
from functools import cache

import pytest

import bigload
from bigload.checkpoint.formats.gguf import header
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import GGML_DTYPES
from bigload.errors import InvalidCheckpointError, UnsupportedFormatError
from bigload.planning.planner import plan
from builders import only_our_errors
from gguf_files import gguf_bytes, text, value, write_gguf

TENSORS = {"token_embd.weight": (12, (3, 256)), "blk.0.attn_norm.weight": (0, (5,)), "blk.0.e.weight": (39, (2, 3, 64))}
METADATA = {
    "general.architecture": "other",
    "llama.block_count": 1,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.head_count_kv": [4, 8],
    "tokenizer.ggml.tokens": ["a", "", "ccc"],
}


def test_names_types_shapes_places_and_metadata_are_those_of_the_file(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", TENSORS, METADATA))
    found = {name: (t.dtype.name, t.shape, t.num_bytes) for name, t in checkpoint.tensors.items()}
    assert found == {
        "token_embd.weight": ("Q4_K", (3, 256), 3 * 144),
        "blk.0.attn_norm.weight": ("F32", (5,), 20),
        "blk.0.e.weight": ("MXFP4", (2, 3, 64), 12 * 17),
    }
    starts = [tensor.span.start for tensor in checkpoint.tensors.values()]
    assert [start - starts[0] for start in starts] == [0, 448, 480]
    assert starts[0] % 32 == 0
    (shard,) = checkpoint.shards
    assert dict(shard.metadata) == {
        "general.architecture": "other",
        "llama.block_count": "1",
        "llama.rope.freq_base": "10000.0",
        "llama.attention.head_count_kv": "[4, 8]",
        "tokenizer.ggml.tokens": "array of 3",
    }
    assert plan(checkpoint, {"cpu": "1GiB"}).total_bytes == checkpoint.total_bytes


def test_a_header_longer_than_one_read_is_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "_FIRST_READ", 16)
    metadata = {**METADATA, "tokenizer.ggml.tokens": ["x" * (number % 50) for number in range(1000)]}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", TENSORS, metadata))
    assert list(checkpoint.tensors) == list(TENSORS)
    assert checkpoint.shards[0].metadata["tokenizer.ggml.tokens"] == "array of 1000"


def test_the_alignment_of_the_file_counts(tmp_path):
    metadata = {"general.alignment": 256}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", TENSORS, metadata, alignment=256))
    assert all(tensor.span.start % 256 == 0 for tensor in checkpoint.tensors.values())


@pytest.mark.peers
def test_types_and_blocks_are_those_of_the_gguf_package():
    package = pytest.importorskip("gguf")
    assert {number.value: number.name for number in package.GGMLQuantizationType} == {
        number: dtype.name for number, dtype in GGML_DTYPES.items()
    }
    for number, (elements, num_bytes) in package.GGML_QUANT_SIZES.items():
        assert GGML_DTYPES[number].num_bytes(elements * 8) == num_bytes * 8
        assert GGML_DTYPES[number].block_elements == elements


def record(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


HUGE = 2**63 - 1
BAD = {
    "not-gguf": b"GGML" + gguf_bytes({})[4:],
    "unknown-version": gguf_bytes({}, version=0x03000000),
    "duplicate-key": gguf_bytes({}, keys=[text("a") + value(1)] * 2),
    "bad-text": gguf_bytes({}, keys=[text(b"\xff") + value(1)]),
    "unknown-type": gguf_bytes({}, keys=[text("a") + struct.pack("<I", 13)]),
    "bad-alignment": gguf_bytes({}, {"general.alignment": 24}),
    "unknown-dtype": gguf_bytes({}, records=[record("a", (4,), 4, 0)]),
    "bad-shape": gguf_bytes({}, records=[record("a", (31,), 2, 0)]),
    "bad-offsets": gguf_bytes({}, records=[record("a", (8,), 0, 0), record("b", (8,), 0, 0)]) + bytes(99),
    "file-truncated": gguf_bytes(TENSORS)[:-32],
    "header-too-large": b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
}
BOMBS = {
    "a string near 2^63": gguf_bytes({}, keys=[struct.pack("<Q", HUGE)]),
    "a string near 2^64": gguf_bytes({}, keys=[struct.pack("<Q", 2**64 - 1)]),
    "an array near 2^63": gguf_bytes({}, keys=[text("a") + struct.pack("<IIQ", 9, 10, HUGE)]),
    "strings near 2^63": gguf_bytes({}, keys=[text("a") + struct.pack("<IIQ", 9, 8, HUGE)]),
    "a long string in an array": gguf_bytes({}, keys=[text("a") + struct.pack("<IIQQ", 9, 8, 2, HUGE)]) + bytes(9),
    "an array in an array": gguf_bytes({}, keys=[text("a") + struct.pack("<IIQ", 9, 9, 1)]),
    "keys": b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
    "dimensions": gguf_bytes({}, records=[text("a") + struct.pack("<I", 2**31)]),
    "a product past 2^63": gguf_bytes({}, records=[record("a", (0, 2**62, 4), 0, 0)]),
    "two tensors of a name": gguf_bytes({}, records=[record("a", (8,), 0, 0), record("a", (8,), 0, 32)]) + bytes(64),
}


@pytest.mark.parametrize("code", BAD)
def test_what_breaks_the_format_is_refused_by_its_code(tmp_path, code):
    (tmp_path / "m.gguf").write_bytes(BAD[code])
    with pytest.raises(InvalidCheckpointError) as refused:
        open_checkpoint(tmp_path / "m.gguf")
    assert [problem.code for problem in refused.value.problems] == [code]


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_claims_to_be_huge_is_refused(tmp_path, bomb):
    (tmp_path / "m.gguf").write_bytes(BOMBS[bomb])
    with pytest.raises(InvalidCheckpointError):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated") / "m.gguf"


@cache
def bases():
    """Return whole files: of plain tensors, of a family with experts and a tokenizer, and a part of a split."""
    tokens = [f"token {number}" * (number % 15) for number in range(130)]
    family = {
        **METADATA,
        "general.architecture": "qwen3moe",
        "general.alignment": 32,
        "tokenizer.ggml.tokens": tokens,
        "qwen3moe.block_count": 1,
        "qwen3moe.expert_count": 4,
        "qwen3moe.attention.head_count": 2,
    }
    experts = {"blk.0.ffn_gate_exps.weight": (8, (4, 2, 32)), "blk.0.attn_q.weight": (0, (8, 8)), **TENSORS}
    return gguf_bytes(TENSORS, METADATA), gguf_bytes(experts, family), gguf_bytes(TENSORS, {"split.count": 2})


NUMBERS = (0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**62, HUGE - 7, HUGE, HUGE + 1, 2**64 - 8, 2**64 - 1)


def mutated(source):
    """Return a file with some bytes, counts or lengths changed, removed, repeated or cut off."""
    content = bytearray(source.choice(bases()))
    for _ in range(source.randint(1, 4)):
        kind, at = source.randrange(6), source.randrange(len(content) or 1)
        if kind == 0:
            content[at : at + 1] = bytes([source.choice((0, 1, 8, 9, 127, 128, 255, source.randrange(256)))])
        elif kind == 1:
            content[at : at + 8] = struct.pack("<Q", source.choice(NUMBERS))
        elif kind == 2:
            content[at : at + 4] = struct.pack("<I", source.choice((*range(13), 39, 2**31, 2**32 - 1)))
        elif kind == 3:
            del content[at : at + source.randrange(1, 9)]
        elif kind == 4:
            content[at:at] = content[source.randrange(len(content) or 1) :][: source.randrange(1, 60)]
        elif source.randrange(8) == 0:
            del content[at:]
    return bytes(content)


def open_mutated(place, seed):
    source = random.Random(seed)
    place.write_bytes(mutated(source))
    with only_our_errors():
        opened = open_checkpoint(place)
        if source.random() < 0.2:
            plan(opened, {"cpu": "1GiB"})
        return opened
    return None


def test_a_mutated_file_raises_nothing_but_our_errors(place):
    opened = [open_mutated(place, seed) is not None for seed in range(600)]
    assert 0 < sum(opened) < 500  # some are still whole


@pytest.mark.slow
def test_many_mutated_files_raise_nothing_but_our_errors(place):
    for seed in range(600, 150_000):
        open_mutated(place, seed)


def write_split(folder, count=3, **changed):
    for number in range(count):
        metadata = {"split.no": number, "split.count": count, "split.tensors.count": count, **changed}
        write_gguf(folder / f"m-{number + 1:05}-of-{count:05}.gguf", {f"blk.{number}.w": (1, (4,))}, metadata)


def test_a_split_checkpoint_is_opened_by_its_folder_or_any_of_its_files(tmp_path):
    write_split(tmp_path)
    for path in (tmp_path, *tmp_path.iterdir()):
        checkpoint = open_checkpoint(path)
        assert list(checkpoint.tensors) == ["blk.0.w", "blk.1.w", "blk.2.w"]
        assert len(checkpoint.shards) == 3
        assert [warning.code for warning in checkpoint.warnings] == ["gguf-weights-only"]


def test_a_missing_file_of_a_split_is_named(tmp_path):
    write_split(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"m-00002-of-00003\.gguf"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


@pytest.mark.parametrize("changed", [{"split.no": 0}, {"split.count": 2}, {"split.tensors.count": 4}])
def test_a_split_that_contradicts_its_names_is_refused(tmp_path, changed):
    write_split(tmp_path, **changed)
    with pytest.raises(InvalidCheckpointError, match=next(iter(changed))):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_its_data_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TENSORS)
    with pytest.raises(UnsupportedFormatError, match="only headers"):
        bigload.load(path)
