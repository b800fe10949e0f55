"""A small CNN that learns scikit-learn's handwritten digits: ``ampaudit train examples/training/digits.py``.

Expect: float16 with masters and a loss scale follows FP32; `--policy apex-o3` (neither of them) does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

TRAINED, BATCH = 1500, 64


def get_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    return torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits()
    chance = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(0, TRAINED, (BATCH,), generator=chance)
        yield images[chosen], labels[chosen]


def model_inputs(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return batch[0]


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2e-3)


def accuracy(model: nn.Module) -> float:
    """On the digits that were kept apart."""
    images, labels = digits()
    with torch.no_grad():
        return (model.eval()(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean().item()


def metric(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (output.argmax(1) == batch[1]).float().mean().item()
