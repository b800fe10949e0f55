"""Mimi, tiny: a codec with transformers between its convolutions."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MimiConfig, MimiModel


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    config = MimiConfig(
        num_filters=4,
        hidden_size=16,
        codebook_size=16,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=3,
        num_semantic_quantizers=1,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        upsampling_ratios=[4, 2],
        upsample_groups=16,
        num_residual_layers=1,
        sampling_rate=2000,
    )
    model = MimiModel(config).eval()
    with torch.no_grad():
        for quantizer in (
            model.quantizer.semantic_residual_vector_quantizer,
            model.quantizer.acoustic_residual_vector_quantizer,
        ):
            for layer in quantizer.layers:
                layer.codebook.embed_sum.copy_(torch.randn_like(layer.codebook.embed_sum) / 4)
        block = model.encoder.encoder_transformer.layers[0].mlp
        block.fc1.weight.mul_(gain)
        block.fc2.weight.div_(gain)
    return model


def planted() -> nn.Module:
    return get_model(5e5)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_values": torch.randn(1, 1, 128)}
