"""Scans over several steps, and rounding by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ampaudit
from ampaudit.report.model import Report
from ampaudit.run.lockstep import Pair


def half(tensor: torch.Tensor) -> torch.Tensor:
    """Round to float16, and carry in float32."""
    return tensor.half().float()


def scanned(
    model: nn.Module, inputs: Any, steps: int, **options: Any
) -> tuple[Report, list[dict[str, Pair]]]:
    """Scan, and return the report and the outputs of each step."""
    kept: list[dict[str, Pair]] = []
    report = ampaudit.scan(
        model,
        inputs,
        steps=steps,
        policy="half",
        session=ampaudit.Session(keep_outputs=lambda _, named: kept.append(named)),
        **options,
    )
    return report, kept
