"""Tiny random models of transformers by model type, made from the configuration of the type alone, with their inputs.

Sizes are set by the names that configurations have for them, in nested configurations as well.
"""

import copy
import inspect
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bigload import BigloadError, get_state_dict_offloaded_model, init_empty_weights

VOCABULARY = 96
MOST_PARAMETERS = 30_000_000
ROUNDING = 1e-5
"""How far float32 sums may be apart: kernels add in another order where weights begin at another offset in memory."""
WIDTHS = """
    hidden_size d_model n_embd embed_dim emb_dim embedding_size word_embed_proj_dim width input_hidden_size lru_width
    decoder_hidden_size encoder_hidden_size projection_dim projection_size encoder_hidden_dim attention_hidden_size
    cross_attention_hidden_size rescale_dim
"""
INNER_WIDTHS = """
    intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner hidden_dim dim_ff
    shared_expert_intermediate_size expert_ffn_hidden_size
"""
DEPTHS = """
    num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth num_encoder_layers
    num_decoder_layers encoder_num_layers layers
"""
HEADS = """
    num_attention_heads n_head n_heads num_heads encoder_attention_heads heads decoder_attention_heads
    num_encoder_attention_heads num_decoder_attention_heads
"""
SIZES = {
    **dict.fromkeys(WIDTHS.split(), 32),
    **dict.fromkeys(INNER_WIDTHS.split(), 64),
    **dict.fromkeys(DEPTHS.split(), 2),
    **dict.fromkeys(HEADS.split(), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "state_size", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "attention_head_dim", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "time_step_rank", "expert_dim"), 16),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "entity_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 8,
}
LATENT = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
HEAD = {"head_dim": 8}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": RESNET}
DETR |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_attention_heads": 8}
SWIN = {"embed_dim": 24, "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]}
SINCE = {
    **dict.fromkeys(("inkling2_text", "internlm3", "iquestcoder"), (5, 23)),
    **dict.fromkeys(("apertus1p5_text", "dory", "exaone", "hy_v4_vl_text", "inkling2_loop_text", "lara_mini"), (5, 24)),
    **dict.fromkeys(("sarvam_mla", "sarvam_moe", "WavTokenizerModel"), (5, 24)),
    **dict.fromkeys(("HYV4VLForConditionalGeneration", "Inkling2LoopForConditionalGeneration"), (5, 24)),
    **dict.fromkeys(("OmniASRForConditionalGeneration", "OmniASRForCTC"), (5, 24)),
}
"""Releases of transformers that are the first with a type, where bigload takes older ones too."""
OVERRIDES = {
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "conditional_detr": DETR,
    "cosmos3_edge_text": ROPE,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deformable_detr": DETR,
    "detr": DETR,
    "donut-swin": SWIN,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "per_layer_config": {},
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 16, "hidden_size": 32, "num_res_blocks": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "glm5_next_vision": {"projection_intermediate_size": 64, "out_hidden_size": 32},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "gradium_phonon_tts": {
        "num_key_value_heads": 4,
        "flow_head_config": {"condition_dim": 32, "hidden_size": 32, "num_hidden_layers": 1},
    },
    "hunyuan_v1_moe": HEAD,
    "hy_v4_vl_text": ROPE,
    "hunyuan_vl_text": HEAD,
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY - 6},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY - 6},
    "inkling2_vision": {"text_hidden_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "maskformer": {"backbone_config": {"model_type": "swin", **SWIN}, "decoder_config": {"model_type": "detr", **DETR}},
    "mimi": {"upsample_groups": 32, "num_filters": 4},
    "nemotron_h_omni": {
        "vision_config": {
            "model_type": "radio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "video_temporal_patch_size": 2,
        }
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "sapiens2_head": {
        "upsample_out_channels": [8],
        "upsample_kernel_sizes": [4],
        "conv_out_channels": [8],
        "conv_kernel_sizes": [1],
        "scale_conv_out_channels": [8],
        "scale_conv_kernel_sizes": [1],
        "scale_final_input_size": 8,
        "scale_final_hidden_sizes": [8, 8],
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "d_fine": {"backbone_config": None},
    "lw_detr": {"backbone_config": None},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "falcon": {"head_dim": None, "new_decoder_architecture": True},
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None},
    "qwen2_vl_text": ROPE,
    "qwen2_5_vl_text": ROPE,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [2, 32], "axial_pos_embds_dim": [16, 16]},
    "wavtokenizer": {"codebook_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"max_position_embeddings": None},
}
"""What names of sizes do not tell: arguments of a configuration by model type; `None` is the default one."""


TEXT_AND_PARTS = """
    afmoe aimv2_vision_model albert apertus apertus1p5_text arcee aria_text bamba bart beam beit bert bert-generation
    big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert canine chinese_clip_vision_model
    clip_text_model clip_vision_model cohere cohere2 cohere2_moe convbert cpmant ctrl cwm data2vec-audio data2vec-text
    data2vec-vision deberta deberta-v2 deepseek_v3 deepseek_v32 deepseek_v4 deit diffllama dinov2 dinov2_with_registers
    dinov3_vit distilbert doge dory dpr dpt electra ernie ernie4_5 ernie4_5_moe eurobert exaone exaone4 exaone_moe
    falcon falcon_h1 falcon_mamba fastspeech2_conformer flaubert flava flex_olmo flint fnet focalnet fsmt gemma gemma2
    gemma3_text gemma3n_text gemma4_audio git glm glm4 glm4_moe glm4_moe_lite glm5_next_text glmasr_encoder gpt-sw3 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_docling_text granite_swa granitemoe
    granitemoe_swa granitemoeshared gte helium hiera higgs_audio_v2 hrm_text hubert hy_v3 hy_v4 hy_v4_vl_text
    hyperclovax ibert ijepa imagegpt inkling2_loop_text inkling2_text inkling_text internlm3 internvl_vision iquestcoder
    jais2 jamba jetmoe jina_embeddings_v3 kolibri1 kosmos-2.5 laguna lara_mini layoutlm led lfm2 llama llama4_text
    longformer longt5 luke m2m_100 mamba mamba2 marian markuplm mbart megatron-bert mellum mgp-str mimo_v2_flash minimax
    minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 mistral mixtral mlcd mlcd_vision_model mllama mobilebert
    mobilenet_v1 mobilenet_v2 mobilevit modernbert modernbert-decoder molmo2_text moonshine
    moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer_text muse_spark_text mvp nanochat nemotron_h nllb-moe
    nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter opt pegasus pegasus_x
    persimmon phi phi3 phimoe pixio pixtral plbart prophetnet pvt_v2 qianfan_ocr_vision qwen2 qwen2_5_vl qwen2_5_vl_text
    qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text radio recurrent_gemma reformer rembert roberta
    roberta-prelayernorm roformer rwkv sam3_vit_model sam_hq_vision_model sam_vision_model sapiens2 sarvam_mla
    sarvam_moe seamless_m4t seamless_m4t_v2 seed_oss sew sew-d siglip_vision_model smollm3 solar_open splinter
    squeezebert stablelm starcoder2 swiftformer switch_transformers t5 t5gemma tapas tipsv2 tipsv2_text_model
    tipsv2_vision_model trocr ultrabert umt5 unispeech unispeech-sat vaultgemma visual_bert vit vit_mae vit_msn vitdet
    voxtral_encoder voxtral_realtime_encoder wav2vec2 wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta
    xlm-roberta-xl xlnet yolos yoso zaya
"""
WHOLE_MODELS = """
    AltCLIPModel AriaForConditionalGeneration ASTModel AudioFlamingo3ForConditionalGeneration AXK1ForCausalLM
    AXK2ForCausalLM AyaVisionForConditionalGeneration BailingHybridForCausalLM BeitBackbone BeitForSemanticSegmentation
    ChineseCLIPModel CLIPModel CLIPSegModel Cohere2VisionForConditionalGeneration CohereAsrModel ColQwen2ForRetrieval
    ConditionalDetrForSegmentation ConditionalDetrModel Cosmos3EdgeForConditionalGeneration
    Cosmos3OmniForConditionalGeneration DeepseekOcr2ForConditionalGeneration DeepseekV2ForCausalLM
    DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration DeformableDetrModel DepthProModel
    DetrForSegmentation DetrModel DFineModel Dinov2Backbone Dinov2WithRegistersBackbone DINOv3ConvNextModel
    Dots1ForCausalLM Dots3NoteTextModel Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
    EsmForMaskedLM FuyuForCausalLM Gemma3ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration GlmAsrForConditionalGeneration
    GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration GradiumPhononTTSModel GraniteMoeHybridForCausalLM
    GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration GroundingDinoModel
    HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration
    HYV4VLForConditionalGeneration Inkling2ForConditionalGeneration Inkling2LoopForConditionalGeneration
    InklingForConditionalGeneration InternVLForConditionalGeneration JevForDecision Kimi_K25ForConditionalGeneration
    KimiLinearForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Lfm3ForCausalLM
    Lfm3VlForConditionalGeneration Lfm3VlVisionModel LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM LwDetrModel
    Mask2FormerModel MaskFormerModel MetaClip2Model MimiEncoderModel MimiModel MiniCPMOcrForConditionalGeneration
    MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration Mistral3ForConditionalGeneration
    MistralLarge4ForConditionalGeneration MistralLarge4TextModel MLCDVisionModel MllamaForConditionalGeneration
    MMGroundingDinoModel ModernVBertModel Molmo2ForConditionalGeneration MusicFlamingoForConditionalGeneration
    NemotronH_Omni_Reasoning_V3 OmniASRForConditionalGeneration OmniASRForCTC OneFormerModel
    PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PI0ForConditionalGeneration
    PPDocLayoutV2ForObjectDetection PPDocLayoutV3Model PPDocLayoutV4Model QianfanOCRForConditionalGeneration
    Qwen2_5_VLForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration Qwen2AudioForConditionalGeneration
    Qwen2VLForConditionalGeneration Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration
    Qwen3OmniMoeThinkerForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration RfDetrForInstanceSegmentation RfDetrForObjectDetection
    RfDetrModel RTDetrModel RTDetrV2Model Sam3Model Sam3TrackerModel Sam3TrackerVideoModel Sam3VideoModel
    Sapiens2ForImageMatting Sapiens2ForNormalEstimation Sapiens2ForPointmapEstimation Sapiens2ForPoseEstimation
    Sapiens2ForSemanticSegmentation SegformerForSemanticSegmentation SegformerModel ShieldGemma2ForImageClassification
    Siglip2Model Siglip2VisionModel SiglipModel Step3p7ForConditionalGeneration SwinBackbone SwinModel
    T5Gemma2ForConditionalGeneration TimesFm2_5Model Tipsv2DptForDepthEstimation Tipsv2DptForNormalEstimation
    Tipsv2DptForSemanticSegmentation Tipsv2VisionBackbone UltrabertForQuestionAnswering
    UltrabertForSequenceClassification UltrabertForTokenClassification UltraVBertForMaskedLM UltraVBertModel
    UnlimitedOcrForConditionalGeneration VibeVoiceAsrForConditionalGeneration VideoLlavaForConditionalGeneration
    VideoMAEModel VipLlavaForConditionalGeneration ViTMAEForPreTraining ViTMSNForImageClassification VivitModel
    VoxtralForConditionalGeneration VoxtralRealtimeForConditionalGeneration WavTokenizerModel
"""
NAMES = [*TEXT_AND_PARTS.split(), *WHOLE_MODELS.split()]
"""Model types, and classes of models for images, sound and text, or with a head that has names of its own."""


def configuration(transformers, name):
    """Return a tiny configuration of a model type or class."""
    kind = class_of(transformers, name).config_class if name[0].isupper() else transformers.CONFIG_MAPPING[name]
    return kind(**arguments(kind, kind.model_type))


def arguments(kind, model_type):
    default = kind()
    default.allow_global_per_layer_attribute_access = True
    known = {name: size for name, size in SIZES.items() if isinstance(getattr(default, name, None), int)}
    for name, value in vars(default).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            known[name] = VOCABULARY - 1 - len(known) % 20
        if name.endswith("_token_id") and isinstance(value, list):
            known[name] = [2]
    nested = {name: _nested(each, getattr(default, name, None)) for name, each in kind.sub_configs.items()}
    nested = {name: each for name, each in nested.items() if each is not None}
    found = {**known, **nested, **OVERRIDES.get(model_type, {})}
    return {name: value for name, value in found.items() if value is not None}


def _nested(kind, default):
    """Return the arguments of a nested configuration, whose type is another one's to choose where `kind` is auto."""
    if default is None:
        return None
    inner = arguments(type(default), default.model_type)
    return {"model_type": default.model_type, **inner} if kind.__name__ == "AutoConfig" else inner


def release(transformers):
    """Return the first two numbers of its version, to say what came with which."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def need(transformers, model_type):
    """Skip a test of a type that came with a later release."""
    if release(transformers) < SINCE.get(model_type, (0, 0)):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def class_of(transformers, model_type):
    """Return the class of the type that people load: for text if there is one, else the base. A class has its name."""
    need(transformers, model_type)
    if model_type[0].isupper():
        return getattr(transformers, model_type)
    from transformers.models.auto import modeling_auto

    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        name = mapping.get(model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(model_type)


def saved(transformers, name, folder):
    """Save a random model of a type or class as `save_pretrained` does; return what `from_pretrained` makes of it."""
    kind, config = class_of(transformers, name), configuration(transformers, name)
    with torch.device("meta"):
        assert sum(each.numel() for each in kind(config).parameters()) < MOST_PARAMETERS
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():  # biases and norms too, so that a lost one shows
        torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0  # as `from_pretrained` makes it, whatever was saved
    model.save_pretrained(folder)
    return plain(kind, folder)


def plain(kind, folder):
    """Return what `from_pretrained` makes of a saved model; its experts in the loop whose bits offloaded ones have."""
    return kind.from_pretrained(folder, experts_implementation="eager").eval()


def empty(kind, folder):
    """Return the model without weights, by the config that was saved with them; see `plain`."""
    config = kind.config_class.from_pretrained(folder)
    config._experts_implementation = "eager"
    with init_empty_weights():
        return kind(config).eval()


def outcome(make, plain, *others):
    """Return what comes of the model that `make` returns: whether it has the values of `plain` and answers the same.

    Two forwards, since some defects show in the second only. Where `plain` has no answer to tokens alone, values count.
    Bits depend on where weights begin in memory: in a file that is mapped, as for `plain`, or aligned, as in a copy;
    and on kernels, so that `others` may be that model on another device.
    """
    try:
        expected = [answers(each) for each in (plain, copy.deepcopy(plain), *others)]
    except Exception:
        expected = []
    try:
        model = make()
        different = [] if model is plain else differences(values(model), values(plain))
        if different:
            return f"wrong: {len(different)} tensors, {', '.join(different[:3])}"
        if not expected:
            return "equal values"
        first, second = (answers(model) for _ in range(2))
    except BigloadError as error:
        return f"refused: {type(error).__name__}: {error.message}; {(error.hint or '').split(';')[0]}"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {error}".replace("\n", " ")[:300]
    difference = min(max(deviation(first, each), deviation(second, each)) for each in expected)
    if difference == 0:
        return "equal"
    is_steady = not deviation(first, second)
    return "equal but for rounding" if difference < ROUNDING and is_steady else f"wrong: {difference}"


def differences(found, expected):
    """Return the names under which not the same bits are."""
    same = (
        name
        for name in found.keys() & expected.keys()
        if found[name].dtype == expected[name].dtype
        and torch.equal(found[name].nan_to_num(), expected[name].nan_to_num())
    )
    return sorted((found.keys() | expected.keys()) - set(same))


def deviation(found, expected):
    """Return the largest difference, as a part of the largest value of a tensor."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    apart = [
        (one.nan_to_num() - other.nan_to_num()).abs().max() / other.nan_to_num().abs().max().clamp(min=1e-30)
        for one, other in zip(found, expected, strict=True)
        if one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num())
    ]
    return max(map(float, apart), default=0.0)


