"""Builders for the tests: real safetensors files, written by hand, and checkpoints that exist in memory only.

Nothing here calls bigload's own writer, so that these files can judge it. The in-memory builders use bigload's value
types, because values are what they build.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import xxhash

from bigload.checkpoint.formats.safetensors import parse_header
from bigload.checkpoint.model import Checkpoint, Shard, Span, TensorInfo
from bigload.checkpoint.records.manifest import FileRecord
from bigload.dtypes import DTYPES
from bigload.errors import BigloadError
from bigload.layouts.kinds.layout import TENSOR_ALIGNMENT, LayoutRequest
from bigload.layouts.kinds.registry import layout_named
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output, OutputTensor
from bigload.loading.scheduling.slices import rows_of
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.model.units import Part, Unit, UnitKind
from bigload.planning.placement.problem import PlacementProblem
from bigload.planning.plan import Plan

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""The 22 dtypes of the format, from its specification."""

Form = tuple[str, Sequence[int]]
"""A tensor as tests write it: `("F32", [2, 3])`."""


def num_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; packed types have to fill whole bytes."""
    bits = prod(shape) * DTYPE_BITS[dtype]
    assert bits % 8 == 0, f"{dtype} {shape} does not fill whole bytes"
    return bits // 8


def data_for(name: str, num_bytes: int, *, dtype: str = "U8") -> bytes:
    """Return bytes that depend on the name alone: never zero, valid as BOOL, finite as any float type."""
    if dtype == "BOOL":
        return b"\1" * num_bytes
    first = sum(name.encode())
    pattern = bytes(1 + (first + 7 * index) % 62 for index in range(62))
    return (pattern * (num_bytes // 62 + 1))[:num_bytes]


def header_of(tensors: Mapping[str, Form], *, metadata: object = None, start: int = 0) -> dict[str, object]:
    """Return the header of a file that holds `tensors` one after the other, as a dict that tests may spoil."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for name, (dtype, shape) in tensors.items():
        stop = start + num_bytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    return header


def write_raw(path: Path, header: bytes | str | Mapping[str, object], data: bytes = b"", *, length: int | None = None):
    """Write length, header and data as they are; `length` may lie. Returns `path`."""
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_shard(path: Path, tensors: Mapping[str, Form], *, metadata: object = None) -> Path:
    """Write a valid file with `data_for` each tensor, in the order given. Returns `path`."""
    data = b"".join(data_for(name, num_bytes_of(*form), dtype=form[0]) for name, form in tensors.items())
    return write_raw(path, header_of(tensors, metadata=metadata), data)


def write_index(
    folder: Path,
    weight_map: Mapping[str, object],
    *,
    total_size: object = None,
    name: str = "model.safetensors.index.json",
) -> Path:
    """Write a weight map, with `metadata.total_size` when one is given. Returns its path."""
    document: dict[str, object] = {} if total_size is None else {"metadata": {"total_size": total_size}}
    path = folder / name
    path.write_text(json.dumps({**document, "weight_map": dict(weight_map)}))
    return path


def llama_tensors(
    blocks: int = 4, *, tied: bool = False, hidden: int = 8, vocab: int = 32, dtype: str = "BF16"
) -> dict[str, Form]:
    """Return names and forms of a tiny llama, in execution order; a tied one stores no head."""
    wide = 2 * hidden
    tensors: dict[str, Form] = {"model.embed_tokens.weight": (dtype, [vocab, hidden])}
    for block in range(blocks):
        prefix = f"model.layers.{block}"
        tensors[f"{prefix}.input_layernorm.weight"] = (dtype, [hidden])
        for projection in "qkvo":
            tensors[f"{prefix}.self_attn.{projection}_proj.weight"] = (dtype, [hidden, hidden])
        tensors[f"{prefix}.mlp.up_proj.weight"] = (dtype, [wide, hidden])
        tensors[f"{prefix}.mlp.down_proj.weight"] = (dtype, [hidden, wide])
    tensors["model.norm.weight"] = (dtype, [hidden])
    if not tied:
        tensors["lm_head.weight"] = (dtype, [vocab, hidden])
    return tensors


