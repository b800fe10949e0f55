"""Gradients that are rounding error in FP32 are no findings; which ones those are, float64 says."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampaudit

EXACT = 1e-9  # of the largest gradient: less than that in float64 is zero but for rounding
Forward = Callable[[nn.ModuleDict, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, layers: dict[str, nn.Module], forward: Forward) -> None:
        super().__init__()
        self.layers, self.run = nn.ModuleDict(layers), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, x)


class Bias(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


def in_order(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for layer in layers.values():
        x = layer(x)
    return x


def sequence(*layers: nn.Module) -> Model:
    return Model({str(index): layer for index, layer in enumerate(layers)}, in_order)


def attention(fused: bool) -> Model:
    def forward(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layers[name](x).unflatten(-1, (4, 4)).transpose(1, 2) for name in ("query", "key", "value")
        )
        if fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    return Model({name: nn.Linear(16, 16) for name in ("query", "key", "value")}, forward)


def additive_attention() -> Model:
    def forward(layers: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        return (layers["score"](torch.tanh(layers["hidden"](x))).softmax(1) * x).sum(1)

    return Model({"hidden": nn.Linear(16, 32), "score": nn.Linear(32, 1)}, forward)


CASES: dict[str, tuple[Callable[[], Model], tuple[int, ...]]] = {
    "convolutions, batch norm": (
        lambda: sequence(
            *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)),
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        ),
        (8, 3, 16, 16),
    ),
    "transposed convolution": (
        lambda: sequence(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 100, 4)),
        (4, 3, 8, 8),
    ),
    "instance norm": (
        lambda: sequence(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)),
        (4, 3, 8, 8),
    ),
    "linear, batch norm": (
        lambda: sequence(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
        (256, 16),
    ),
    "a bias of its own": (
        lambda: sequence(nn.Conv2d(3, 8, 3, bias=False), Bias(8, 1, 1), nn.BatchNorm2d(8), nn.Flatten()),
        (4, 3, 8, 8),
    ),
    "attention": (lambda: attention(False), (4, 10, 16)),
    "fused attention": (lambda: attention(True), (4, 10, 16)),
    "additive attention": (additive_attention, (4, 10, 16)),
    "no norm": (lambda: sequence(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (64, 16)),
    "layer norm": (lambda: sequence(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)), (64, 16)),
    "small inputs": (lambda: sequence(Bias(1), nn.Linear(1, 4)), (64, 1)),
}


def loss(output: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).view(output[0].shape)
    return (output * weights).sin().pow(2).mean()


def cancelled_in_float64(model: nn.Module, x: torch.Tensor) -> set[str]:
    exact = copy.deepcopy(model).double()
    loss(exact(x.double())).backward()
    peaks = {
        name: 0.0 if p.grad is None else float(p.grad.abs().max()) for name, p in exact.named_parameters()
    }
    return {name for name, peak in peaks.items() if peak < EXACT * max(peaks.values())}


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_zero_in_float64_is_no_finding(name: str, policy: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    report = ampaudit.scan(model, x, policy=policy, backward=True, loss=loss, loss_scale=256.0)
    assert report.backward is not None
    found = {p.name for p in report.backward.parameters if p.gradient.cancelled}
    assert found == cancelled_in_float64(model, x)
    assert not [f for f in report.findings if f.code in ("AMP703", "AMP704")]


def test_a_watched_loop_does_not_count_them() -> None:
    """Unscaled: the key's gradient is 2^-30, which float16 flushes, and everything else is healthy."""
    torch.manual_seed(0)
    model = attention(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampaudit.watch(model, optimizer, every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(4, 10, 16))).backward()
            optimizer.step()
    report = monitor.report()
    (variant,) = report.variants
    flushed = {p.name for p in variant.health.parameters if p.flushed > 0.5}
    assert flushed == {"layers.key.bias"}
    assert report.findings == ()
