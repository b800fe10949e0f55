"""EnCodec, tiny: padding by the length of the sound, and residual codebooks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import EncodecConfig, EncodecModel


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_size": 16,
        "codebook_dim": 16,
        "num_lstm_layers": 1,
    }
    rates = {"upsampling_ratios": [4, 2], "target_bandwidths": [1.5, 3.0], "sampling_rate": 2000}
    model = EncodecModel(EncodecConfig(**sizes, **rates)).eval()
    with torch.no_grad():
        for layer in model.quantizer.layers:
            layer.codebook.embed.copy_(torch.randn_like(layer.codebook.embed) * gain / 4)
        model.decoder.layers[0].conv.parametrizations.weight.original0.div_(gain)
    return model


def planted() -> nn.Module:
    return get_model(1000.0)


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_values": torch.randn(1, 1, 150), "padding_mask": torch.ones(1, 150)}


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    return [
        {"input_values": torch.randn(1, 1, many), "padding_mask": torch.ones(1, many)} for many in (64, 40)
    ]
