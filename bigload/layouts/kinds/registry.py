"""Registry of output layouts by name. A new one is a module and a line in `LAYOUTS`.

Modules are imported when their layout is asked for: the command line's help needs names and summaries only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from bigload.errors import OptionError

if TYPE_CHECKING:
    from bigload.layouts.kinds.layout import OutputLayout


class RegisteredLayout(NamedTuple):
    """A layout's summary for help texts, and the layout or the module that has it as `LAYOUT`."""

    summary: str
    layout: OutputLayout | str


LAYOUTS: dict[str, RegisteredLayout] = {
    name: RegisteredLayout(summary, f"bigload.layouts.kinds.{module}")
    for name, module, summary in (
        ("devices", "device_folders", "one folder per device of a plan, which then reads one stream"),
        ("offload", "offload_folder", "a file per block, to be brought to a device when a pass needs it"),
        ("shards", "shards", "the same checkpoint in other files; torch files become safetensors"),
        ("ranks", "rank_slices", "one folder per tensor-parallel rank, which then reads only its part"),
        ("gguf", "gguf_file", "one GGUF file, for llama.cpp; --dtype takes q8_0 too"),
        ("dcp", "distributed", "what torch.distributed.checkpoint.load reads"),
        ("vllm", "vllm_shards", "vLLM's sharded_state: a file per rank, names and fusions as there"),
    )
}


_REASONS = {
    "sglang": "SGLang's sharded_state holds weights processed for a GPU, so only SGLang writes it; serve the plain "
    "folder: python -m sglang.launch_server --model-path CHECKPOINT --tp N",
}
"""Why layouts that users ask for do not exist, and what to use instead."""


def layout_named(name: str) -> OutputLayout:
    """Return the layout `name`."""
    if name not in LAYOUTS:
        raise OptionError.of("layout", str(name), f"one of {', '.join(LAYOUTS)}", hint=_REASONS.get(name))
    layout = LAYOUTS[name].layout
    return cast("OutputLayout", import_module(layout).LAYOUT) if isinstance(layout, str) else layout
