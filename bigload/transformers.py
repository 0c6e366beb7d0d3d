"""`from_pretrained` of transformers with weights read by bigload, or placed by a plan.

transformers does all but read: it finds or downloads the files, makes the model, initialises what no file has, ties
weights and reports. Its function that reads files into a model is wrapped once; outside of a `with` of this module, and
in other threads, it is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_files
from bigload.errors import LegacyPickleError, MissingPackageError, OptionError
from bigload.extras import require
from bigload.planning.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigload.conversion.checkpoint_view import CheckpointView
    from bigload.loading.selection import Selection

_PLACING = ("device_map", "max_memory", "offload_folder", "offload_buffers", "tp_plan", "distributed_config")
"""Arguments of `from_pretrained` that say what a plan says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedRead:
    """One checkpoint that `from_pretrained` has read.

    Attributes:
        files: The files.
        num_bytes: Bytes that bigload has brought into memory; 0 where it has not.
        left_to_transformers: Why transformers has read the files itself, as half a sentence; `None` where bigload has.
    """

    files: tuple[Path, ...]
    num_bytes: int
    left_to_transformers: str | None


@dataclass(slots=True)
class _Reading:
    """Models and files read in one `with`, and whether weights wait for a plan."""

    leaves_weights: bool
    reads: list[PretrainedRead] = field(default_factory=list)


_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


class _LeftToTransformersError(Exception):
    """bigload does not read this one, for the reason given."""


def from_pretrained(
    model_class: Any,  # noqa: ANN401 - a class of transformers
    path: str | Path,
    *args: object,
    plan: Plan | str | Path | None = None,
    **kwargs: Any,  # noqa: ANN401 - those of transformers
) -> Any:  # noqa: ANN401 - a model of transformers
    """Return what `model_class.from_pretrained(path, ...)` returns, with weights that bigload has read.

    Args:
        model_class: A model class of transformers, or one of its `AutoModelFor...`.
        path: What `from_pretrained` takes: a folder, or a repository of the Hub.
        args: Go to `from_pretrained`.
        plan: A plan of the same checkpoint, or its file: weights go where it says, as `bigload.load_and_dispatch` has
            it, and every weight of the model has to be in the checkpoint. Without one, weights go where transformers
            would have them; on the CPU they stay pages of the files, as with transformers, unless most are converted.
        kwargs: Go to `from_pretrained`.

    Raises:
        MissingPackageError: transformers is not installed, or is older than 5.
        OptionError: a plan together with an argument that places weights.
        BigloadError: what `load_and_dispatch` raises of a plan; files that break their format.
    """
    if plan is None:
        with reading_with_bigload():
            return model_class.from_pretrained(path, *args, **kwargs)
    placing = [name for name in _PLACING if kwargs.get(name) is not None]
    if placing:
        raise OptionError(f"plan= and {placing[0]}= both say where weights go", hint="give one of them")

    from bigload.runtime.dispatch.load_and_dispatch import load_and_dispatch, opened_plan

    made = opened_plan(plan)
    if Path(path).is_dir():
        made = replace(made, checkpoint_path=str(path))
    with _read_by(_Reading(leaves_weights=True)):
        found = model_class.from_pretrained(path, *args, **kwargs)
    model, *info = found if isinstance(found, tuple) else (found,)
    load_and_dispatch(model, made)
    return (model, *info) if info else model


@contextmanager
def reading_with_bigload() -> Iterator[Sequence[PretrainedRead]]:
    """Have every `from_pretrained` of transformers that this thread calls inside of the `with` read through bigload.

    Pipelines, trainers and other libraries that call it are served alike. What bigload does not read, such as weights
    that are quantised while they are loaded, is left to transformers.

    Yields:
        What was read, in order; grows while the `with` lasts.

    Raises:
        MissingPackageError: transformers is not installed, or is older than 5.
    """
    reading = _Reading(leaves_weights=False)
    with _read_by(reading):
        yield reading.reads


@contextmanager
def _read_by(reading: _Reading) -> Iterator[None]:
    _wrap_loader()
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


def _wrap_loader() -> None:
    """Wrap the function of transformers that reads files into a model, unless it is wrapped."""
    require("transformers", asked_by="bigload.transformers", extra="run")
    modeling: Any = import_module("transformers.modeling_utils")
    if not hasattr(modeling, "LoadStateDictConfig"):  # as of version 5
        raise MissingPackageError("bigload.transformers", "transformers>=5", extra="run")
    original = modeling.PreTrainedModel._load_pretrained_model
    if not hasattr(original, "__wrapped__"):
        modeling.PreTrainedModel._load_pretrained_model = staticmethod(_wrapped(original))


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_pretrained_model(
        model: Any,  # noqa: ANN401
        state_dict: Mapping[str, torch.Tensor] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,  # noqa: ANN401
        *args: object,
        **kwargs: object,
    ) -> Any:  # noqa: ANN401
        reading = _reading.get()
        if reading is None:
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        files = tuple(map(Path, checkpoint_files or ()))
        if reading.leaves_weights:
            _set_dtypes(model, load_config)
            for tensor in model.state_dict(keep_vars=True).values():
                tensor._is_hf_initialized = True
            return _loading_info(missing=()), None
        try:
            _check_plain(state_dict, files, load_config)
            info, num_bytes = _load(model, files, load_config)
        except _LeftToTransformersError as reason:
            reading.reads.append(PretrainedRead(files=files, num_bytes=0, left_to_transformers=str(reason)))
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        reading.reads.append(PretrainedRead(files=files, num_bytes=num_bytes, left_to_transformers=None))
        return info, None

    return load_pretrained_model


