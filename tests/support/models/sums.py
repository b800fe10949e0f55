"""Sums over long axes, and squares that add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.models.case import Built, Net, failure, linear


@failure("microsoft/onnxconverter-common#323", "", "AMP105", "half16")
def efficientdet_mean_over_pixels(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return x.sum((2, 3)) / x[0, 0].numel() if bad else x.mean((2, 3))

    return Net(forward), (torch.rand(1, 3, 512, 512) + 0.5,)


@failure("Gatys et al. 2016: Gram matrices of a style loss", "", "AMP105 AMP106", "half16 cuda16")
def gram_matrix(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        features = x.flatten(2)
        features = features if bad else features / features.shape[-1] ** 0.5
        return torch.bmm(features, features.transpose(1, 2))

    return Net(forward), (torch.rand(1, 8, 64, 64) * (10 if bad else 1),)


@failure("Mamba-2, Dao and Gu 2024: segment sums are kept in float32", "", "AMP105", "half16")
def running_sum(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        steps = F.softplus(m.delta(x))
        return torch.cumsum(steps if bad else steps / 8192, 1)

    return Net(forward, delta=linear(8, 8, shift=12.0)), (torch.randn(1, 8192, 8),)


@failure("mean squared error of pixels from 0 to 255", "", "AMP106", "half16")
def squared_error_of_pixels(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        error = x - m.inner(x).tanh()
        error = error if bad else error / 1024
        return (error**2).mean()

    return Net(forward, inner=linear(16, 16)), (torch.rand(4, 16) * 1000,)


@failure("cosine similarity of features that are not normalized", "", "AMP106", "half16")
def dot_with_itself(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        features = m.inner(x)
        features = features if bad else F.layer_norm(features, (64,))
        return (features * features).sum(-1)

    return Net(forward, inner=linear(64, 64, shift=60.0)), (torch.randn(4, 64),)


@failure("product of probabilities or scales", "", "AMP105", "half16")
def long_product(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        factors = torch.sigmoid(m.inner(x)) + 0.9
        return torch.exp(torch.log(factors).mean(-1)) if not bad else torch.prod(factors, -1)

    return Net(forward, inner=linear(64, 64)), (torch.randn(4, 64),)