def llama_config(*, tied: bool = False) -> dict[str, object]:
    """Return the part of a llama's config.json that bigload looks at."""
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied}


def split(tensors: Mapping[str, Form], shards: int) -> dict[str, dict[str, Form]]:
    """Return shard file names with their tensors, cut into runs of nearly equal count."""
    items = list(tensors.items())
    bounds = [len(items) * index // shards for index in range(shards + 1)]
    return {
        f"model-{index + 1:05d}-of-{shards:05d}.safetensors": dict(items[bounds[index] : bounds[index + 1]])
        for index in range(shards)
    }


def write_sharded(
    folder: Path, shards: Mapping[str, Mapping[str, Form]], *, config: Mapping[str, object] | None = None
) -> Path:
    """Write the shards, an index that is right about them, and `config.json` when there is one. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_shard(folder / file, tensors, metadata={"format": "pt"})
        total += sum(num_bytes_of(*form) for form in tensors.values())
    write_index(folder, {name: file for file, held in shards.items() for name in held}, total_size=total)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_checkpoint(
    folder: Path,
    *,
    blocks: int = 4,
    tied: bool = False,
    shards: int = 2,
    hidden: int = 8,
    vocab: int = 32,
    dtype: str = "BF16",
) -> Path:
    """Write a tiny llama: `model.safetensors` for one shard, an index and shards for more. Returns `folder`.

    Shards are cut by count of tensors, so that a block may lie in two of them, as in checkpoints of the wild.
    """
    tensors = llama_tensors(blocks, tied=tied, hidden=hidden, vocab=vocab, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        write_shard(folder / "model.safetensors", tensors, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(llama_config(tied=tied)))
        return folder
    return write_sharded(folder, split(tensors, shards), config=llama_config(tied=tied))


def make_mixtral(folder: Path, *, experts: int = 4) -> Path:
    """Write one layer of a tiny mixtral with experts as files have them: apart, each of three matrices."""
    layer = "model.layers.0"
    forms = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,), "lm_head.weight": (32, 8)}
    forms |= {f"{layer}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
    forms |= {f"{layer}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    forms[f"{layer}.block_sparse_moe.gate.weight"] = (experts, 8)
    for expert in range(experts):
        shapes = {"w1": (16, 8), "w2": (8, 16), "w3": (16, 8)}
        forms |= {f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight": each for name, each in shapes.items()}
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "vocab_size": 32,
    }
    return write_sharded(folder, split({name: ("BF16", shape) for name, shape in forms.items()}, 2), config=config)


def make_pipeline(folder: Path) -> Path:
    """Write what DiffusionPipeline.save_pretrained writes, with tiny components. Returns `folder`."""
    weights: dict[str, tuple[str, dict[str, Form]]] = {
        "text_encoder": ("model", {"embed.weight": ("F32", [8, 4]), "layers.0.weight": ("F32", [4, 4])}),
        "unet": ("diffusion_pytorch_model", {"conv_in.weight": ("F32", [4, 4]), "down.weight": ("F32", [64])}),
        "vae": ("diffusion_pytorch_model", {"decoder.weight": ("F32", [4])}),
    }
    for component, (base, tensors) in weights.items():
        (folder / component).mkdir(parents=True)
        write_shard(folder / component / f"{base}.safetensors", tensors)
        (folder / component / "config.json").write_text(json.dumps({"of": component}))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def make_many_experts(folder: Path) -> Path:
    """Write ten blocks of 53 tensors, 50 of them experts, with the headers that safetensors writes, without blanks."""
    experts = [f"mlp.experts.{index}.up_proj.weight" for index in range(50)]
    block = {name: ("U8", [1]) for name in (*experts, "mlp.gate.weight", "self_attn.q_proj.weight", "norm.weight")}
    shards = {f"{i}.safetensors": {f"layers.{i}.{name}": form for name, form in block.items()} for i in range(10)}
    folder.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        write_raw(folder / file, json.dumps(header_of(tensors), separators=(",", ":")), bytes(len(tensors)))
    write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def make_cached_repository(cache: Path, repository: str = "org/tiny", *, shards: int = 2) -> Path:
    """Write a tiny llama as the Hugging Face cache stores it: a snapshot of links to blobs. Returns the snapshot."""
    home = cache / f"models--{repository.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = home / "snapshots" / revision, home / "blobs"
    make_checkpoint(snapshot, shards=shards)
    blobs.mkdir()
    for file in sorted(snapshot.iterdir()):
        blob = blobs / f"{sum(file.name.encode()):064x}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    return snapshot


def checkpoint_of(
    tensors: Mapping[str, int | Form], *, config: Mapping[str, object] | None = None, path: str = "models/tiny"
) -> Checkpoint:
    """Return a checkpoint of one shard that exists in memory only; a whole number is so many bytes of U8.

    Whoever reads its file reads zeros, so tensors of one form are equal.
    """
    infos: dict[str, TensorInfo] = {}
    start = 0
    for name, form in tensors.items():
        dtype, shape = ("U8", (form,)) if isinstance(form, int) else form
        stop = start + num_bytes_of(dtype, shape)
        infos[name] = TensorInfo(name, DTYPES[dtype], tuple(shape), Span("model.safetensors", start, stop))
        start = stop
    shard = Shard(
        file="model.safetensors",
        num_bytes=start + 8,
        header_parts=((0, 8),),
        header_sha256="5ad" * 21 + "f",
        metadata={},
    )
    return Checkpoint(
        path=path, root=_folder_of_zeros(), index_file=None, shards=(shard,), tensors=infos, config=config, warnings=()
    )


@cache
def _folder_of_zeros() -> Path:
    folder = Path(mkdtemp(prefix="zeros-"))
    atexit.register(rmtree, folder)
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", 2**42)  # one hole: all of it reads as zeros
    return folder


def unit_of(num_bytes: int, *, name: str = "layers.0", is_routed: bool = False, **needs: int) -> Unit:
    """Return a block of so many bytes, with what `needs` says about its part."""
    return Unit(parts=(Part(name=name, kind=UnitKind.BLOCK, num_bytes=num_bytes, **needs),), is_routed=is_routed)


def units_of(sizes: Iterable[int | Unit]) -> tuple[Unit, ...]:
    """Return one block per size, named `layers.0`, `layers.1`, …, between units that are given as such."""
    return tuple(
        size if isinstance(size, Unit) else unit_of(size, name=f"layers.{index}") for index, size in enumerate(sizes)
    )


def problem_of(
    sizes: Iterable[int | Unit], limits: Mapping[str, int], *, use_disk: bool = True, **wishes: object
) -> PlacementProblem:
    """Return the problem of placing `units_of(sizes)` on devices of so many bytes."""
    return PlacementProblem(units=units_of(sizes), budget=MemoryBudget.of(limits, use_disk=use_disk), **wishes)


def laid_out(layout: str, checkpoint: Checkpoint, *, plan: Plan | None = None, **options: object) -> Output:
    """Return the files of a layout, from options of `ReshardOptions`."""
    return layout_named(layout).lay_out(
        LayoutRequest(checkpoint=checkpoint, plan=plan, options=ReshardOptions(**options))
    )


def write_output(output: Output, source: Path, folder: Path) -> Path:
    """Write what a layout describes the simplest way, casts as zeros and links as hard links. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for written in output.files:
        tensors = (bytes(t.num_bytes) if t.is_cast else written_bytes(t, source) for t in written.tensors)
        data = [written.header, *tensors]
        (folder / written.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / written.file).write_bytes(b"".join(data))
    for file, content in output.documents.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    for link, file in output.links.items():
        (folder / link).hardlink_to(folder / file)
    return folder


def written_bytes(tensor: OutputTensor, source: Path) -> bytes:
    """Return the bytes of an output tensor that is not cast: in each row, its parts one after the other."""
    stored = (source / tensor.source.span.file).read_bytes()
    rows = [rows_of(tensor.source, part) for part in tensor.parts or (None,)]
    starts = [(part.start + number * part.stride, part.row_bytes) for number in range(rows[0].count) for part in rows]
    return b"".join(stored[start : start + length] for start, length in starts)


def read_by_both(output: Output, max_shard_bytes: int | None) -> dict[str, Form]:
    """Return the tensors of all headers as bigload and the reference read them; check the limit on files as well."""
    import safetensors

    found = {}
    for written in output.files:
        data_bytes = written.num_bytes - len(written.header)
        assert max_shard_bytes is None or len(written.tensors) <= 1 or data_bytes <= max_shard_bytes
        for tensor in parse_header(written.header, num_bytes=written.num_bytes, file=written.file).tensors.values():
            assert tensor.num_bytes % TENSOR_ALIGNMENT or tensor.span.start % TENSOR_ALIGNMENT == 0
            assert tensor.name not in found
            found[tensor.name] = (tensor.dtype.name, list(tensor.shape))
        reference = safetensors.deserialize(written.header + bytes(data_bytes))
        assert {name for name, _ in reference} == {tensor.name for tensor in written.tensors}
    return found


def stored_tensors(*files: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor in `files` as the reference implementation reads them."""
    import safetensors

    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for file in files
        for name, entry in safetensors.deserialize(file.read_bytes())
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder` by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def only_our_errors() -> Iterator[None]:
    """Let the errors of bigload pass that can tell what is wrong; all others escape and fail the test."""
    try:
        yield
    except BigloadError as error:
        if not str(error):
            raise


def open_descriptors() -> list[str]:
    """Return the file descriptors of this process, for a comparison of before and after."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Check that all threads that start inside end inside. One of an earlier test may end meanwhile."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def make_split(folder: Path) -> Path:
    """Make a small folder as a reshard by devices writes it, manifest included. Returns `folder`."""
    weight_map = {}
    for device, tensors in (("cuda-0", {"embed.weight": ("BF16", [8, 4])}), ("cpu", {"head.weight": ("F32", [4, 4])})):
        (folder / device).mkdir(parents=True)
        write_shard(folder / device / "model.safetensors", tensors)
        write_index(folder / device, dict.fromkeys(tensors, "model.safetensors"))
        weight_map |= dict.fromkeys(tensors, f"{device}/model.safetensors")
    (folder / "config.json").write_text(json.dumps(llama_config()))
    write_index(folder, weight_map)
    write_manifest(folder)
    return folder


def write_manifest(folder: Path, **changes: object) -> Path:
    """Write the manifest of all files in `folder` as they are now, with `changes` to its keys. Returns its path."""
    path = folder / "bigload-manifest.json"
    files = {}
    for file in sorted(found for found in folder.rglob("*") if found.is_file() and found != path):
        content = file.read_bytes()
        tensors: dict[str, str] = {}
        if file.suffix == ".safetensors":
            data = content[8 + struct.unpack("<Q", content[:8])[0] :]
            header = json.loads(content[8 : len(content) - len(data)])
            header.pop("__metadata__", None)
            tensors = {name: digest_of(data[slice(*entry["data_offsets"])]) for name, entry in header.items()}
        elif file.suffix == ".dat":
            tensors = {file.stem: digest_of(content)}
        record = {"bytes": len(content), "digest": digest_of(content), "tensors": tensors}
        files[file.relative_to(folder).as_posix()] = record
    document = {
        "schema": "bigload.manifest/1.0",
        "bigload_version": "0.1.0",
        "digest": "xxh3-128",
        "layout": "devices",
        "options": {},
        "source": {"path": "model", "total_bytes": 0, "shards": []},
        "aliases": {},
        "files": files,
    }
    path.write_text(json.dumps({**document, **changes}))
    return path


def digest_of(content: bytes) -> str:
    """Return the digest of a file as a manifest has it."""
    return xxhash.xxh3_128_hexdigest(content)


def record_of(content: bytes) -> FileRecord:
    """Return the record of a file without tensors."""
    return FileRecord(num_bytes=len(content), digest=digest_of(content))
