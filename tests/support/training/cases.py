"""Small models whose gradients explode or vanish at a known layer, and healthy ones, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """``code`` at ``layer`` is what must be found; empty for a healthy model."""

    model: nn.Module
    inputs: torch.Tensor
    loss: Loss
    code: str = ""
    layer: str = ""


class Gain(nn.Module):
    """Hands its input on, and multiplies the gradient by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() + (x - x.detach()) * self.factor


class Stack(nn.Module):
    """Linear layers with a ReLU after each, and something between the second and the third."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.between = between or nn.Identity()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(torch.relu(self.third(self.between(x))))


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, WIDTH)


def classes(output: torch.Tensor) -> torch.Tensor:
    flat = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(flat, torch.arange(flat.shape[0]) % flat.shape[-1])


def gain_explodes() -> Case:
    return Case(Stack(Gain(1e5)), rows(), classes, "AMP701", "between")


def gain_vanishes() -> Case:
    return Case(Stack(Gain(1e-11)), rows(), classes, "AMP702", "between")


def loss_is_a_sum() -> Case:
    return Case(Stack(), rows(), lambda y: (y.float() * 100).pow(2).sum(), "AMP701", "loss")


def loss_is_tiny() -> Case:
    return Case(Stack(), rows(), lambda y: classes(y) * 1e-12, "AMP702", "loss")


def deep_sigmoids() -> Case:
    """Each layer leaves about a hundredth of the gradient; it ends somewhere in the middle."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
            for layer in self.layers:
                nn.init.normal_(layer.weight, std=0.01)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.sigmoid(layer(x))
            return x

    return Case(Deep(), rows(), classes, "AMP702", "layers")


def square_root_near_zero() -> Case:
    class Root(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.third(self.second(self.first(x) * 1e-3))
            return (x.float().square() * 1e-12 + 1e-14).sqrt().sum(-1)

    return Case(Root(), rows(), lambda y: y.mean() * 1e12, "AMP701", "(top)")


def norm_of_a_constant_row() -> Case:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.inner(x) * 1e-6))

    return Case(Constant(), rows(), classes, "AMP701", "norm")


class Towers(nn.Module):
    def __init__(self, left: float, right: float) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 4)
        self.right = nn.Linear(WIDTH, 4)
        self.factors = left, right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x).float() * self.factors[0] + self.right(x).float() * self.factors[1]


def towers_apart() -> Case:
    return Case(Towers(1e-12, 1e2), rows(), lambda y: y.pow(2).mean(), "AMP703", "left")


def division_by_a_small_spread() -> Case:
    class Standardized(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * 1e-4
            scaled = hidden.float()
            return self.head((scaled - scaled.mean(-1, keepdim=True)) / (scaled.std(-1, keepdim=True) + 1e-6))

    return Case(Standardized(), rows(), classes, "AMP701", "(top)")


def healthy_stack() -> Case:
    return Case(Stack(), rows(), classes)


def healthy_towers() -> Case:
    return Case(Towers(1.0, 0.5), rows(), lambda y: y.pow(2).mean())


def healthy_cnn() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    return Case(model, torch.randn(8, 1, 8, 8), classes)


def healthy_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 4))
    return Case(model, torch.randn(4, 6, WIDTH), classes)


def healthy_language_model() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.out = nn.Linear(WIDTH, 50, bias=False)
            self.out.weight = self.table.weight
            nn.init.normal_(self.table.weight, std=0.1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(F.gelu(self.mix(self.table(ids)))))

    return Case(Tied(), torch.randint(0, 50, (4, 9)), classes)


def healthy_autoencoder() -> Case:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    given = rows()
    return Case(model, given, lambda y: F.mse_loss(y, given))


def healthy_siamese() -> Case:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = F.normalize(self.encode(x), dim=-1), F.normalize(self.encode(x * 1.1), dim=-1)
            return left @ right.T / 0.07

    return Case(Siamese(), rows(), classes)


def healthy_residual() -> Case:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
                for _ in range(6)
            )
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Case(Blocks(), rows(), classes)


PLANTED = (
    gain_explodes, gain_vanishes, loss_is_a_sum, loss_is_tiny, deep_sigmoids, square_root_near_zero,
    norm_of_a_constant_row, towers_apart, division_by_a_small_spread,
)  # fmt: skip
HEALTHY = (
    healthy_stack, healthy_towers, healthy_cnn, healthy_encoder, healthy_language_model,
    healthy_autoencoder, healthy_siamese, healthy_residual,
)  # fmt: skip
