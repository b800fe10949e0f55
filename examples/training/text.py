"""A small transformer that learns to write this repository's README, letter by letter.

Expect: as with the digits; ``ampaudit train examples/training/text.py --policy apex-o2,apex-o3`` shows both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, WIDTH, BATCH = 32, 48, 16
TEXT = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.letters(ids) + self.places
        return self.head(self.norm(self.blocks(hidden, mask=self.mask, is_causal=True)))


def get_model() -> nn.Module:
    return Writer()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    chance = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=chance)
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def model_inputs(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return batch[0]


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def metric(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (output.argmax(-1) == batch[1]).float().mean().item()
