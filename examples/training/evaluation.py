"""Recipe: train in 16 bits, evaluate in FP32 with the masters, save, and go on with the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(policy: str) -> tuple[nn.Module, ampaudit.PreparedTrace]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, ampaudit.prepare(model, optimizer, policy=policy, emulate=DEVICE == "cpu")


def some_steps(prepared: ampaudit.PreparedTrace, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        prepared.optimizer.zero_grad()
        loss = F.cross_entropy(prepared.model.train()(x), x[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(prepared.optimizer)
        prepared.scaler.update()
        losses.append(loss.item())
    return losses


def accuracy(prepared: ampaudit.PreparedTrace) -> float:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(99)).to(DEVICE)
    with torch.no_grad(), prepared.float32() as model:
        return (model.eval()(x).argmax(1) == x[:, :4].argmax(1)).float().mean().item()


def train(policy: str) -> list[float]:
    """Losses of 40 steps, with a restart in the middle, and the accuracy in FP32."""
    _, prepared = make(policy)
    losses = some_steps(prepared, 0, 20)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "checkpoint.pt"
        torch.save(prepared.state_dict(), file)
        _, restored = make(policy)
        restored.load_state_dict(torch.load(file, weights_only=True))
    return [*losses, *some_steps(restored, 20, 40), accuracy(restored)]


if __name__ == "__main__":
    for policy in ("apex-o0", "torch-cuda", "apex-o2"):
        print(f"{policy:12} accuracy {train(policy)[-1]:.4f}")
