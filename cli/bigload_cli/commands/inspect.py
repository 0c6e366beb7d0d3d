"""`bigload inspect`: contents of a checkpoint, read from its headers."""

from __future__ import annotations

from pathlib import Path

from bigload_cli.options import CHECKPOINT, COLOR, JSON, QUIET, ColorMode, option
from bigload_cli.output import AnswerForm

EPILOG = """\b
Examples:
  bigload inspect ./llama-70b
  bigload inspect ./llama-70b --depth 5
  bigload inspect plan.json
  bigload inspect ./llama-70b --json --tensors | jq '.tensors[].name'
"""


def inspect(
    path: str = CHECKPOINT,
    depth: int = option(3, "--depth", "N", "Levels of modules to show.", min=1, max=50),
    show_tensors: bool = option(False, "--tensors", "A row for every tensor."),
    show_shards: bool = option(False, "--shards", "A row for every file."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Show what a checkpoint holds.

    Reads the headers and checks them; weights are never read. PATH may also be a plan file.
    """
    from bigload.planning.model.module_tree import blocks_of, build_tree
    from bigload.planning.module_table import outline
    from bigload_cli import output

    form = output.AnswerForm(as_json, quiet, color)
    if _is_plan(path):
        _show_plan(path, form)
        return
    checkpoint = output.open_shown(path, quiet=not form.is_for_people)
    output.say_warnings(checkpoint)
    if quiet and not as_json:
        output.print_text(str(checkpoint.total_bytes))
        return
    tree = build_tree(checkpoint.tensors)
    rows = outline(tree, max_depth=depth)
    if as_json:
        from bigload_cli.views import documents

        document = documents.of_checkpoint(checkpoint, rows)
        document["shards"] = documents.of_shards(checkpoint) if show_shards else None
        document["tensors"] = [documents.of_tensor(t) for t in tree.all_tensors()] if show_tensors else None
        output.print_json(document)
        return
    from bigload_cli.views import checkpoint as view

    output.print_text(view.headline(checkpoint) + "\n")
    if show_shards:
        output.print_table(view.shards(checkpoint), color=color)
    if show_tensors:
        output.print_table(view.tensors(list(tree.all_tensors())), color=color)
    if checkpoint.components and not show_shards and not show_tensors:
        output.print_table(view.components(checkpoint), color=color)
        output.print_text("")
    if not show_shards and not show_tensors:
        output.print_table(view.modules(checkpoint, rows, blocks=output.can_draw_on_stdout()), color=color)
        output.print_text("")
        output.print_text(view.closing(checkpoint, list(blocks_of(tree)), path=path))


def _show_plan(path: str, form: AnswerForm) -> None:
    from bigload.planning.model_parallel.parallel_plan_file import is_parallel_plan, read_parallel_plan
    from bigload.planning.plan_file import read_plan
    from bigload_cli.plan_answers import show

    show(read_parallel_plan(path) if is_parallel_plan(path) else read_plan(path), form)


def _is_plan(path: str) -> bool:
    """Return whether `path` is a JSON file that is not an index: then it has to be a plan."""
    file = Path(path)
    return file.suffix == ".json" and not file.name.endswith(".index.json") and file.is_file()
