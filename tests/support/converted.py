"""A small model with tied weights, its conversion, and tensors compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from ampaudit.export.convert import convert
from ampaudit.source import Batch, ModelSource


class Tied(nn.Module):
    """An embedding whose weight is the output's, too; a norm, odd buffers, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("eight", torch.ones(5).to(torch.float8_e4m3fn))
        self.register_buffer("passing", torch.ones(16), persistent=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.inner(self.table(ids)) + self.passing.to(self.table.weight.dtype))
        return {"logits": self.head(hidden), "hidden": hidden}


def tied() -> ModelSource:
    torch.manual_seed(0)
    return ModelSource("tied.py", "python", Tied().eval(), (Batch((torch.arange(12).view(2, 6),)),))


def converted(source: ModelSource, out: Path, **options: object) -> Path:
    report, made = convert(source, None, out, **options)
    assert made is not None, report.findings
    return out


def load(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )
