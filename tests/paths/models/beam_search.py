"""A decoder with beams as Python lists, which end at their end token."""

from __future__ import annotations

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 12)
        self.gain = gain

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        beams = [(0.0, [0], start)]
        done = []
        for _ in range(6):
            grown = []
            for score, ids, state in beams:
                state = self.cell(self.embedding(torch.tensor([ids[-1]])), state)
                scores = self.head(4 * state).log_softmax(-1)[0]
                best, index = scores.topk(2)
                for value, token in zip(best.tolist(), index.tolist(), strict=True):
                    grown.append((score + value, [*ids, token], state))
            grown.sort(key=lambda beam: -beam[0])
            beams = [beam for beam in grown[:3] if beam[1][-1] != 1]
            done += [beam for beam in grown[:3] if beam[1][-1] == 1]
            if not beams:
                break
        score, ids, state = max(done or beams, key=lambda beam: beam[0] / len(beam[1]))
        sharp = (state * self.gain).pow(2)  # OVERFLOW
        return self.head(sharp / self.gain**2)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(gain).eval()


def planted() -> nn.Module:
    return get_model(3000.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 8)
