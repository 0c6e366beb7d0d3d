"""Structure from names alone, held against catalogues of public models, which know what the models' classes say.

BIGLOAD_CATALOGUES names a folder of `<model>.json.gz`, each an object with `tensors` (name to dtype and shape),
`config`, `blocks` (name in memory, class and checkpoint prefix of every instance of a class in `_no_split_modules`),
and `tied_weights` (name in memory of the copy to that of the source). Without it these tests skip.
"""

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from bigload.planning.model.config import ModelConfig
from bigload.planning.model.experts import dense_parts, routed_experts
from bigload.planning.model.module_tree import blocks_of, build_tree
from bigload.planning.model.mtp_layers import extra_layers
from bigload.planning.model.ties import find_ties
from bigload.planning.model.units import UnitKind, cut_into_units
from builders import checkpoint_of

FOLDER = os.environ.get("BIGLOAD_CATALOGUES")
CATALOGUES = sorted(Path(FOLDER).glob("*.json.gz")) if FOLDER else []

pytestmark = pytest.mark.skipif(not CATALOGUES, reason="BIGLOAD_CATALOGUES names no folder of catalogues")

MORE_BLOCKS = {
    r"albert.encoder.albert_layer_groups.\d+": "ALBERT declares nothing; its one layer, used twelve times, is a block",
    r"wav2vec2.encoder.layers.\d+": "wav2vec2 declares nothing; its layers are blocks like those of any encoder",
    r"wav2vec2.feature_extractor.conv_layers.\d+": "wav2vec2 declares nothing; a convolution keeps its norm",
    r"mask_decoder.transformer.layers.\d+": "SAM declares the layers of its image encoder only",
    r"mask_decoder.output_hypernetworks_mlps.\d+": "SAM's small MLPs stay whole each, which costs nothing",
    r"model.layers.61": "DeepSeek-V3's layer that predicts a further token, which transformers does not build",
}
"""Blocks by their names that no class declares, with the reason: a superset."""

SPLIT = {
    r"convnext.encoder.stages.\d+": "a stage is most of a device; its layers, which are declared too, stay whole",
}
"""Declared blocks that are cut further, with the reason: finer."""


class Catalogue:
    def __init__(self, path):
        document = json.loads(gzip.decompress(path.read_bytes()))
        self.blocks = {prefix for _, _, prefix in document["blocks"] if prefix}
        self.tied = document["tied_weights"]
        self.checkpoint = checkpoint_of(document["tensors"], config=document["config"])
        self.root = build_tree(self.checkpoint.tensors)
        self.units = cut_into_units(self.root, find_ties(self.checkpoint))
        self.parts = [part for unit in cut_into_units(self.root) for part in unit.parts]


@pytest.fixture(scope="module", params=CATALOGUES, ids=lambda path: path.name.removesuffix(".json.gz"))
def catalogue(request):
    return Catalogue(request.param)


def matches(name, patterns):
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def is_below(name, key):
    return f"{name}.".startswith(f"{key}.")


def test_every_declared_block_is_whole_in_one_key(catalogue):
    keys = [part.name for part in catalogue.parts]
    split = {block for block in catalogue.blocks if not any(is_below(block, key) for key in keys)}
    assert not {block for block in split if not matches(block, SPLIT)}


def test_every_block_is_a_declared_one_or_documented(catalogue):
    blocks = {part.name for part in catalogue.parts if part.kind is UnitKind.BLOCK}
    assert not {block for block in blocks - catalogue.blocks if not matches(block, MORE_BLOCKS)}


def test_blocks_of_one_list_follow_each_other_in_the_order_of_their_numbers(catalogue):
    places = {}
    for place, part in enumerate(catalogue.parts):
        if part.kind is UnitKind.BLOCK:
            prefix, _, number = part.name.rpartition(".")
            places.setdefault(prefix, []).append((place, int(number)))
    for found in places.values():
        assert [place for place, _ in found] == list(range(found[0][0], found[0][0] + len(found)))
        assert [number for _, number in found] == sorted(number for _, number in found)


EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|wpe|word_embeddings|embed_in|embeddings?|patch_embed\w*|shared)")
END = re.compile(
    r"(.*\.)?(lm_head|embed_out|classifier|pooler|cls|predictions|norm|norm_f|ln_f|(final|post)_layer_?norm)"
)


def test_embeddings_come_before_the_blocks_beside_them_and_norms_and_heads_after(catalogue):
    blocks = [place for place, part in enumerate(catalogue.parts) if part.kind is UnitKind.BLOCK]
    for place, part in enumerate(catalogue.parts):
        parent = part.name.rpartition(".")[0]
        beside = [other for other in blocks if not parent or is_below(catalogue.parts[other].name, parent)]
        if EMBEDDING.fullmatch(part.name):
            assert place < min(beside, default=len(catalogue.parts)), part.name
        if END.fullmatch(part.name):
            assert place > max(beside, default=-1), part.name


def test_no_tensor_is_a_module(catalogue):
    assert not {node.name for node in catalogue.root.walk()} & set(catalogue.checkpoint.tensors)


def test_every_tensor_is_below_one_key(catalogue):
    keys = {part.name for part in catalogue.parts}
    for name in catalogue.checkpoint.tensors:
        parts = name.split(".")
        assert sum(".".join(parts[:end]) in keys for end in range(1, len(parts) + 1)) == 1


def test_tied_weights_are_in_one_unit(catalogue):
    ties = find_ties(catalogue.checkpoint)
    for pair in catalogue.tied.items():
        modules = [name.rpartition(".")[0] for name in pair]
        holders = [unit for unit in catalogue.units if any(holds(part.name, modules) for part in unit.parts)]
        absent = [
            tie for tie in ties if any(is_below(module, absent) for module in modules for absent in tie.absent_modules)
        ]
        assert len(holders) == 1 or absent, pair


def holds(key, modules):
    # A checkpoint may lack the prefix that the model in memory has (bloom's `transformer.`).
    return any(is_below(module, key) or is_below(module.partition(".")[2], key) for module in modules)


def test_layers_that_predict_further_tokens_are_deepseeks(catalogue):
    extra = extra_layers(catalogue.root, ModelConfig(catalogue.checkpoint.config))
    is_deepseek = catalogue.checkpoint.config.get("num_nextn_predict_layers") == 1
    assert extra == (("model.layers.61",) if is_deepseek else ())


def test_experts_and_dense_parts_hold_every_block_exactly(catalogue):
    for block in blocks_of(catalogue.root):
        experts = routed_experts(block, ModelConfig(catalogue.checkpoint.config))
        assert (experts is not None) == any(".experts." in tensor.name for tensor in block.all_tensors())
        if experts is not None:
            dense = dense_parts(block, experts)
            assert experts.num_bytes + sum(part.num_bytes for part in dense) == block.num_bytes
            assert experts.top_k is not None
            assert experts.top_k < experts.num_experts


ROUTED_GIB = {
    "deepseek-v3": (619.7, 256, 8),
    "gpt-oss-120b": (56.8, 128, 4),
    "mixtral-8x22b": (252.0, 8, 2),
    "qwen3-30b-a3b": (54.0, 128, 8),
    "qwen3-next-80b": (144.0, 512, 10),
    "dbrx": (236.2, 16, 4),
}
"""GiB of all routed experts, how many a block has, and how many of them run."""


@pytest.mark.parametrize("model", ROUTED_GIB)
def test_routed_experts_weigh_what_is_known_of_the_model(model):
    path = next((path for path in CATALOGUES if path.name == f"{model}.json.gz"), None)
    if path is None:
        pytest.skip(f"no catalogue of {model}")
    found = Catalogue(path)
    experts = [routed_experts(block, ModelConfig(found.checkpoint.config)) for block in blocks_of(found.root)]
    routed = [one for one in experts if one is not None]
    gib = round(sum(one.num_bytes for one in routed) / 2**30, 1)
    assert {(gib, one.num_experts, one.top_k) for one in routed} == {ROUTED_GIB[model]}
