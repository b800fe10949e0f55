"""Speculative decoding: a draft's tokens are accepted until one is unlikely."""

from __future__ import annotations

import torch
from torch import nn


class Speculative(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.draft, self.target = nn.Linear(8, 12), nn.Linear(8, 12)
        self.gain = gain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state = self.embedding(ids).mean(0)
        accepted = []
        while len(accepted) < 6:
            drafted, chance = [], []
            guess = state
            for _ in range(3):
                probabilities = self.draft(2 * guess).softmax(-1)
                token = int(probabilities.argmax())
                drafted.append(token)
                chance.append(probabilities[token])
                guess = (guess + self.embedding.weight[token]) / 2
            for token, likely in zip(drafted, chance, strict=True):
                logits = self.target(state)
                unnormalized = (logits * self.gain).exp()  # OVERFLOW
                ratio = unnormalized[token].log() / unnormalized.log().logsumexp(-1) / likely
                state = (state + self.embedding.weight[token]) / 2
                accepted.append(token)
                if ratio < 0.5:
                    break
        return self.target(state) * ratio


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Speculative(gain).eval()


def planted() -> nn.Module:
    return get_model(20.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 12, (5,))
