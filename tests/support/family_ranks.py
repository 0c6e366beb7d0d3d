"""Jobs of ranks with models of transformers: compare with one process, and report what each rank holds."""

import torch
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bigload.parallel.tensor_parallel.apply import apply_tensor_parallel, plan_tensor_parallel
from parallel_families import inputs_of, logits_of, make

WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def compare(families):
    """Return by family how logits differ, which ways of generating give the same tokens, and this rank's share."""
    import transformers

    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh("cpu", (get_world_size(),))
    return {family: _compared(transformers, family, mesh) for family in families}


def _compared(transformers, family, mesh):
    model = make(transformers, family)
    total = sum(parameter.numel() for parameter in model.parameters())
    expected, tokens = _logits(model), _tokens(transformers, model)
    apply_tensor_parallel(model, plan_tensor_parallel(model, mesh.size()), mesh)
    difference = float((_logits(model) - expected).abs().max() / expected.abs().max())
    now = _tokens(transformers, model)
    return {
        "difference": difference,
        "same_tokens": {way: now[way] == tokens[way] for way in tokens},
        "share": sum(_local(parameter).numel() for parameter in model.parameters()) / total,
    }


def _logits(model):
    with torch.no_grad():
        return logits_of(model(**inputs_of(model)))


def _tokens(transformers, model):
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return {}
    inputs = {name: value for name, value in inputs_of(model).items() if name != "decoder_input_ids"}
    tokens = {}
    for way, options in WAYS.items():
        torch.manual_seed(3)
        found = transformers.GenerationMixin.generate(model, **inputs, max_new_tokens=8, **options)
        tokens[way] = found.tolist()
    return tokens


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
