# source: victorchall/EveryDream2trainer PR #175 https://github.com/victorchall/EveryDream2trainer/pull/175
# mistake: the per-block clipping helper runs on gradients that still carry the loss scale, so every step is squashed to a tiny norm
# severity: error
import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset


class LatentDenoiser(nn.Module):
    def __init__(self, channels=4, width=96):
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.head = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, z, t):
        h = self.stem(z) + self.time(t[:, None])[:, :, None, None]
        for conv in self.body:
            h = h + F.silu(conv(h))
        return self.head(h)


def limit_gradients(groups, ceiling):
    norms = []
    for params in groups:
        norms.append(nn.utils.clip_grad_norm_(params, ceiling))  # <- here
    return torch.stack(norms).max()


def noise_latents(z):
    t = torch.rand(z.shape[0], device=z.device)
    eps = torch.randn_like(z)
    keep = t.view(-1, 1, 1, 1)
    return keep * z + (1 - keep * keep).sqrt() * eps, eps, t


def fit(args, model, loader, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2)
    scaler = GradScaler()
    groups = [list(m.parameters()) for m in model.children()]
    history = []
    for epoch in range(args.epochs):
        for (z,) in loader:
            z = z.to(device)
            noisy, eps, t = noise_latents(z)
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = F.mse_loss(model(noisy, t), eps)
            scaler.scale(loss).backward()
            biggest = limit_gradients(groups, args.clip)  # <- here
            scaler.step(optimizer)
            scaler.update()
            history.append({"loss": loss.item(), "norm": biggest.item()})
        print(f"epoch {epoch}: {history[-1]}")
    return history


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--latents", default="latents.pt")
    a = p.parse_args()
    data = DataLoader(TensorDataset(torch.load(a.latents)), batch_size=32, shuffle=True)
    net = LatentDenoiser().cuda()
    Path("history.json").write_text(json.dumps(fit(a, net, data, "cuda")))
