"""NLLB's mixture of experts, tiny."""

from __future__ import annotations

import torch
from torch import nn
from transformers import NllbMoeConfig, NllbMoeModel


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=50,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        num_experts=3,
        expert_capacity=8,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
    )
    model = NllbMoeModel(config).eval()
    with torch.no_grad():
        experts = model.encoder.layers[1].ffn.experts
        for expert in (experts.expert_0, experts.expert_1, experts.expert_2):
            expert.fc1.weight.mul_(gain)
            expert.fc2.weight.div_(gain)
    return model


def planted() -> nn.Module:
    return get_model(5e5)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_ids": torch.randint(3, 50, (1, 6)), "decoder_input_ids": torch.randint(3, 50, (1, 4))}
