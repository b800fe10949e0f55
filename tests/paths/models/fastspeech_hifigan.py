"""FastSpeech 2 with its vocoder, tiny; its positions stay in float32, so that model.half() fails."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    FastSpeech2ConformerConfig,
    FastSpeech2ConformerHifiGanConfig,
    FastSpeech2ConformerWithHifiGan,
    FastSpeech2ConformerWithHifiGanConfig,
)


def get_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        **{"hidden_size": 16, "vocab_size": 40, "num_mel_bins": 10},
        **{"encoder_layers": 1, "encoder_num_attention_heads": 2, "encoder_linear_units": 32},
        **{"decoder_layers": 1, "decoder_num_attention_heads": 2, "decoder_linear_units": 32},
        **{"speech_decoder_postnet_layers": 2, "speech_decoder_postnet_units": 16},
        **{"duration_predictor_layers": 1, "duration_predictor_channels": 16},
        **{"pitch_predictor_layers": 1, "pitch_predictor_channels": 16},
        **{"energy_predictor_layers": 1, "energy_predictor_channels": 16},
    }
    rates = {"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]}
    speech = FastSpeech2ConformerConfig(**sizes)
    vocoder = FastSpeech2ConformerHifiGanConfig(model_in_dim=10, upsample_initial_channel=8, **rates)
    config = FastSpeech2ConformerWithHifiGanConfig(
        model_config=speech.to_dict(), vocoder_config=vocoder.to_dict()
    )
    model = FastSpeech2ConformerWithHifiGan(config).eval()
    with torch.no_grad():
        model.model.duration_predictor.linear.bias.fill_(0.9)
    return model


def example_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"input_ids": torch.randint(3, 40, (1, 5))}
