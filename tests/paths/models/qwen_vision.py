"""Qwen2-VL, tiny: an image of any size, whose patches take the places of its tokens."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = dict(zip(names, (98, 97, 96, 95), strict=True))
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    ).eval()
    with torch.no_grad():
        merger = model.model.visual.merger.mlp
        merger[0].weight.mul_(gain)
        merger[2].weight.div_(gain)
    return model


def planted() -> nn.Module:
    return get_model(3e5)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (1, 12))
    ids[0, 2], ids[0, 3:7], ids[0, 7] = 96, 98, 95
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(1, 12, dtype=torch.long),
        "mm_token_type_ids": (ids == 98).int(),
        "pixel_values": torch.randn(16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
