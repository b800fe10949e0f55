"""Recipe: gradient clipping. Gradients carry the loss scale until ``unscale_``: clip after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = 0.1


def train(policy: str, steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared = ampaudit.prepare(model, optimizer, policy=policy, emulate=DEVICE == "cpu")
    norms = []
    for _ in range(steps):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared.model(x), x[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        norms.append(norm.item())
    return norms


if __name__ == "__main__":
    for policy in ("apex-o0", "torch-cuda", "apex-o2"):
        print(f"{policy:12} gradient norms {train(policy)[0]:.4f} ... {train(policy)[-1]:.4f}")
