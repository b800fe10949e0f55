"""Gradients through complex values; the oracle is autograd on the model and on a real half model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from tests.support.wrap import Wrap


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, as the first Llama computes them."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones(x.shape[-2], pairs.shape[-1]), torch.arange(float(x.shape[-2]))[:, None])
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "rotary positions": lambda m, x: F.scaled_dot_product_attention(rotated(m.a(x)), rotated(m.b(x)), x),
    "parts": lambda m, x: torch.complex(m.a(x).float(), m.b(x).float()).conj().angle().type_as(x),
    "transform": lambda m, x: torch.fft.rfft(m.a(x).float()).abs() @ m.b.weight[:5].float(),
    "filter": lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x).float()) * torch.fft.rfft(m.b(x).float())),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_gradients_pass_complex_values(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model: Any = Wrap(CASES[name], a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    x = torch.randn(2, 3, 8)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum() * 100

    half: Any = copy.deepcopy(model).half()
    (loss(half(x.half())) * scale).backward()
    (loss(model(x)) * scale).backward()
    expected = {key: (p.grad, half.get_parameter(key).grad) for key, p in model.named_parameters()}
    model.zero_grad()
    report = ampaudit.scan(model, x, policy="half", backward=True, loss=loss, loss_scale=scale)
    assert report.backward is not None
    assert report.backward.unused == (("b.bias",) if name == "transform" else ())
    found = {row.name: row.gradient for row in report.backward.parameters}
    broken = False
    for key, (exact, low) in expected.items():
        if exact is None:
            continue
        broken |= not bool(low.isfinite().all())
        assert found[key].peak == pytest.approx(float(exact.abs().max()), rel=1e-4)
        if not broken and not found[key].cancelled:
            accuracy = 10 * torch.log10(exact.square().sum() / (exact - low.float()).square().sum())
            assert found[key].sqnr_db == pytest.approx(float(accuracy), abs=6)
    assert broken == (scale > 1)
    assert ("AMP701" in {finding.code for finding in report.findings}) == broken
    both = ampaudit.scan(
        model, x, policy="half", backward=True, loss=loss, sensitivity=True, loss_scale=scale
    )
    assert both.verdict == report.verdict


class Turn(nn.Module):
    """Turns complex numbers by a parameter, which is complex or holds pairs of real numbers."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        parts = torch.randn(4, 2)
        self.turn = nn.Parameter(parts if pairs else torch.view_as_complex(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.turn if self.turn.is_complex() else torch.view_as_complex(self.turn)
        return torch.view_as_real(torch.view_as_complex(self.a(x).float().reshape(-1, 4, 2)) * turn)


def test_a_complex_parameter_is_ranked_like_its_pairs_of_real_numbers() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    ranked, expected = (
        ampaudit.scan(
            Turn(pairs=pairs), x, policy="torch-cuda", backward=True, sensitivity=True, loss=loss
        ).sections["sensitivity"]
        for pairs in (False, True)
    )
    assert ranked.measured_db == pytest.approx(expected.measured_db, abs=0.01)
    assert ranked.predicted_db == pytest.approx(expected.predicted_db, abs=1.5)  # of random probes
    shares = {(row.name, row.kind): row.share for row in expected.rows}
    assert {(row.name, row.kind): row.share for row in ranked.rows} == pytest.approx(shares, abs=0.1)
