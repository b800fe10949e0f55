"""Boxes, points and time."""

from __future__ import annotations

import torch

from tests.support.models.case import Built, Net, failure, linear


@failure("torchvision, ops/boxes.py: box_area upcasts against overflow", "", "AMP101", "half16")
def box_area(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        width, height = x[:, 2] - x[:, 0], x[:, 3] - x[:, 1]
        return width * height

    boxes = torch.tensor([[0.0, 0.0, 640.0, 480.0], [10.0, 10.0, 20.0, 30.0]])
    return Net(forward), ((boxes if bad else boxes / 8).half().float(),)


@failure(
    "torch.cdist: distances by matrix products lose small ones",
    "",
    "AMP205 AMP208",
    "half16 halfbf",
    wrong="cuda16 cudabf",
)
def pairwise_distance(bad: bool) -> Built:
    """|x|^2 + |y|^2 - 2 x.y of points that are near each other and far from the origin."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        points = x if bad else x - x.mean(0, keepdim=True)
        if not bad:
            return (points[:, None] - points[None]).abs().sum(-1)
        squares = points.square().sum(-1)
        return squares[:, None] + squares[None] - 2 * points @ points.t()

    return Net(forward), (torch.rand(16, 3) + 20.0 if bad else torch.rand(16, 3),)


@failure("Unix time in a feature vector", "", "AMP206", "half16")
def timestamps(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        seconds = time - (0 if bad else 1_700_000_000)
        return m.inner(x) + seconds[:, None].to(x.dtype)

    time = torch.tensor([1_700_000_001, 1_700_000_100, 1_700_000_007, 1_700_000_300])
    return Net(forward, inner=linear(16, 16, gain=30.0)), (torch.randn(4, 16), time)


@failure("indices carried as floats", "", "AMP206", "half16 halfbf")
def float_indices(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        count = 5001 if bad else 200
        return m.inner(x).sum() * 0 + torch.arange(count).to(x.dtype)

    return Net(forward, inner=linear(16, 16)), (torch.randn(4, 16),)
