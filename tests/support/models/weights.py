"""Weights, statistics and dtypes."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.support.models.case import Built, Net, failure, linear


@failure("model.half() of a BatchNorm: running_var holds squares of activations", "norm", "AMP403", "half16")
def batch_norm_variance(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.conv(x))

    norm = nn.BatchNorm2d(8)
    nn.init.constant_(norm.running_var, 2e5 if bad else 1.0)
    nn.init.constant_(norm.weight, 400.0 if bad else 1.0)
    return Net(forward, conv=nn.Conv2d(3, 8, 3), norm=norm), (torch.randn(2, 3, 8, 8),)


@failure("CaiT, Touvron et al. 2021: LayerScale starts near zero", "", "AMP402", "half16")
def layer_scale(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return x + m.gamma * m.inner(x)

    model = Net(forward, inner=linear(16, 16))
    model.gamma = nn.Parameter(torch.full((16,), 1e-8 if bad else 1e-1))
    return model, (torch.randn(4, 16),)


@failure("a checkpoint with an outlier weight", "inner", "AMP401", "half16 cuda16")
def outlier_weight(bad: bool) -> Built:
    inner = linear(16, 16)
    with torch.no_grad():
        inner.weight[3, 5] = 7e4 if bad else 1.0
    return Net(lambda m, x: m.inner(x), inner=inner), (torch.randn(4, 16),)


@failure("x * np.pi and other float64 arrays", "", "AMP303", "half16 cuda16 halfbf cudabf")
def float64_constant(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([math.pi], dtype=torch.float64 if bad else x.dtype)
        return (m.inner(x) * scale).to(x.dtype)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16),)


@failure("torch.linalg in mixed precision: no 16-bit kernels", "", "AMP306", "half16 cuda16 halfbf cudabf")
def inverse_in_half(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        matrix = m.inner(x) @ m.inner(x).transpose(0, 1)
        wide = matrix if bad else matrix.float()
        return torch.linalg.inv(wide + 4 * torch.eye(16, dtype=wide.dtype))

    return Net(forward, inner=linear(16, 16)), (torch.randn(16, 16),)
