"""Recognise files and folders of weights that bigload does not read, and name them with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.formats.registry import weight_suffixes
from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import CheckpointWarning
from bigload.documents import MAX_CONFIG_BYTES, parse_json
from bigload.errors import UnsupportedFormatError

ADAPTER_FILE = "adapter_config.json"
_ELSEWHERE = "use the repository that has the model as safetensors"


class _OtherFormat(NamedTuple):
    """A format by its suffixes and, where it has one, the bytes that it begins with."""

    name: str
    suffixes: tuple[str, ...]
    magic: bytes | None
    hint: str


_FORMATS = (
    _OtherFormat(
        "a GGUF file of llama.cpp under another suffix",
        (),
        b"GGUF",
        "rename it to end with .gguf",
    ),
    _OtherFormat(
        "an ONNX graph",
        (".onnx", ".onnx_data"),
        None,
        "use the checkpoint that it was exported from; ONNX is a program",
    ),
    _OtherFormat(
        "an HDF5 file of Keras or TensorFlow",
        (".h5", ".hdf5", ".keras"),
        b"\x89HDF",
        f"{_ELSEWHERE}, or convert with transformers 4: from_pretrained(FOLDER, from_tf=True).save_pretrained(OUT)",
    ),
    _OtherFormat(
        "a NumPy archive",
        (".npz", ".npy"),
        b"\x93NUMPY",
        'convert it: safetensors.numpy.save_file(dict(numpy.load(FILE)), "model.safetensors")',
    ),
    _OtherFormat(
        "Flax weights in MessagePack",
        (".msgpack",),
        None,
        f"{_ELSEWHERE}, or convert with transformers 4: from_pretrained(FOLDER, from_flax=True).save_pretrained(OUT)",
    ),
    _OtherFormat(
        "a torch file under another suffix",
        (".ckpt", ".pkl", ".pickle"),
        None,
        "if torch.save wrote it, rename it to end with .pt; bigload reads .bin, .pt and .pth",
    ),
)


def refuse_other_file(path: Path) -> None:
    """Raise if the file at `path` is in a format that is known and not read.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():  # a device or a pipe; the reader says so
        return
    with path.open("rb") as file:
        beginning = file.read(8)
    for other in _unread():
        if path.suffix.lower() in other.suffixes or (
            other.magic is not None and beginning.startswith(other.magic) and path.suffix != ".gguf"
        ):
            raise UnsupportedFormatError(path, f"it is {other.name}", hint=other.hint)


def _unread() -> list[_OtherFormat]:
    """Return the formats that no registered reader reads."""
    return [other for other in _FORMATS if not set(other.suffixes).intersection(weight_suffixes())]


def refuse_other_folder(shown: str, names: Sequence[str]) -> None:
    """Raise if a folder with the files `names` holds weights in a format that is known and not read."""
    for other in _unread():
        found = [name for name in names if name.lower().endswith(other.suffixes)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise UnsupportedFormatError(shown, f"{found[0]}{more}: it is {other.name}", hint=other.hint)
    if ADAPTER_FILE in names:
        text = "it is an adapter whose weights (adapter_model.safetensors) are not here"
        raise UnsupportedFormatError(shown, text, hint="download it whole, or name its base model")


def refuse_deepspeed(root: Path, shown: str, names: Sequence[str]) -> None:
    """Raise if a folder with the files `names` is what DeepSpeed ZeRO saved: weights in parts, beside optimizer states.

    Such a folder has `zero_to_fp32.py` and `latest`, the name of the folder with `*_optim_states.pt`.
    """
    parts = [name for name in names if name.endswith("_optim_states.pt")]
    if not parts and "zero_to_fp32.py" not in names and not _names_a_step(root, names):
        return
    found = [*parts[:2], *(name for name in ("zero_to_fp32.py", "latest") if name in names)]
    outer = " one folder above," if parts else ""
    raise UnsupportedFormatError(
        shown,
        f"it is a checkpoint of DeepSpeed ZeRO ({', '.join(found)}), whose ranks hold flat parts of the weights",
        hint=f"DeepSpeed joins them:{outer} python zero_to_fp32.py . OUT --safe_serialization; then name OUT",
    )


def _names_a_step(root: Path, names: Sequence[str]) -> bool:
    """Return whether `latest` names a folder as DeepSpeed does by default."""
    if "latest" not in names:
        return False
    try:
        return read_beside(root / "latest", max_bytes=1024).startswith(b"global_step")
    except (OSError, ValueError):
        return False


def adapter_warning(root: Path) -> tuple[CheckpointWarning, ...]:
    """Return what to know if the checkpoint in `root` is an adapter of PEFT, which is no model by itself."""
    config = _json_of(root / ADAPTER_FILE)
    if config is None:
        return ()
    kind, rank, base = (config.get(key) for key in ("peft_type", "r", "base_model_name_or_path"))
    word = "LoRA" if kind == "LORA" else kind if isinstance(kind, str) else "PEFT"
    what = f"{word:.20} adapter"
    if isinstance(rank, int):
        what += f" of rank {rank}"
    of = f"for {base:.200}" if isinstance(base, str) and base else "for a base model"
    targets = config.get("target_modules")
    if isinstance(targets, list) and targets and all(isinstance(each, str) for each in targets):
        of += f", on {', '.join(sorted(targets)):.200}"
    text = f"this is a {what} {of}, not a model: plan its base model with --lora, and load this on top of it (peft)"
    return (CheckpointWarning(code="adapter", text=text),)


def _json_of(path: Path) -> dict[str, object] | None:
    try:
        document = parse_json(read_beside(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
