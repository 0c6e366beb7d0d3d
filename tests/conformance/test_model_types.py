"""Model types of transformers, as `save_pretrained` writes them, loaded and dispatched in all ways: right or refused.

A model may be refused that computes with an offloaded weight of another module. Names are no reason: tensors that
transformers renames, fuses, splits or reorders while it loads are loaded so here too. An answer that differs from the
plain model's, or an error of somebody else's, is a failure. Ends with a table of what was refused;
`BIGLOAD_MODEL_TYPES_TABLE=path` writes it to a file.
"""

import logging
import os
from collections import Counter
from pathlib import Path

import model_types
import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FEWEST_TYPES = 128
ROUNDING = 1e-5
"""How far float32 sums may be apart: kernels add in another order where weights begin at another offset in memory."""
NAMES = """
    afmoe aimv2_vision_model albert apertus arcee aria_text bamba bart beam beit bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert canine chinese_clip_vision_model
    clip_text_model clip_vision_model cohere cohere2 cohere2_moe convbert cpmant ctrl cwm data2vec-audio data2vec-text
    data2vec-vision deberta deberta-v2 deepseek_v3 deepseek_v32 deepseek_v4 deit diffllama dinov2 dinov2_with_registers
    dinov3_vit distilbert doge dpr dpt electra ernie ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe falcon falcon_h1
    falcon_mamba fastspeech2_conformer flaubert flava flex_olmo flint fnet focalnet fsmt gemma gemma2 gemma3_text
    gemma4_audio git glm glm4 glm4_moe glm4_moe_lite glmasr_encoder gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gpt_oss gptj granite granite_docling_text granite_swa granitemoe granitemoe_swa granitemoeshared
    gte helium hiera higgs_audio_v2 hrm_text hubert hy_v3 hy_v4 hyperclovax ibert ijepa imagegpt inkling2_text
    inkling_text internlm3 internvl_vision iquestcoder jais2 jamba jetmoe jina_embeddings_v3 kolibri1 kosmos-2.5 laguna
    layoutlm led lfm2 llama llama4_text longformer longt5 luke m2m_100 mamba mamba2 marian markuplm mbart megatron-bert
    mellum mgp-str mimo_v2_flash minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 mistral mixtral mlcd
    mlcd_vision_model mllama mobilebert mobilenet_v1 mobilenet_v2 mobilevit modernbert modernbert-decoder molmo2_text
    moonshine moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer_text muse_spark_text mvp nanochat nemotron_h
    nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter opt pegasus
    pegasus_x persimmon phi phi3 phimoe pixio pixtral plbart prophetnet pvt_v2 qianfan_ocr_vision qwen2 qwen2_5_vl
    qwen2_5_vl_text qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text radio recurrent_gemma reformer rembert roberta
    roberta-prelayernorm roformer rwkv sam3_vit_model sam_hq_vision_model sam_vision_model sapiens2 seamless_m4t
    seamless_m4t_v2 seed_oss sew sew-d siglip_vision_model smollm3 solar_open splinter squeezebert stablelm starcoder2
    swiftformer switch_transformers t5 t5gemma tapas tipsv2 tipsv2_text_model tipsv2_vision_model trocr ultrabert umt5
    unispeech unispeech-sat vaultgemma visual_bert vit vit_mae vit_msn vitdet voxtral_encoder voxtral_realtime_encoder
    wav2vec2 wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet yolos yoso zaya
"""
TYPES = NAMES.split()


def empty(kind, folder):
    """Return the model without weights, by the config that was saved with them."""
    config = kind.config_class.from_pretrained(folder)
    with bigload.init_empty_weights():
        return kind(config).eval()


def half_map(model):
    half = bigload.compute_module_sizes(model)[""] // 2
    return bigload.infer_auto_device_map(model, {"cpu": half}, model._no_split_modules)


def on_cpu(kind, folder, _):
    return bigload.load_checkpoint_and_dispatch(empty(kind, folder), folder, {"": "cpu"})


def on_cpu_and_disk(kind, folder, _):
    model = empty(kind, folder)
    return bigload.load_checkpoint_and_dispatch(model, folder, half_map(model))


def on_disk(kind, folder, _):
    return bigload.load_checkpoint_and_dispatch(empty(kind, folder), folder, {"": "disk"})


