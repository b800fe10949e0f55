"""Recipe: a plain loop. ``python examples/training/plain_loop.py`` prints the loss in FP32 and in float16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

# a CPU has no fast 16-bit kernels: there they are emulated
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(policy: str, steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = ampaudit.prepare(model, optimizer, policy=policy, emulate=DEVICE == "cpu")
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared.model(x), x[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for policy in ("apex-o0", "torch-cuda", "apex-o2"):
        print(f"{policy:12} {train(policy)[-1]:.4f}")
