"""Activations as bigload estimates them, against the memory that a forward pass of transformers holds at its peak.

Nothing is computed: tensors on the meta device have sizes and life spans but no data. For fused attention stands
its output alone, since its kernels keep nothing else.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigload.planning.activations import PREFILL_CHUNK
from bigload.planning.run_memory import run_memory
from bigload.planning.tree import build_tree, is_index
from bigload.planning.workload import Workload
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SIZES = {"num_hidden_layers": 2, "vocab_size": 512, "num_attention_heads": 32, "attn_implementation": "sdpa"}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

CONFIGS = {
    "gated, grouped": transformers.LlamaConfig(
        **SIZES, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8
    ),
    "plain, all heads": transformers.GPTNeoXConfig(**SIZES, hidden_size=4096, intermediate_size=16384),
    "fused gate": transformers.Phi3Config(**SIZES, hidden_size=3072, intermediate_size=8192, pad_token_id=0),
    "wide experts": transformers.MixtralConfig(
        **SIZES, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, num_local_experts=8
    ),
    "latent, narrow experts": transformers.DeepseekV3Config(
        **SIZES, **LATENT, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=8,
        num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, those of a model left out, and remembers the most."""

    def __init__(self, model):
        super().__init__()
        self.weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.alive, self.held, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key = storage._cdata
        if key in self.weights or key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.free, key)

    def free(self, key):
        self.held -= self.alive.pop(key)


def held_at_peak(model, chunks):
    """Return the bytes that a prompt of so many chunks holds at its peak, without weights and cache."""
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.zeros(1, PREFILL_CHUNK, dtype=torch.long, device="meta")
    with torch.device("meta"), torch.no_grad(), Held(model) as held:
        for _ in range(chunks):
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return held.peak - sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def estimated(model, chunks):
    forms = {name: ("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    tensors = checkpoint_of(forms).tensors
    blocks = [node for node in build_tree(tensors.values()).walk() if is_index(node.name.rpartition(".")[2])]
    workload = Workload(context=chunks * PREFILL_CHUNK)
    return run_memory(blocks, tensors, model.config.to_dict(), workload).activation_bytes


@pytest.mark.parametrize("chunks", [1, 4, 8])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_the_estimate_is_near_the_peak(config, chunks, monkeypatch):
    def only_output(query, key, value, *args, **options):
        return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", only_output)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert 0.8 <= estimated(model, chunks) / held_at_peak(model, chunks) <= 1.5
