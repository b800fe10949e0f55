# source: https://github.com/modelscope/DiffSynth-Studio/pull/1025
# mistake: timesteps in 0..1000 are rounded to bfloat16 (3 significant digits) before the sinusoidal embedding, so 998.4 becomes 1000 and neighbouring steps coincide
# severity: warning
import math

import torch
import torch.nn.functional as F
from torch import nn


def sinusoid(pos, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000.0) * torch.arange(half, device=pos.device) / half)
    angles = pos[:, None] * freqs[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbed(nn.Module):
    def __init__(self, dim, freq_dim=256):
        super().__init__()
        self.freq_dim = freq_dim
        self.mlp = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t, dtype):
        return self.mlp(sinusoid(t, self.freq_dim).to(dtype))


class VideoDenoiser(nn.Module):
    def __init__(self, dim=1024, depth=12, in_dim=16):
        super().__init__()
        self.embed = nn.Linear(in_dim, dim)
        self.time = TimeEmbed(dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 16, 4 * dim, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.out = nn.Linear(dim, in_dim)

    def forward(self, x, t):
        h = self.embed(x) + self.time(t, x.dtype)[:, None]
        for blk in self.blocks:
            h = blk(h)
        return self.out(h)


class FlowMatchTrainer:
    def __init__(self, model, lr=1e-4):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    def sample_timestep(self, n):
        sigma = torch.sigmoid(torch.randn(n, device="cuda"))
        return sigma, sigma * 1000.0

    def loss(self, latents):
        sigma, t = self.sample_timestep(latents.size(0))
        noise = torch.randn_like(latents)
        s = sigma.view(-1, 1, 1)
        noisy = (1 - s) * latents + s * noise
        with torch.autocast("cuda", dtype=torch.bfloat16):
            t = t.to(torch.bfloat16)  # <- here
            pred = self.model(noisy, t)  # <- here
        return F.mse_loss(pred.float(), noise - latents)

    def fit(self, loader, epochs):
        for _ in range(epochs):
            for latents in loader:
                loss = self.loss(latents.cuda())
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
