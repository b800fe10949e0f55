"""Recipe: accumulation. Divide the loss, and let scaler and optimizer act once per large batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(policy: str, steps: int = 20, parts: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prepared = ampaudit.prepare(model, optimizer, policy=policy, emulate=DEVICE == "cpu")
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16, device=DEVICE)
        optimizer.zero_grad()
        total = 0.0
        for part in x.chunk(parts):
            loss = F.cross_entropy(prepared.model(part), part[:, :4].argmax(1)) / parts
            prepared.scaler.scale(loss).backward()
            total += loss.item()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        losses.append(total)
    return losses


if __name__ == "__main__":
    print(f"FP32, one batch        {train('apex-o0', parts=1)[-1]:.4f}")
    print(f"float16, four parts    {train('torch-cuda')[-1]:.4f}")
