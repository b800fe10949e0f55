"""Image features take the places of their tokens, as in LLaVA."""

from __future__ import annotations

import torch
from torch import nn


class Merged(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.tower = nn.Conv2d(3, 8, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.gain = gain

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        patches = self.tower(image).to(words.dtype).flatten(2).transpose(1, 2).reshape(-1, 8)
        is_image = ids == 19
        if is_image.sum() != len(patches):
            raise ValueError(f"{is_image.sum().item()} image tokens, {len(patches)} patches")
        patches = patches * self.gain * self.gain  # OVERFLOW
        merged = words.masked_scatter(is_image[..., None], patches / self.gain / self.gain)
        return self.layer(merged)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Merged(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    ids = torch.randint(0, 19, (2, 8))
    ids[0, 1:5] = ids[1, 3:7] = 19
    return ids, torch.randn(2, 3, 8, 8)
