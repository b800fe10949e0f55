"""Mixtral, tiny, with the loop over experts that were hit."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MixtralConfig, MixtralModel


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
    )
    config._experts_implementation = "eager"
    model = MixtralModel(config).eval()
    with torch.no_grad():
        experts = model.layers[1].mlp.experts
        experts.gate_up_proj[2].mul_(gain)
        experts.down_proj[2].div_(gain * gain)
    return model


def planted() -> nn.Module:
    return get_model(2000.0)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_ids": torch.randint(3, 99, (2, 10))}
