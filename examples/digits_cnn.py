"""A small CNN, trained here in a few seconds on scikit-learn's handwritten digits.

Expect: nothing breaks in float16, and the report shows many bits of headroom.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TRAINED, STEPS = 1500, 150


class DigitsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classify = nn.Linear(32 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images).flatten(1))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


def accuracy(model: nn.Module) -> float:
    images, labels = digits()
    with torch.no_grad():
        guesses = model.eval()(images[TRAINED:]).argmax(1)
    return (guesses == labels[TRAINED:]).float().mean().item()


def get_model() -> nn.Module:
    images, labels = digits()
    model = DigitsNet().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        chosen = torch.randint(0, TRAINED, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.eval()


def batches():
    images, _ = digits()
    yield from images[TRAINED:].split(64)
