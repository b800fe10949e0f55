"""Recipe: two models, losses and optimizers, one scaler. ``update`` comes once, after both have stepped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(policy: str, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8)).to(DEVICE)
    critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(DEVICE)
    makers, critics = (torch.optim.Adam(m.parameters(), lr=2e-3) for m in (maker, critic))
    emulate = DEVICE == "cpu"
    made = ampaudit.prepare(maker, makers, policy=policy, emulate=emulate)
    judged = ampaudit.prepare(critic, critics, policy=policy, emulate=emulate)
    scaler, losses = judged.scaler, []
    for _ in range(steps):
        real = torch.randn(64, 8, device=DEVICE) + 2.0
        fake = made.model(torch.randn(64, 4, device=DEVICE))

        critics.zero_grad()
        says, denies = judged.model(real), judged.model(fake.detach())
        critic_loss = F.softplus(-says).mean() + F.softplus(denies).mean()
        scaler.scale(critic_loss).backward()
        scaler.step(critics)

        makers.zero_grad()
        maker_loss = F.softplus(-judged.model(fake)).mean()
        scaler.scale(maker_loss).backward()
        scaler.step(makers)

        scaler.update()
        losses.append(critic_loss.item() + maker_loss.item())
    return losses


if __name__ == "__main__":
    for policy in ("apex-o0", "torch-cuda", "apex-o2"):
        print(f"{policy:12} {train(policy)[-1]:.4f}")
