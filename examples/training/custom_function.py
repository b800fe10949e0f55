"""Recipe: a custom autograd function. No graph of the forward has its backward: run the model's own code.

``custom_fwd`` and ``custom_bwd`` say in which precision the function wants to be called under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Quantize(torch.autograd.Function):
    """Rounds to quarters; the gradient passes as if it had not."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(16, 64)
        self.decode = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(Quantize.apply(torch.tanh(self.encode(x))))


def train(policy: str, steps: int = 30) -> list[float]:
    """``policy`` is ``fp32``, or ``autocast``: float16 on a GPU, bfloat16 on a CPU."""
    torch.manual_seed(0)
    model = Quantized().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dtype = "float16" if DEVICE == "cuda" else "bfloat16"
    prepared = ampaudit.prepare(model, optimizer, policy=f"torch-{DEVICE}", dtype=dtype, how="autocast")
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16, device=DEVICE)
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
