"""Pipelines: folders with a checkpoint in the folder of each of their components, opened as one `Checkpoint`.

`model_index.json` of diffusers maps each component to `[library, class]`; `[null, null]` is an optional one that is
absent, other values are settings of the pipeline (diffusers 0.42, `DiffusionPipeline.save_pretrained`). Tensors are
named after their component: `vae.decoder.conv_in.weight`.

`modules.json` of sentence-transformers is a list of `{"name", "path", "type"}` in the order in which modules run
(sentence-transformers 6.2, `SentenceTransformer.save`). The path `""` is the folder itself, whose model transformers
loads: that component has no name, and its tensors keep theirs.
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
MODULES_FILE = "modules.json"


def listed_components(root: Path, path: str) -> Iterator[Component]:
    """Yield the components that `model_index.json` lists, still without their checkpoints.

    Raises:
        OSError: it cannot be read.
    """
    document = _document(root, PIPELINE_FILE, path)
    if not isinstance(document, dict):
        raise _invalid(path, "is not an object; expected component names with [library, class]")
    for name, entry in document.items():
        match entry:
            case [str(library), str(class_name)]:
                # Diffusers passes components as keyword arguments, so names are identifiers: no dots, no separators.
                if not name.isidentifier():
                    raise _invalid(path, f"the component {name!r:.200} has no name that a folder can have")
                yield Component(name=name, library=library, class_name=class_name)


def listed_modules(root: Path, path: str) -> Iterator[Component]:
    """Yield the modules that `modules.json` lists, still without their checkpoints.

    Those in folders of folders, as routers have, are left out.

    Raises:
        OSError: it cannot be read.
    """
    document = _document(root, MODULES_FILE, path)
    if not isinstance(document, list):
        raise _invalid(path, "is not a list; expected modules with path and type", file=MODULES_FILE)
    for entry in document:
        match entry:
            case {"path": str(name), "type": str(kind)}:
                if "/" not in name and name not in (".", ".."):
                    yield Component(name=name, library=kind.partition(".")[0], class_name=kind.rpartition(".")[2])
            case _:
                raise _invalid(path, f"lists {entry!r:.200}; expected a module with path and type", file=MODULES_FILE)


def _document(root: Path, file: str, path: str) -> object:
    try:
        return parse_json(read_beside(root / file, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=None)
    except ValueError as error:
        raise _invalid(path, f"cannot be read: {error}", file=file) from error


def _invalid(path: str, text: str, *, file: str = PIPELINE_FILE) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code="bad-index", file=file, text=text)])


def as_one_checkpoint(
    path: str, root: Path, components: Sequence[Component], warnings: Sequence[CheckpointWarning] = ()
) -> Checkpoint:
    """Return the pipeline of `components`: files below their folders, tensors below their names."""
    for name, component in ((each.name, each.checkpoint) for each in components):
        if component is not None and component.assembled:
            text = (
                f"its component {name} is what torch.distributed.checkpoint saved, which diffusers cannot load either"
            )
            raise UnsupportedFormatError(
                path, text, hint=f"write it as safetensors first: bigload reshard {component.path}"
            )
    parts = [(each.name, in_pipeline(each.checkpoint, each.name)) for each in components if each.checkpoint]
    own = dict(parts).get("")
    return Checkpoint(
        path=path,
        root=root,
        index_file=None,
        shards=tuple(sorted((shard for _, part in parts for shard in part.shards), key=lambda shard: shard.file)),
        tensors=StoredTensors.of_all([moved(part.tensors, prefix=f"{name}." if name else "") for name, part in parts]),
        config=None if own is None else own.config,
        warnings=(
            *warnings,
            *(
                replace(warning, text=f"{name}: {warning.text}" if name else warning.text)
                for name, part in parts
                for warning in part.warnings
            ),
        ),
        components=tuple(components),
    )


def in_pipeline(checkpoint: Checkpoint, component: str) -> Checkpoint:
    """Return the checkpoint of a component with its files as seen from the pipeline's folder, under its own names."""
    if not component:
        return checkpoint
    folder = f"{component}/"
    return replace(
        checkpoint,
        root=checkpoint.root.parent,
        index_file=None if checkpoint.index_file is None else f"{folder}{checkpoint.index_file}",
        shards=tuple(replace(shard, file=f"{folder}{shard.file}") for shard in checkpoint.shards),
        tensors=moved(checkpoint.tensors, folder=folder),
    )


def has_modules(pipeline: Checkpoint) -> bool:
    """Return whether `pipeline` is one of sentence-transformers."""
    return any(not each.name or each.library == "sentence_transformers" for each in pipeline.components)


def is_in_one_file(component: Component) -> bool:
    """Return whether the library reads the component from one file, without an index."""
    return component.library == "sentence_transformers" and component.class_name != "Transformer"


def components_of(pipeline: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Yield name and checkpoint of each component that has weights."""
    for component in pipeline.components:
        if component.checkpoint is not None:
            yield component.name, component.checkpoint


def refuse_pipeline(checkpoint: Checkpoint, *, asked: str) -> None:
    """Raise if `checkpoint` is a pipeline, for which `asked` does not exist."""
    if checkpoint.components:
        name, component = next(components_of(checkpoint))
        # The folder itself is the whole pipeline, a file of it the component.
        place = component.path if name else component.root / (component.index_file or component.shards[0].file)
        raise OptionError(
            f"{checkpoint.name} is a pipeline of several models: there is no {asked} of it as a whole",
            hint=f"name one of its components, for example {place}" + (f" ({name})" if name else ""),
        )
