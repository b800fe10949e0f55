"""Searches over choices whose accuracy is made up."""

from __future__ import annotations

import numpy as np
import pytest

from ampaudit.run.sensitivity.precision_graph import PrecisionGraph, PrecisionValue, ValueKind
from ampaudit.run.sensitivity.probe import Sensitivities
from ampaudit.tuning.problem import Chosen, Prices, TuningProblem
from ampaudit.tuning.search import Accuracy, TuningSearch, accuracy_of, noise_of

DB = 49.0


def search_of(noises: dict[str, float], good: set[str], off: float) -> TuningSearch:
    """Make a search among ops, written as letters, whose accuracy is so many dB from the predicted one."""
    graph = PrecisionGraph({name: PrecisionValue(name, ValueKind.OP, low=True) for name in noises})
    errors = Sensitivities(["output"], {name: np.array([noise]) for name, noise in noises.items()})
    problem = TuningProblem(graph, errors, Prices(dict.fromkeys(noises, 1.0), {}))

    def run(chosen: Chosen) -> Accuracy:
        predicted = accuracy_of(problem.noise(chosen))
        reached = "".join(sorted(chosen)) in good
        return Accuracy(None if predicted is None else predicted + off, reached)

    return TuningSearch(problem, run, noise_of(DB))


def test_what_was_needed_beside_an_op_that_is_gone_is_tried_again() -> None:
    search = search_of({"a": 1e-5, "b": 2e-5, "c": 4e-5}, {"abc", "ac", "c"}, 0.0)
    chosen, needed = search.minimal(frozenset("abc"))
    assert chosen == {"c"}
    assert list(needed) == ["c"]
    assert [tried.ops for tried in search.tried] == [2, 2, 1, 1, 0]


@pytest.mark.parametrize(("off", "expected"), [(0.5, "abc"), (-2.0, "ac")])
def test_single_ops_are_taken_away_where_predictions_are_off(off: float, expected: str) -> None:
    """The set abc has 50 dB as predicted, and a is the least useful in it."""
    search = search_of({"a": 2e-5, "b": 3e-5, "c": 4e-5, "d": 1e-5}, {"abcd", "abc", "ac"}, off)
    found = search.solved()
    assert found is not None
    assert "".join(sorted(found)) == expected
