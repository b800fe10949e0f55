# source: https://github.com/nerfstudio-project/nerfacc/issues/307
# mistake: the loss is multiplied by the GradScaler's scale but the step is a plain optimizer.step(), so the weights move by gradients 1024 times too large and the scale never adapts
# severity: error
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda:0"
max_steps = 20_000
n_rays = 4096
n_samples = 96


class Field(nn.Module):
    def __init__(self, freqs=10, width=128):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(freqs) * math.pi)
        d = 3 * 2 * freqs
        self.trunk = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.sigma = nn.Linear(width, 1)
        self.rgb = nn.Linear(width, 3)

    def encode(self, x):
        with torch.autocast("cuda", enabled=False):
            ang = x.float()[..., None] * self.bands
            return torch.cat([ang.sin(), ang.cos()], -1).flatten(-2)

    def forward(self, x):
        h = self.trunk(self.encode(x))
        return F.softplus(self.sigma(h).float() - 1.0).squeeze(-1), torch.sigmoid(self.rgb(h).float())


def render(field, origins, dirs, near=2.0, far=6.0):
    t = torch.linspace(near, far, n_samples, device=origins.device)
    t = t.expand(len(origins), -1)
    t = t + torch.rand_like(t) * (far - near) / n_samples
    pts = origins[:, None] + dirs[:, None] * t[..., None]
    sigma, rgb = field(pts)
    delta = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], -1)
    tau = sigma * delta
    trans = torch.exp(-torch.cumsum(torch.cat([torch.zeros_like(tau[:, :1]), tau[:, :-1]], -1), -1))
    w = (1 - torch.exp(-tau)) * trans
    return (w[..., None] * rgb).sum(1) + (1 - w.sum(-1, keepdim=True))


def run(dataset):
    field = Field().to(device)
    optimizer = torch.optim.SGD(field.parameters(), lr=5e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [max_steps // 2, max_steps * 3 // 4, max_steps * 9 // 10], gamma=0.33)
    grad_scaler = torch.cuda.amp.GradScaler(2**10)  # <- here
    tic = time.time()
    field.train()
    for step in range(max_steps + 1):
        rays = dataset.sample(n_rays)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = render(field, rays["o"].to(device), rays["d"].to(device))
        loss = F.smooth_l1_loss(pred.float(), rays["pixels"].to(device))

        optimizer.zero_grad()
        grad_scaler.scale(loss).backward()  # <- here
        optimizer.step()  # <- here
        scheduler.step()

        if step % 1000 == 0:
            mse = F.mse_loss(pred.float(), rays["pixels"].to(device)).item()
            print(f"{time.time() - tic:.1f}s step={step} psnr={-10 * math.log10(mse):.2f}")
    return field
