"""An audio codec: padding by the length, and codebooks until the residual is small."""

from __future__ import annotations

import torch
from torch import nn


class Codec(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 8, 8, stride=4)
        self.decoder = nn.ConvTranspose1d(8, 1, 8, stride=4)
        self.codebooks = nn.Parameter(torch.randn(6, 16, 8) / 4)
        self.gain = gain

    def forward(self, wave: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        missing = (8 - longest) % 4
        frames = self.encoder(nn.functional.pad(wave[..., :longest], (0, missing))).transpose(1, 2)
        residual, coded = frames, torch.zeros_like(frames)
        for book in self.codebooks:
            if residual.abs().mean() < 0.18:
                break
            apart = (residual.unsqueeze(2) - book) * self.gain
            distance = apart.square().sum(-1)  # OVERFLOW
            chosen = book[(distance / self.gain / self.gain).argmin(-1)]
            coded, residual = coded + chosen, residual - chosen
        return self.decoder(coded.transpose(1, 2))[..., :longest]


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Codec(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(2, 1, 64), torch.tensor([50, 42])