def by_a_plan(kind, folder, _):
    return bigload.load_and_dispatch(empty(kind, folder), smallest_plan(bigload.open_checkpoint(folder)))


def smallest_plan(checkpoint):
    """Return a plan that has as much on disk as a tiny model allows, whose one embedding may be most of it."""
    for tenths in range(5, 20):
        try:
            return bigload.plan(checkpoint, {"cpu": checkpoint.total_bytes * tenths // 10})
        except bigload.DoesNotFitError:
            continue
    pytest.fail("no plan with twice the memory that the weights take")


def loaded_into(kind, folder, _):
    model = empty(kind, folder)
    bigload.load(folder, into=model, strict=False)
    return model


def dispatched(kind, folder, offload):
    model = kind.from_pretrained(folder).eval()
    return bigload.dispatch_model(model, half_map(model), offload_dir=offload)


def offloaded(kind, folder, _):
    return bigload.cpu_offload(kind.from_pretrained(folder).eval(), "cpu", prefetch=False)


WAYS = {
    "cpu": on_cpu,
    "cpu and disk": on_cpu_and_disk,
    "disk": on_disk,
    "plan": by_a_plan,
    "load(into=)": loaded_into,
    "dispatch_model": dispatched,
    "cpu_offload": offloaded,
}


@pytest.fixture(scope="module")
def outcomes(request):
    """What came of each type and way; a table of it at the end."""
    found = {}
    yield found
    counts = Counter(outcome.split(":")[0] for outcome in found.values())
    rows = [f"| {kind} | {way} | {text} |" for (kind, way), text in found.items() if not text.startswith("equal")]
    lines = [
        f"{len({kind for kind, _ in found})} types: {dict(counts)}",
        "",
        "| type | way | outcome |",
        "|---|---|---|",
        *rows,
    ]
    path = os.environ.get("BIGLOAD_MODEL_TYPES_TABLE")
    if path:
        Path(path).write_text("\n".join(lines) + "\n")
    writer = request.config.get_terminal_writer()
    writer.line()
    for line in lines:
        writer.line(line)


@pytest.fixture(scope="module", autouse=True)
def quietly():
    level = logging.getLogger("bigload").level
    logging.getLogger("bigload").setLevel(logging.ERROR)
    yield
    logging.getLogger("bigload").setLevel(level)


def test_there_are_enough_types():
    assert len(set(TYPES)) >= FEWEST_TYPES


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_answers_as_the_plain_model_or_is_refused(model_type, tmp_path, outcomes):
    kind = model_types.class_of(transformers, model_type)
    config = model_types.configuration(transformers, model_type)
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():  # biases and norms too, so that a lost one shows
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "model")
    expected = model_types.answers(kind.from_pretrained(tmp_path / "model").eval())
    found = {way: outcome(way, kind, tmp_path, expected) for way in WAYS}
    outcomes.update({(model_type, way): text for way, text in found.items()})
    answered = ("equal", "refused: AbsentWeightError")
    assert {way: text for way, text in found.items() if not text.startswith(answered)} == {}


def outcome(way, kind, folder, expected):
    """Return what comes of two forwards, since some defects show in the second only."""
    try:
        model = WAYS[way](kind, folder / "model", folder / "offload")
        first, second = (model_types.answers(model) for _ in range(2))
    except bigload.BigloadError as error:
        return f"refused: {type(error).__name__}: {error.message}; {(error.hint or '').split(';')[0]}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {error}".replace("\n", " ")[:300]
    difference = max(deviation(first, expected), deviation(second, expected))
    if difference == 0:
        return "equal"
    return (
        "equal but for rounding" if difference < ROUNDING and not deviation(first, second) else f"wrong: {difference}"
    )


def deviation(answers, expected):
    """Return the largest difference, as a part of the largest value of a tensor."""
    if [each.shape for each in answers] != [each.shape for each in expected]:
        return float("inf")
    found = [
        (one.nan_to_num() - other.nan_to_num()).abs().max() / other.nan_to_num().abs().max().clamp(min=1e-30)
        for one, other in zip(answers, expected, strict=True)
        if one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num())
    ]
    return max(map(float, found), default=0.0)
