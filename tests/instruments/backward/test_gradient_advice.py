"""Advice about gradients: one finding per cure, the cure holds in a run, and no two sentences disagree."""

from __future__ import annotations

import pytest

from ampaudit.report.gradients import ScaleAdvice


@pytest.mark.parametrize(
    ("low", "high", "suggested"),
    [(-20, 16, 15), (3, 3, 3), (-5, 0, 0), (-20, -1, None), (5, 4, None), (-1, 1, 0)],
)
def test_the_suggested_scale_suits_and_is_at_least_one(low: int, high: int, suggested: int | None) -> None:
    assert ScaleAdvice(0.05, (), (), low, high, "", "").suggested == suggested
