"""FastSpeech: each phoneme is repeated by its predicted duration; a vocoder makes a wave."""

from __future__ import annotations

import torch
from torch import nn


class Speech(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.duration = nn.Linear(8, 1)
        self.spectrum = nn.Linear(8, 10)
        self.vocoder = nn.Sequential(nn.ConvTranspose1d(10, 6, 4, stride=2), nn.LeakyReLU(0.1))
        self.wave = nn.Conv1d(6, 1, 3, padding=1)
        self.gain = gain

    def forward(self, phonemes: torch.Tensor) -> torch.Tensor:
        states = self.encoder(self.embedding(phonemes))
        durations = (self.duration(states).squeeze(-1).exp() + 1).long()
        frames = states.new_zeros(len(states), int(durations.sum(-1).max()), 8)
        for row, states_of_row, many in zip(frames, states, durations, strict=True):
            row[: int(many.sum())] = torch.repeat_interleave(states_of_row, many, dim=0)
        energies = torch.exp(self.gain * self.spectrum(frames))  # OVERFLOW
        energies = (energies + 0.01).log()
        return self.wave(self.vocoder(energies.transpose(1, 2))).tanh()


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Speech(gain).eval()


def planted() -> nn.Module:
    return get_model(20.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 20, (2, 6))


def batches() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randint(0, 20, (2, 6)) for _ in range(2)]
