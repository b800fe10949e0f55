"""A detection head: a score threshold, then non-maximum suppression in a loop."""

from __future__ import annotations

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.scores = nn.Conv2d(8, 1, 1)
        self.boxes = nn.Conv2d(8, 4, 1)
        self.scale = scale

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.features(image).relu()
        scores = self.scores(features).sigmoid().flatten()
        corners = self.boxes(features).permute(0, 2, 3, 1).reshape(-1, 4).sigmoid()
        kept = scores > scores.mean()
        scores, corners = scores[kept], corners[kept]
        boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], -1)
        sides = (boxes[:, 2:] - boxes[:, :2]) * self.scale
        areas = sides[:, 0] * sides[:, 1]  # OVERFLOW
        areas = areas / self.scale / self.scale
        order = scores.argsort(descending=True, stable=True)
        found = []
        while order.numel() > 0:
            first = order[0]
            found.append(first)
            rest = order[1:]
            low = torch.maximum(boxes[first, :2], boxes[rest, :2])
            high = torch.minimum(boxes[first, 2:], boxes[rest, 2:])
            shared = (high - low).clamp(min=0).prod(-1)
            overlap = shared / (areas[first] + areas[rest] - shared)
            order = rest[overlap <= 0.5]
        picked = torch.stack(found)
        return boxes[picked], scores[picked]


def get_model(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Detector(scale).eval()


def planted() -> nn.Module:
    return get_model(640.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 3, 16, 16)