def inputs_of(model):
    """Return what the model takes, on the CPU."""
    torch.manual_seed(1)
    ids = torch.arange(3, 11).reshape(1, 8)
    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        inner = getattr(config, "vision_config", config)
        size = getattr(inner, "image_size", 16)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {main: torch.randn(1, getattr(inner, "num_channels", 3), height, width)}
    if main in ("input_values", "input_features"):
        bins = getattr(config, "num_mel_bins", None)
        inputs = {main: torch.randn(1, 1600) if main == "input_values" else torch.randn(1, bins or 8, 128)}
    else:
        inputs = {"input_ids": ids}
    named = inspect.signature(model.forward).parameters
    if "attention_mask" in named and main == "input_ids":
        inputs["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in named:
        inputs["decoder_input_ids"] = ids[:, :5]
    return inputs


def values(model):
    """Return all tensors of the model by name, wherever they are, also those that checkpoints do not hold."""
    others = {name: each.to("cpu") for name, each in model.named_buffers(remove_duplicate=False) if not each.is_meta}
    return {**others, **get_state_dict_offloaded_model(model)}


def answers(model):
    """Return all floating-point tensors that the model answers with, in order."""
    inputs = inputs_of(model)
    if not hasattr(model, "hf_device_map") and model.device.type != "meta":
        inputs = {name: each.to(model.device) for name, each in inputs.items()}
    torch.manual_seed(2)
    with torch.no_grad():
        return list(tensors_of(model(**inputs)))


def tensors_of(value):
    """Yield copies of the floating-point tensors in an answer, in order, on the CPU."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value.clone().cpu()
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


@contextmanager
def table_of_outcomes(request):
    """Yield a dictionary for what comes of each type and way; print a table of it at the end."""
    found = {}
    yield found
    counts = Counter(outcome.split(":")[0] for outcome in found.values())
    rows = [
        f"| {kind} | {way} | {text} |" for (kind, way), text in found.items() if text not in ("equal", "equal values")
    ]
    lines = [f"{len({kind for kind, _ in found})} types: {dict(counts)}", ""]
    lines += ["| type | way | outcome |", "|---|---|---|", *rows]
    path = os.environ.get("BIGLOAD_MODEL_TYPES_TABLE")
    if path:
        with Path(path).open("a") as file:
            file.write("\n".join(lines) + "\n\n")
    writer = request.config.get_terminal_writer()
    for line in ("", *lines):
        writer.line(line)
