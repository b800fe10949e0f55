"""A model whose batches differ: in shape, in what overflows, in what is decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["BATCHES", "MODEL", "without_times", "written"]

BATCHES = 9
MODEL = """
import os
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, ids, gain):
        x = self.table(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x)))) * gain
        scores = self.head(x / torch.sqrt((x * 40).pow(2).sum(-1, keepdim=True)))
        return {"scores": scores, "best": scores.mean(1).topk(2).indices, "fine": (scores + 300) - 300}

def get_model():
    return Mixed()

def batches():
    made = torch.Generator().manual_seed(3)
    for number in range(9):
        ids = torch.randint(0, 50, (4, 6 if number % 3 else 9), generator=made)
        yield {"ids": ids, "gain": torch.tensor(200.0 if number == 5 else 1.0)}

def loss(output, batch):
    return output["scores"].float().pow(2).mean() * 30
"""


def written(folder: Path, body: str = MODEL) -> Path:
    """Write the model's file."""
    path = folder / "mixed.py"
    path.write_text(body)
    return path


def without_times(path: Path) -> str:
    """Return a JSON report without its timings."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if key != "timings"}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return json.dumps(cleaned(json.loads(path.read_text())))
