# source: https://github.com/wfondrie/depthcharge/pull/82
# mistake: mass-to-charge values of up to 2000 are rounded to bfloat16 (steps of 8) before the sinusoidal encoding, which destroys the mass resolution
# severity: warning
import math

import torch
from torch import nn


class PeakEncoder(nn.Module):
    """Sinusoids of m/z with wavelengths from 0.001 to 10000 Da, plus a projection of the intensity."""

    def __init__(self, dim, shortest=1e-3, longest=1e4):
        super().__init__()
        n = dim // 2
        grid = torch.linspace(0, 1, n)
        wavelengths = shortest * (longest / shortest) ** grid
        self.register_buffer("omega", 2 * math.pi / wavelengths)
        self.intensity = nn.Linear(1, dim)
        self.mix = nn.Linear(2 * dim, dim)

    def forward(self, mz, intensity):
        angle = mz[..., None] * self.omega  # <- here
        wave = torch.cat([angle.sin(), angle.cos()], dim=-1)  # <- here
        level = self.intensity(intensity[..., None])
        return self.mix(torch.cat([wave, level.to(wave.dtype)], dim=-1))


class PeptidePropertyNet(nn.Module):
    def __init__(self, dim=512, depth=9, heads=8):
        super().__init__()
        self.peaks = PeakEncoder(dim)
        self.summary = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 1024, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.charge = nn.Linear(dim, 6)
        self.mass = nn.Linear(dim, 1)

    def forward(self, mz, intensity):
        empty = mz == 0
        x = self.peaks(mz, intensity)
        first = self.summary.expand(x.shape[0], -1, -1).to(x.dtype)
        pad = torch.cat([torch.zeros_like(empty[:, :1]), empty], dim=1)
        h = self.encoder(torch.cat([first, x], dim=1), src_key_padding_mask=pad)[:, 0]
        return self.charge(h), self.mass(h).squeeze(-1)


def fit(loader, epochs=30, lr=1e-4, device="cuda"):
    net = PeptidePropertyNet().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    for epoch in range(epochs):
        for mz, intensity, charge, mass in loader:
            mz, intensity = (t.to(device, torch.bfloat16, non_blocking=True) for t in (mz, intensity))  # <- here
            charge, mass = charge.to(device), mass.to(device)
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                charge_logits, mass_z = net(mz, intensity)
            loss = nn.functional.cross_entropy(charge_logits.float(), charge) + nn.functional.mse_loss(mass_z.float(), mass)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.5)
            opt.step()
        print(epoch, loss.item())
    return net
