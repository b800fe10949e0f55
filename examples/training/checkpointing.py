"""Recipe: checkpointed activations, which are computed again on the way back: run the model's own code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def train(policy: str, steps: int = 30) -> list[float]:
    """``policy`` is ``fp32``, or ``autocast``: float16 on a GPU, bfloat16 on a CPU."""
    torch.manual_seed(0)
    model = Deep().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dtype = "float16" if DEVICE == "cuda" else "bfloat16"
    prepared = ampaudit.prepare(model, optimizer, policy=f"torch-{DEVICE}", dtype=dtype, how="autocast")
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, device=DEVICE)
        optimizer.zero_grad()
        output = model(x) if policy == "fp32" else prepared.model(x)
        loss = F.cross_entropy(output, x[:, :4].argmax(1))
        prepared.scaler.scale(loss).backward()
        prepared.scaler.step(optimizer)
        prepared.scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for policy in ("fp32", "autocast"):
        print(f"{policy:12} {train(policy)[-1]:.4f}")
