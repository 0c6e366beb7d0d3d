"""The same checkpoint as `torch.distributed.checkpoint` saves one, to be resumed from or loaded by any number of ranks.

out/__0_0.distcp ...   whole tensors, each an archive of torch.save; another file begins at `max_shard_bytes`
out/.metadata          which tensor is where

Readers: `torch.distributed.checkpoint.load`, into plain models and those divided by FSDP2 or tensor parallelism, under
the names that the tensors have here: `--add-prefix model.` for a dict that has the model's below "model".
"""

from __future__ import annotations

from collections.abc import Sequence

from bigload.errors import OptionError
from bigload.layouts.formats.dcp import PlacedItem, item_of, metadata_of
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout, split
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.plain_text import printable
from bigload.planning.plan import Plan


def lay_out(request: LayoutRequest) -> Output:
    """Return files that hold every tensor once, in the order in which a forward pass needs them."""
    tensors = request.in_execution_order()
    for tensor in tensors:
        if tensor.dtype.torch_name is None:
            expected = f"another layout: torch has no dtype for {tensor.dtype.name}, of {printable(tensor.name)}"
            raise OptionError.of("layout", "dcp", expected)
    placed: dict[str, PlacedItem] = {}
    parts = split(tensors, request.options.max_shard_bytes)
    files = tuple(_file(f"__0_{number}.distcp", part, placed) for number, part in enumerate(parts))
    return Output(files=files, documents={".metadata": metadata_of(placed)})


def _file(name: str, tensors: Sequence[OutputTensor], placed: dict[str, PlacedItem]) -> OutputFile:
    """Return a file of `tensors`, and note in `placed` where each is."""
    gaps, position = [b""], 0
    for tensor in tensors:
        shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype.name == "F4" else tensor.shape
        item = item_of(tensor.dtype, shape, tensor.num_bytes, offset=position)
        placed[tensor.name] = PlacedItem(tensor.dtype, shape, name, position, item.length)
        gaps[-1] += item.before
        gaps.append(item.after)
        position += item.length
    return OutputFile(file=name, tensors=tuple(tensors), is_raw=True, own_header=gaps[0], gaps=tuple(gaps[1:]))


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    return f"in Python: torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={out!r})"


LAYOUT = OutputLayout(lay_out=lay_out, next_step=_next_step)
