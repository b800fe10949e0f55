"""Random programs stay within their bounds, over every transfer, every argument and odd shapes.

``python -m benchmarks.soundness`` runs the same on 100,000 programs.
"""

from __future__ import annotations

import functools
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest
from torch.testing._internal.common_methods_invocations import op_db

from tests.support.soundness.fuzz import (
    BRANCHES,
    RAISED,
    SETTINGS,
    Prepared,
    Report,
    Setting,
    examine_seed,
    random_branches,
    shrunk,
)
from tests.support.soundness.mutants import MUTANTS
from tests.support.soundness.samples import sample_problems

EXAMPLES = 3  # seeds of each setting and part, each of 40 programs
SEARCHED = 90  # seeds
ROUNDS = 6  # inputs of each
PARTS = 40  # of torch's ops
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_value_of_a_random_program_leaves_its_bound(setting: Setting, part: int) -> None:
    total = Report()

    # a seed cannot be made simpler; what is found is cut down line by line instead
    # and the same programs every time, since a change is to be told from luck; the benchmark takes new ones
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        database=None,
        derandomize=True,
    )
    @hypothesis.given(st.integers(0, (1 << 40) - 1))
    def examine(seed: int) -> None:
        total.add(examine_seed((part << 40) + seed, setting, rounds=ROUNDS))
        assert not total.found, f"\n{shrunk(total.found[0])}"

    examine()
    assert total.branches >= 0.9 * EXAMPLES * BRANCHES
    assert total.bounded.total() >= 0.5 * total.values.total(), "what has no bound cannot leave it"


def test_the_ops_that_are_covered_are_met_with_finite_bounds() -> None:
    """Not all in so few programs, but most, or the programs have become too odd to say anything."""
    total = Report()
    for seed in range(4):
        total.add(examine_seed(seed, SETTINGS[seed % len(SETTINGS)], rounds=1))
    met = Counter({op: count for op, count in total.bounded.items() if count})
    assert len(met) >= 100


@functools.cache
def _healthy(seed: int) -> Prepared | None:
    """The programs of a seed; ``None`` for those that cannot be traced side by side, or fail."""
    setting = SETTINGS[seed % len(SETTINGS)]
    prepared = Prepared.of(random_branches(seed, setting), setting, seed)
    report = prepared.report(ROUNDS) if prepared is not None else None
    return prepared if report is not None and not report.found else None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_transfer_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEARCHED):
        if (prepared := _healthy(seed)) is None:
            continue
        with monkeypatch.context() as patch:
            MUTANTS[name].apply(patch)
            report = prepared.report(ROUNDS)
        if report is not None and any(not e.problem.startswith(RAISED) for e in report.found):
            return
    pytest.fail(f"{name}: not found in {SEARCHED * BRANCHES} programs")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("setting", [Setting("as-is", "float16"), Setting("half", "float16")], ids=str)
def test_no_value_of_torchs_own_samples_leaves_its_bound(setting: Setting, part: int) -> None:
    problems = [problem for info in op_db[part::PARTS] for problem in sample_problems(info, setting, 2)]
    assert not problems, "\n".join(problems)
