"""Thirty more healthy architectures: all of each in 16 bits, and nothing to report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ampaudit import scan

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SEQUENCE = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
STAGES = {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}


def _text() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 99, (2, 12))}


def _pairs() -> dict[str, Any]:
    return _text() | {"decoder_input_ids": torch.randint(3, 99, (2, 9))}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(1, 1600)}


SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}
Inputs = Callable[[], dict[str, Any]]
MODELS: dict[str, tuple[dict[str, Any], Inputs]] = {
    "Albert": (TEXT | {"embedding_size": 16}, _text),
    "Electra": (TEXT | {"embedding_size": 16}, _text),
    "Roberta": (TEXT, _text),
    "XLMRoberta": (TEXT, _text),
    "MPNet": (TEXT, _text),
    "RoFormer": (TEXT | {"embedding_size": 32}, _text),
    "ConvBert": (TEXT | {"embedding_size": 32}, _text),
    "DistilBert": (
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
        _text,
    ),
    "OPT": (TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}, _text),
    "Bloom": ({"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0}, _text),
    "GPTNeoX": (TEXT, _text),
    "GPTJ": (
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
        _text,
    ),
    "Qwen2": (GROUPED, _text),
    "Qwen3": (GROUPED | {"head_dim": 8}, _text),
    "Phi": (GROUPED, _text),
    "Phi3": (GROUPED, _text),
    "Gemma": (GROUPED | {"head_dim": 8}, _text),
    "Olmo2": (GROUPED, _text),
    "StableLm": (GROUPED, _text),
    "Starcoder2": (GROUPED, _text),
    "Cohere": (GROUPED, _text),
    "Granite": (GROUPED, _text),
    "Falcon": (TEXT, _text),
    "Bart": (SEQUENCE, _pairs),
    "Marian": (SEQUENCE, _pairs),
    "Pegasus": (SEQUENCE, _pairs),
    "DeiT": (IMAGE, _image),
    "Beit": (IMAGE, _image),
    "Dinov2": (IMAGE, _image),
    "ConvNext": (STAGES, _image),
    "RegNet": (STAGES | {"embedding_size": 16, "groups_width": 16}, _image),
    "Hubert": (SOUND, _sound),
    "Wav2Vec2": (SOUND, _sound),
}


def _model(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0])
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_quiet(name: str) -> None:
    report = scan(_model(name), MODELS[name][1](), policy="half", dtype="bfloat16")
    assert [(f.code, f.site, f.cause) for f in report.findings if f.severity != "note"] == []
