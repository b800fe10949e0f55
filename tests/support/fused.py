"""Small models of Transformers that put features of pictures or sound into a text."""

from __future__ import annotations

from typing import Any

from tests.support.processors import SIZES, VISION, VOCABULARY

PLACEHOLDER = 98
MODALITY = {"GraniteSpeech": "audio", "Voxtral": "audio"}  # others take images
_TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "num_key_value_heads": 2}
_TEXT |= {"head_dim": 8, "pad_token_id": 0, "rms_norm_eps": 1e-6, "model_type": "llama"}
_CLIP = VISION | {"model_type": "clip_vision_model"}
_SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = SIZES | {"model_type": "pixtral", "image_size": 32, "patch_size": 8, "head_dim": 8}
_OPT = {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1} | {
    "num_attention_heads": 4, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_BART = {"model_type": "bart", "vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 128} | {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 32}.items()
}
_ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
_DAVIT = {"embed_dim": [8] * 4, "depths": [1] * 4, "num_heads": [1] * 4, "num_groups": [1] * 4}
_TILED = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4} | {
    "intermediate_size": 32, "image_size": 32, "patch_size": 8, "vision_output_dim": 64,
    "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    "max_num_tiles": 3,
}  # fmt: skip
_PARTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}

# of each architecture: the settings, and the parts that pictures or sound pass through
FUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Llava": (
        {"vision_config": _CLIP, "vision_feature_layer": -1},
        ("vision_tower", "multi_modal_projector"),
    ),
    "LlavaNext": (
        {"vision_config": _CLIP, "vision_feature_layer": -1, **_PARTS},
        ("vision_tower", "multi_modal_projector"),
    ),
    "Qwen2VL": (
        {
            "text_config": _TEXT | {"rope_parameters": _ROTARY},
            "vision_config": _QWEN | {"embed_dim": 16, "mlp_ratio": 2},
        },
        ("visual",),
    ),
    "Qwen2_5_VL": (
        {
            "text_config": _TEXT | {"rope_parameters": _ROTARY},
            "vision_config": _QWEN
            | {"intermediate_size": 32, "fullatt_block_indexes": [0], "window_size": 16},
        },
        ("visual",),
    ),
    "Qwen3VLMoe": (
        {
            "text_config": _TEXT
            | {"rope_parameters": _ROTARY, "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 16},
            "vision_config": _QWEN
            | {"intermediate_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        ("visual",),
    ),
    "PaliGemma": (
        {
            "text_config": _TEXT | {"model_type": "gemma"},
            "vision_config": _SIGLIP | {"projection_dim": 32},
            "projection_dim": 32,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "Gemma3": (
        {
            "text_config": _TEXT | {"model_type": "gemma3_text"},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "Idefics3": ({"vision_config": VISION, "scale_factor": 2}, ("vision_model", "connector")),
    "SmolVLM": ({"vision_config": VISION, "scale_factor": 2}, ("vision_model", "connector")),
    "InternVL": (
        {
            "vision_config": SIZES
            | {"image_size": [32, 32], "patch_size": [8, 8], "model_type": "internvl_vision"}
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "Mistral3": (
        {"text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _PIXTRAL},
        ("vision_tower", "multi_modal_projector"),
    ),
    "AyaVision": (
        {"text_config": _TEXT | {"model_type": "cohere2"}, "vision_config": _SIGLIP, "downsample_factor": 2},
        ("vision_tower", "multi_modal_projector"),
    ),
    "Blip2": (
        {
            "text_config": _OPT,
            "vision_config": VISION,
            "qformer_config": SIZES | {"vocab_size": VOCABULARY, "encoder_hidden_size": 32},
            "num_query_tokens": 4,
        },
        ("vision_model", "qformer", "language_projection"),
    ),
    "Florence2": (
        {"text_config": _BART, "vision_config": _DAVIT | {"window_size": 4, "projection_dim": 32}},
        ("vision_tower", "multi_modal_projector"),
    ),
    "Mllama": (
        {
            "text_config": _TEXT
            | {"model_type": "mllama_text_model", "cross_attention_layers": [0]}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "vision_config": _TILED,
        },
        ("vision_model", "multi_modal_projector"),
    ),
    "Lfm2Vl": (
        {
            "text_config": _TEXT | {"model_type": "lfm2", "layer_types": ["full_attention"]},
            "vision_config": SIZES
            | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16}
            | {"vision_use_head": False},
            "projector_hidden_size": 32,
        },
        ("vision_tower", "multi_modal_projector"),
    ),
    "GraniteSpeech": (
        {
            "encoder_config": {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "dim_head": 8}
            | {
                "feedforward_mult": 1,
                "input_dim": 16,
                "output_dim": 20,
                "context_size": 20,
                "max_pos_emb": 20,
            },
            "text_config": _TEXT | {"model_type": "granite"},
            "projector_config": SIZES | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32},
            "has_lora_adapter": False,
        },
        ("encoder", "projector"),
    ),
    "Voxtral": (
        {
            "audio_config": SIZES
            | {"intermediate_size": 128, "num_mel_bins": 16, "max_source_positions": 32},
        },
        ("audio_tower", "multi_modal_projector"),
    ),
}


def fused_model(name: str, **settings: Any) -> Any:
    """Return a model of an architecture in ``FUSED``."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{"text_config": _TEXT, **FUSED[name][0], **settings})
    setattr(config, f"{MODALITY.get(name, 'image')}_token_id", PLACEHOLDER)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
