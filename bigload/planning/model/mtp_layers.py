"""Layers that predict further tokens (multi-token prediction, "nextn"), which an ordinary forward pass never runs.

Two forms are in use. DeepSeek-V3 and GLM-4.5 store them as blocks that follow the last one of the model
(`model.layers.61` beside `num_hidden_layers: 61`), others under a name of their own (`mtp.layers.0`,
`model.mtp_block`). transformers ignores both when it loads a model (`_keys_to_ignore_on_load_unexpected`).
"""

from __future__ import annotations

from collections.abc import Iterator

from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import ModuleNode, block_lists, is_index


def extra_layers(root: ModuleNode, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the modules below `root` that only predict further tokens, blocks first.

    Blocks are extra when their numbers begin where `config` says that the model ends, the model's own are all there
    and at least as many, and one of two things confirms it: the config's count of such layers, or parts that none of
    the model's own blocks has (`eh_proj`). Otherwise the config is about something else, and no block is extra. Modules
    called `mtp` need no config, unless they are most of the checkpoint: then they are what it is for.

    Example: `num_hidden_layers` 61 and blocks 0 to 61, of which 61 has an `eh_proj`, give `("model.layers.61",)`.
    """
    named = list(_called_mtp(root))
    if 2 * sum(node.num_bytes for node in named) > root.num_bytes:
        named = []
    return (*(node.name for node in _blocks_past_the_last(root, config)), *(node.name for node in named))


def _blocks_past_the_last(root: ModuleNode, config: ModelConfig) -> list[ModuleNode]:
    num_layers = config.count("num_hidden_layers")
    main = max(block_lists(root), key=lambda node: node.num_bytes, default=None)
    if num_layers is None or main is None:
        return []
    blocks = [(int(key), child) for key, child in main.children.items() if is_index(key)]
    own = [child for number, child in blocks if number < num_layers]
    extra = [child for number, child in blocks if number >= num_layers]
    if len(own) != num_layers or len(own) < len(extra):
        return []
    known = {part for block in own for part in block.children}
    told = config.count("num_mtp_layers") or 0
    return extra if len(extra) <= told or all(block.children.keys() - known for block in extra) else []


def _called_mtp(node: ModuleNode) -> Iterator[ModuleNode]:
    if node.is_block_list:
        return
    for key, child in node.children.items():
        if key == "mtp" or key.startswith("mtp_"):
            yield child
        else:
            yield from _called_mtp(child)
