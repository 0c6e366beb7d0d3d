"""Pipeline of diffusers: a folder with `model_index.json` and a checkpoint in the folder of each of its components.

`model_index.json` maps each component to `[library, class]`; `[null, null]` is an optional one that is absent, other
values are settings of the pipeline (diffusers 0.42, `DiffusionPipeline.save_pretrained`). Opened, a pipeline is one
`Checkpoint`, whose tensors are named after their component: `vae.decoder.conv_in.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import Checkpoint, CheckpointWarning, Component, StoredTensors, moved
from bigload.documents import MAX_CONFIG_BYTES, parse_json
from bigload.errors import InvalidCheckpointError, OptionError, Problem, UnsupportedFormatError

PIPELINE_FILE = "model_index.json"


def listed_components(root: Path, path: str) -> Iterator[Component]:
    """Yield the components that `model_index.json` lists, still without their checkpoints.

    Raises:
        InvalidCheckpointError: the file is no JSON object, or a component has a name that no folder in `root` can have.
        OSError: it cannot be read.
    """
    try:
        document = parse_json(read_beside(root / PIPELINE_FILE, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except ValueError as error:
        raise _invalid(path, f"cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _invalid(path, "is not an object; expected component names with [library, class]")
    for name, entry in document.items():
        match entry:
            case [str(library), str(class_name)]:
                # Diffusers passes components as keyword arguments, so names are identifiers: no dots, no separators.
                if not name.isidentifier():
                    raise _invalid(path, f"the component {name!r:.200} has no name that a folder can have")
                yield Component(name=name, library=library, class_name=class_name)


def _invalid(path: str, text: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code="bad-index", file=PIPELINE_FILE, text=text)])


def as_one_checkpoint(
    path: str, root: Path, components: Sequence[Component], warnings: Sequence[CheckpointWarning] = ()
) -> Checkpoint:
    """Return the pipeline of `components`: files below their folders, tensors below their names.

    Raises:
        UnsupportedFormatError: tensors of a component lie in several pieces.
    """
    for name, component in ((each.name, each.checkpoint) for each in components):
        if component is not None and component.assembled:
            text = (
                f"its component {name} is what torch.distributed.checkpoint saved, which diffusers cannot load either"
            )
            raise UnsupportedFormatError(
                path, text, hint=f"write it as safetensors first: bigload reshard {component.path}"
            )
    parts = [(each.name, in_pipeline(each.checkpoint, each.name)) for each in components if each.checkpoint]
    return Checkpoint(
        path=path,
        root=root,
        index_file=None,
        shards=tuple(sorted((shard for _, part in parts for shard in part.shards), key=lambda shard: shard.file)),
        tensors=StoredTensors.of_all([moved(part.tensors, prefix=f"{name}.") for name, part in parts]),
        config=None,
        warnings=(
            *warnings,
            *(replace(warning, text=f"{name}: {warning.text}") for name, part in parts for warning in part.warnings),
        ),
        components=tuple(components),
    )


def in_pipeline(checkpoint: Checkpoint, component: str) -> Checkpoint:
    """Return the checkpoint of a component with its files as seen from the pipeline's folder, under its own names."""
    folder = f"{component}/"
    return replace(
        checkpoint,
        root=checkpoint.root.parent,
        index_file=None if checkpoint.index_file is None else f"{folder}{checkpoint.index_file}",
        shards=tuple(replace(shard, file=f"{folder}{shard.file}") for shard in checkpoint.shards),
        tensors=moved(checkpoint.tensors, folder=folder),
    )


def components_of(pipeline: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Yield name and checkpoint of each component that has weights."""
    for component in pipeline.components:
        if component.checkpoint is not None:
            yield component.name, component.checkpoint


def refuse_pipeline(checkpoint: Checkpoint, *, asked: str) -> None:
    """Raise if `checkpoint` is a pipeline, for which `asked` does not exist.

    Raises:
        OptionError: it is; it names a component to name instead.
    """
    if checkpoint.components:
        name, component = next(components_of(checkpoint))
        raise OptionError(
            f"{checkpoint.name} is a pipeline of several models: there is no {asked} of it as a whole",
            hint=f"name one of its components, for example {component.path} ({name})",
        )
