"""The cheapest choice within a budget, beside all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.instruments.sensitivity.probe import PrecisionGraph, PrecisionValue, Sensitivities, ValueKind
from ampaudit.tuning.search import Prices, Solver, TuningProblem

NAMES = "abcde"
EDGES = list(combinations(NAMES, 2))


@st.composite
def problems(draw: st.DrawFn) -> TuningProblem:
    """Five ops that read each other in any way, with prices of float32 and of casts."""
    numbers = st.lists(st.integers(1, 20).map(float), min_size=5, max_size=5)
    values = {name: PrecisionValue(name, ValueKind.OP, low=True) for name in NAMES}
    edges = draw(st.sets(st.sampled_from(EDGES)))
    reads = {name: tuple(made for made in NAMES if (made, name) in edges) for name in NAMES}
    noises = {name: np.array([noise]) for name, noise in zip(NAMES, draw(numbers), strict=True)}
    prices = Prices(*(dict(zip(NAMES, draw(numbers), strict=True)) for _ in range(2)))
    return TuningProblem(PrecisionGraph(values, reads), Sensitivities(["output"], noises), prices)


@settings(max_examples=30)
@given(problem=problems(), share=st.floats(0.05, 0.95))
def test_no_subset_within_the_budget_costs_less(problem: TuningProblem, share: float) -> None:
    budget = problem.noise(frozenset()) * share
    subsets = (frozenset(choice) for size in range(6) for choice in combinations(NAMES, size))
    least = min(problem.cost(choice) for choice in subsets if problem.noise(choice) <= budget)
    found = Solver(problem).solve(budget, gap=0.0)
    assert found is not None
    assert problem.noise(found.choice) <= budget * (1 + 1e-9)
    assert found.cost == pytest.approx(least, rel=1e-6)
