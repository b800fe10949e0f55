"""Tail risk: the fit against scipy's distribution and its own simulations, and when nothing is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from ampaudit import scan
from ampaudit.core.sites import SiteId
from ampaudit.run.extreme_value import MIN_BATCHES, ExtremeValues, fit, tail_risk

SITE = SiteId("head/linear")
SHAPES = [-0.3, 0.0, 0.3]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_distribution_is_scipys(shape: float) -> None:
    ours, theirs = ExtremeValues(shape, 5.0, 2.0), stats.genextreme(shape, 5.0, 2.0)
    for limit in (0.0, 4.0, 5.0, 8.0, 11.0, 30.0):
        assert ours.beyond(limit) == pytest.approx(theirs.sf(limit), rel=1e-9, abs=1e-300)
    drawn = ours.sample(20_000, np.random.default_rng(1))
    assert stats.kstest(drawn, theirs.cdf).pvalue > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fit_finds_the_parameters(shape: float) -> None:
    found = fit(ExtremeValues(shape, 100.0, 7.0).sample(20_000, np.random.default_rng(2)))
    assert found is not None
    assert found.shape == pytest.approx(shape, abs=0.03)
    assert found.location == pytest.approx(100.0, rel=0.01)
    assert found.scale == pytest.approx(7.0, rel=0.05)


def test_the_fit_of_a_strongly_bent_tail_needs_the_second_term() -> None:
    found = fit(ExtremeValues(0.6, 100.0, 7.0).sample(400_000, np.random.default_rng(5)))
    assert found is not None
    assert found.shape == pytest.approx(0.6, abs=0.008)


@pytest.mark.parametrize("shape", [-0.1, 0.0, 0.1])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(shape: float) -> None:
    truth, limit = ExtremeValues(shape, 100.0, 7.0), 125.0
    rate = truth.beyond(limit) * 1e6 / 8
    generator = np.random.default_rng(3)
    hits = 0
    for trial in range(60):
        found = tail_risk(SITE, list(truth.sample(100, generator)), limit, 8, seed=trial)
        assert found is not None
        hits += found.low <= rate <= found.high
    assert hits >= 45  # of 60; 54 are nine tenths


def test_too_few_or_equal_peaks_say_nothing() -> None:
    assert tail_risk(SITE, [1.0 + i for i in range(MIN_BATCHES - 1)], 10.0, 1) is None
    assert tail_risk(SITE, [3.0] * 50, 10.0, 1) is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(4e4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def test_a_scan_of_many_batches_prints_the_risk_and_one_of_few_does_not() -> None:
    many = scan(Scaled(), batches=[torch.rand(4, 8) + 0.1 for _ in range(30)], policy="half")
    (risk,) = many.tails
    assert (risk.site, risk.batches, risk.samples) == ("(top)/mul", 30, 4)
    assert 0 <= risk.low <= risk.per_million <= risk.high
    assert scan(Scaled(), batches=[torch.rand(4, 8) for _ in range(5)], policy="half").tails == ()
