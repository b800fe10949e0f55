"""Longformer, tiny: windows of attention, and global tokens that are found by value."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LongformerConfig, LongformerModel


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        attention_window=[4, 4],
        pad_token_id=0,
    )
    model = LongformerModel(config).eval()
    with torch.no_grad():
        attention = model.encoder.layer[1].attention.self
        attention.query_global.weight.mul_(gain)
        attention.key_global.weight.mul_(gain)
    return model


def planted() -> nn.Module:
    return get_model(2000.0)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    marked = torch.zeros(2, 16, dtype=torch.long)
    marked[:, 0] = 1
    return {"input_ids": torch.randint(3, 99, (2, 16)), "global_attention_mask": marked}


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    without = {"input_ids": torch.randint(3, 99, (2, 16))}
    return [without, example_inputs()]
