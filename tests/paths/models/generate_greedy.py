"""generate() of a small Llama inside forward."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class Writer(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.model = LlamaForCausalLM(config)
        self.gain = gain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.model.generate(
            ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits = torch.stack(made.logits).to(self.model.dtype)
        sharp = (logits * self.gain).square()  # OVERFLOW
        return sharp / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Writer(gain).eval()


def planted() -> nn.Module:
    return get_model(3000.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 50, (1, 4))
