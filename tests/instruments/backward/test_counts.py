"""An element of a gradient is counted once, however many of the shares that add up to it break."""

from __future__ import annotations

import torch
from torch import nn

from ampaudit import scan


class TwoUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1e-3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.weight + 1
        return (hidden * x).sum(-1), (hidden * (x * 0.5)).sum(-1)


def test_two_shares_that_break_at_an_element_and_their_sum_count_once() -> None:
    model, x = TwoUses().train(), torch.full((8,), 6000.0)
    report = scan(
        model,
        x,
        policy="half",
        backward=True,
        loss=lambda outputs: 1e-3 * (outputs[0] + outputs[1]).mean(),
        loss_scale=32768.0,
    )
    (found,) = (f.evidence for f in report.findings if f.code == "AMP701")
    assert (found.inf, found.nan, found.elements) == (8, 0, 8)