def _check_plain(
    state_dict: object,
    files: Sequence[Path],
    load_config: Any,  # noqa: ANN401
) -> None:
    """Raise _LeftToTransformersError unless whole weights of local files go to devices as they are, or are cast."""
    devices = load_config.device_map or {}
    reasons = {
        "weights come from memory": state_dict is not None or not files,
        "the files are in several folders": len({file.parent for file in files}) > 1,
        "weights are quantised": load_config.hf_quantizer is not None,
        "weights are divided among processes": load_config.device_mesh is not None,
        "the device map has a disk": "disk" in devices.values(),
    }
    for reason, holds in reasons.items():
        if holds:
            raise _LeftToTransformersError(reason)


def _load(model: Any, files: Sequence[Path], load_config: Any) -> tuple[Any, int]:  # noqa: ANN401
    """Read the files into `model`, on the meta device; return what transformers is told, and the bytes."""
    from bigload.conversion.checkpoint_view import CheckpointView
    from bigload.conversion.with_transformers.models import conversion_for
    from bigload.loading.load import load_selected
    from bigload.loading.settings import Method

    checkpoint = _opened(files)
    conversion = conversion_for(model, checkpoint.tensors, rules=load_config.weight_mapping or ())
    if conversion.problems:
        raise _LeftToTransformersError(conversion.problems[0])
    view = CheckpointView(checkpoint=checkpoint, tensors=conversion.of(checkpoint), conversion=conversion)
    _set_dtypes(model, load_config)
    empty = model.state_dict(keep_vars=True)
    selection = _selected(view, empty, load_config.device_map or {"": "cpu"})
    tensors = load_selected(checkpoint, selection, Method.MMAP if _mostly_stays_in_files(selection) else None)
    for name, value in tensors.items():
        _put(model, name, value)
    model._weight_conversions = [rule for rule in load_config.weight_mapping or () if rule.was_used()]
    missing = [name for name in empty if name not in tensors]
    return _loading_info(missing=missing, unexpected=conversion.unexpected), sum(
        value.nbytes for value in tensors.values()
    )


def _opened(files: Sequence[Path]) -> Checkpoint:
    try:
        return open_files(files)
    except LegacyPickleError:
        raise _LeftToTransformersError("files of torch before 1.6 have no parts that could be read") from None


def _selected(view: CheckpointView, empty: Mapping[str, torch.Tensor], devices: Mapping[str, object]) -> Selection:
    """Return what to read: all that `empty` and the checkpoint have both, in the dtypes of `empty`."""
    from bigload.loading.selection import select
    from bigload.loading.tensors.views import dtype_of, torch_dtype
    from bigload.planning.load_dtype import loaded_dtype

    found = select(view, only=[name for name in empty if name in view.tensors], device=devices)
    wanted = []
    for want in found.wanted:
        goal = empty[want.name]
        if want.torch_shape != tuple(goal.shape):
            raise _LeftToTransformersError(f"{want.name} has another shape in the model")
        dtype = loaded_dtype(want.name, want.dtype, dtype_of(goal.dtype))
        if torch_dtype(dtype) != goal.dtype:
            raise _LeftToTransformersError(f"{want.name} is {want.dtype.name}, and {goal.dtype} in the model")
        wanted.append(want._replace(dtype=dtype))
    return found._replace(wanted=tuple(wanted))


def _mostly_stays_in_files(selection: Selection) -> bool:
    """Return whether most bytes can be pages of the files. What is copied anyway comes faster past the cache."""
    from bigload.loading.scheduling.schedule import can_stay_in_map

    staying = sum(want.num_bytes for want in selection.wanted if can_stay_in_map(want))
    on_cpu = all(want.device == "cpu" for want in selection.wanted)
    return on_cpu and 2 * staying >= sum(want.num_bytes for want in selection.wanted)


def _set_dtypes(model: Any, load_config: Any) -> None:  # noqa: ANN401
    """Give empty weights that a model keeps in float32 this dtype, by the patterns that transformers has for them."""
    from transformers.core_model_loading import build_glob_alternation

    if not load_config.dtype_plan:
        return
    pattern, name_of_group, _ = build_glob_alternation(list(load_config.dtype_plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if match := pattern.search(name):
            tensor.data = tensor.data.to(load_config.dtype_plan[name_of_group[match.lastgroup]])


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Make `value` the parameter or buffer `name` of `model`, as transformers does after reading one."""
    from torch import nn

    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    made: Any = value if leaf in module._buffers else nn.Parameter(value, requires_grad=value.is_floating_point())
    made._is_hf_initialized = True
    setattr(module, leaf, made)


def _loading_info(*, missing: Iterable[str], unexpected: Iterable[str] = ()) -> Any:  # noqa: ANN401
    from transformers.utils.loading_report import LoadStateDictInfo

    return LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
