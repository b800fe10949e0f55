"""Positions, timesteps and angles that need more than 8 or 11 bits."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.support.silent.case import Built, Net, silent

_FREQUENCIES = torch.exp(-math.log(10_000.0) * torch.arange(16) / 16)


@silent("half", "bfloat16", "AMP206 AMP207")
def timesteps(bad: bool) -> Built:
    """A diffusion model's time embedding: t is cast before the sine is taken."""

    def forward(m: Net, t: torch.Tensor) -> torch.Tensor:
        time = t.to(m.mlp.weight.dtype if bad else torch.float32)  # culprit
        angles = time[:, None].float() * m.frequencies.float()
        return m.mlp(torch.cat([angles.sin(), angles.cos()], -1).to(m.mlp.weight.dtype))

    model = Net(forward, mlp=nn.Linear(32, 32), frequencies=torch.full((16,), 1.0))
    return model, (torch.arange(901, 965),)


@silent("half", "bfloat16", "AMP206 AMP207")
def rotary_table(bad: bool) -> Built:
    """The angles of a rotary embedding are made in the dtype of the hidden states."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-2])
        if bad:
            angles = positions.to(x.dtype)[:, None] * _FREQUENCIES.to(x.dtype)  # culprit
        else:
            angles = positions[:, None] * _FREQUENCIES
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = m.query(x).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    return Net(forward, query=nn.Linear(32, 32)), (torch.randn(1, 600, 32),)


@silent("half", "bfloat16", "AMP209 AMP206 AMP207")
def positions_from_a_mask(bad: bool) -> Built:
    """The running sum of a mask counts positions."""

    def forward(m: Net, mask: torch.Tensor) -> torch.Tensor:
        wide = mask if bad else mask.float()
        positions = wide.cumsum(-1) - 1  # culprit
        return m.table(positions.long().clamp(0, 799))

    return Net(forward, table=nn.Embedding(800, 8)), (torch.ones(1, 800),)


@silent("half", "bfloat16", "AMP210")
def accumulated_phase(bad: bool) -> Built:
    """A vocoder's oscillator: the phase grows with every sample."""

    def forward(m: Net, pitch: torch.Tensor) -> torch.Tensor:
        wide = pitch if bad else pitch.float()
        phase = wide.cumsum(-1)  # culprit
        return m.gain(phase.sin().to(pitch.dtype).unsqueeze(-1))

    return Net(forward, gain=nn.Linear(1, 2)), (torch.rand(1, 4000) * 0.5 + 0.1,)


@silent("half", "bfloat16", "AMP206 AMP207")
def coordinates_of_pixels(bad: bool) -> Built:
    """Fourier features of coordinates that are large and close together."""

    def forward(m: Net, xy: torch.Tensor) -> torch.Tensor:
        wide = xy if bad else xy.float()
        angles = wide * 600.0  # culprit
        return m.out(torch.cat([angles.sin(), angles.cos()], -1).to(xy.dtype))

    coordinates = torch.randint(0, 128, (64, 2)).float() / 128
    return Net(forward, out=nn.Linear(4, 8)), (coordinates,)
