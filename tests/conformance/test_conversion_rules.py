"""Conversions derived from the table are those that transformers' own loader makes, of every tiny type."""

import pytest
import torch
from model_types import configuration

from bigload.conversion.without_transformers.checkpoint_conversion import conversion_of_checkpoint
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="transformers is not installed")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping", reason="transformers is not installed")
core_model_loading = pytest.importorskip("transformers.core_model_loading", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


EXCEPTIONS = {
    **dict.fromkeys(("d_fine", "deimv2"), "outermost modules depend on the configuration"),
    "longcat_flash": "experts that have no down_proj look incomplete to the table, which knows no shapes of the model",
    "ultravbert": "whether there is a head that transformers ignores depends on the configuration",
    "qwen2_5_omni_thinker": "transformers does not load what it has saved",
    "qwen3_omni_moe_thinker": "transformers does not load what it has saved",
}
HEADS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")


def as_saved(model):
    """Return the tensors of the checkpoint that `save_pretrained` would write, without writing it."""
    model._weight_conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    state = core_model_loading.revert_weight_conversion(model, model.state_dict())
    tied = model.all_tied_weights_keys
    return {
        name: ("F32", list(tensor.shape))
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and name not in tied
    }


def built(kind, config):
    with torch.device("meta"):
        return kind(config)


def config_of(model):
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def classes():
    """Yield names of classes: per model type the base model and each head, those that can be built tiny."""
    for model_type in sorted(auto.MODEL_MAPPING_NAMES):
        names = [auto.MODEL_MAPPING_NAMES[model_type]]
        names += [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(model_type) for head in HEADS]
        for name in dict.fromkeys(names):
            if isinstance(name, str):
                yield model_type, name


@pytest.mark.parametrize(("model_type", "name"), list(classes()))
def test_the_table_makes_the_conversion_that_transformers_makes(model_type, name):
    from bigload.conversion.with_transformers.models import conversion_for

    if model_type in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[model_type])
    kind = getattr(transformers, name, None)
    try:
        model = built(kind, configuration(transformers, model_type))
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}: {error}")
    checkpoint = checkpoint_of(as_saved(model), config=config_of(model))
    expected = conversion_for(model, checkpoint.tensors)
    found = conversion_of_checkpoint(checkpoint)
    assert set(found.tensors) ^ set(expected.tensors) == set()
    assert {n for n in found.tensors if found.tensors[n] != expected.tensors[n]} == set()
    assert (found.unexpected, found.ignored, found.problems) == (
        expected.unexpected,
        expected.ignored,
        expected.problems,
    )
