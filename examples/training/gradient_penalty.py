"""Recipe: a gradient penalty. The gradient inside the loss carries the scale: divide it out first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(policy: str, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # the inner gradient begins as the scale itself, and torch's first one, 65,536, is beyond float16
    prepared = ampaudit.prepare(model, optimizer, policy=policy, loss_scale=1024.0, emulate=DEVICE == "cpu")
    scaler, losses = prepared.scaler, []
    for _ in range(steps):
        x = torch.randn(64, 16, device=DEVICE, requires_grad=True)
        optimizer.zero_grad()
        output = prepared.model(x)
        fit = F.mse_loss(output, x[:, :1].detach())
        scaled = torch.autograd.grad(scaler.scale(output.sum()), x, create_graph=True)[0]
        slope = scaled / scaler.get_scale()
        loss = fit + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for policy in ("apex-o0", "torch-cuda", "apex-o2"):
        print(f"{policy:12} {train(policy)[-1]:.4f}")
