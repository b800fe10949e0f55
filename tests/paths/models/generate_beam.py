"""generate() of a small BART with beams inside forward."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration


class Summarizer(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        config = BartConfig(
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
        self.model = BartForConditionalGeneration(config)
        with torch.no_grad():
            self.model.model.decoder.layers[0].fc1.weight.mul_(gain)
            self.model.model.decoder.layers[0].fc2.weight.div_(gain)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.model.generate(
            ids, max_new_tokens=3, num_beams=2, return_dict_in_generate=True, output_scores=True
        )
        return made.sequences_scores


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Summarizer(gain).eval()


def planted() -> nn.Module:
    return get_model(5e5)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 50, (1, 4))
