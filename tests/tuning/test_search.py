"""Searches over choices whose accuracy is made up."""

from __future__ import annotations

import numpy as np
import pytest

from ampaudit.instruments.sensitivity.probe import PrecisionGraph, PrecisionValue, Sensitivities, ValueKind
from ampaudit.tuning.search import (
    Accuracy,
    Choice,
    Prices,
    TuningProblem,
    TuningSearch,
    accuracy_of,
    noise_of,
)

DB = 49.0


def search_of(noises: dict[str, float], good: set[str], off: float) -> TuningSearch:
    """Make a search among ops, written as letters, whose accuracy is so many dB from the predicted one."""
    graph = PrecisionGraph({name: PrecisionValue(name, ValueKind.OP, low=True) for name in noises})
    errors = Sensitivities(["output"], {name: np.array([noise]) for name, noise in noises.items()})
    problem = TuningProblem(graph, errors, Prices(dict.fromkeys(noises, 1.0), {}))

    def run(choice: Choice) -> Accuracy:
        predicted = accuracy_of(problem.noise(choice))
        reached = "".join(sorted(choice)) in good
        return Accuracy(None if predicted is None else predicted + off, reached)

    return TuningSearch(problem, run, noise_of(DB))


def test_what_was_needed_beside_an_op_that_is_gone_is_tried_again() -> None:
    search = search_of({"a": 1e-5, "b": 2e-5, "c": 4e-5}, {"abc", "ac", "c"}, 0.0)
    choice, needed = search.minimize(frozenset("abc"))
    assert choice == {"c"}
    assert list(needed) == ["c"]
    assert [tried.ops for tried in search.tried] == [2, 2, 1, 1, 0]


@pytest.mark.parametrize(("off", "expected"), [(0.5, "abc"), (-2.0, "ac")])
def test_single_ops_are_taken_away_where_predictions_are_off(off: float, expected: str) -> None:
    """The set abc has 50 dB as predicted, and a is the least useful in it."""
    search = search_of({"a": 2e-5, "b": 3e-5, "c": 4e-5, "d": 1e-5}, {"abcd", "abc", "ac"}, off)
    found = search.cheapest()
    assert found is not None
    assert "".join(sorted(found)) == expected


def test_a_weight_that_no_op_reads_in_float32_is_not_kept() -> None:
    """Stored in float32, it is rounded where an op in 16 bits reads it: nothing is won."""
    weight = PrecisionValue("w", ValueKind.WEIGHT, low=True)
    ops = {name: PrecisionValue(name, ValueKind.OP, low=True) for name in "ab"}
    graph = PrecisionGraph({"w": weight, **ops}, {"a": ("w",), "b": ("a",)})
    errors = Sensitivities(["output"], {name: np.array([1e-5]) for name in "wab"})
    problem = TuningProblem(graph, errors, Prices({}, {}))
    assert problem.reduced(frozenset("wab"), ["b"]) == {"w", "a"}
    assert problem.reduced(frozenset("wab"), ["a"]) == {"b"}
    pinned = TuningProblem(graph, errors, Prices({}, {}), pinned=frozenset("w"))
    assert pinned.reduced(frozenset("wab"), ["a"]) == {"w", "b"}
