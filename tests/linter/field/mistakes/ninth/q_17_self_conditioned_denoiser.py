# source: https://github.com/pytorch/pytorch/issues/105211
# mistake: the no_grad forward and the training forward share one autocast region, so the cached half weights carry no graph and the linear layers get no gradient
# severity: error
"""Self-conditioned diffusion over protein backbone frames."""
import random

import torch
from torch import nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    def __init__(self, dim=256, depth=8):
        super().__init__()
        self.inp = nn.Linear(3 + 3, dim)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, dim * 4, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim, 3)

    def forward(self, xt, t, previous):
        h = self.inp(torch.cat([xt, previous], dim=-1))
        h = h + self.time(t[:, None])[:, None]
        return self.out(self.body(h))


class Process:
    def __init__(self, device):
        self.device = device

    def noised(self, x0):
        t = torch.rand(x0.shape[0], device=self.device)
        sigma = (t * 3.14159 / 2).sin()[:, None, None]
        alpha = (t * 3.14159 / 2).cos()[:, None, None]
        return alpha * x0 + sigma * torch.randn_like(x0), t


def training_loss(net, process, x0):
    xt, t = process.noised(x0)
    previous = torch.zeros_like(x0)
    with torch.autocast("cuda", dtype=torch.float16):  # <- here
        if random.random() < 0.5:
            with torch.no_grad():  # <- here
                previous = net(xt, t, previous).float()  # <- here
        pred = net(xt, t, previous)  # <- here
    return F.mse_loss(pred.float(), x0)


def train(loader, steps, lr=2e-4):
    device = torch.device("cuda")
    net = Denoiser().to(device)
    process = Process(device)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    net.train()
    step = 0
    while step < steps:
        for x0 in loader:
            opt.zero_grad()
            loss = training_loss(net, process, x0.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            step += 1
            if step % 500 == 0:
                print(step, loss.item())
            if step >= steps:
                break
    torch.save(net.state_dict(), "denoiser.pt")
