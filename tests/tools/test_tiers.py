"""Tiers of tests: what the rule promises, and that the list names tests that exist."""

from __future__ import annotations

import re
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from tools.tiers import AFFORDABLE, CHEAP, ENOUGH, LONG, NEEDED, WORTH, Lines, later_tiers, read_tiers

Suite = dict[str, tuple[float, Lines]]
SECONDS = st.sampled_from([0.01, 0.04, 0.06, 0.3, 0.4, 2.0, 4.0, 9.0, 11.0])
LINES = st.dictionaries(st.sampled_from(["a.py", "b.py"]), st.integers(0, 31))
SUITES = st.dictionaries(
    st.sampled_from([f"test_{function}[{case}]" for function in "xyz" for case in range(4)]),
    st.tuples(SECONDS, LINES),
)


def union(parts: list[Lines]) -> Lines:
    total: Lines = defaultdict(int)
    for part in parts:
        for file, bits in part.items():
            total[file] |= bits
    return {file: bits for file, bits in total.items() if bits}


def brings(test: str, suite: Suite, later: dict[str, int], tier: int) -> int:
    """How many lines a test executes that no other test of the tiers before one executes."""
    others = union(
        [lines for other, (_, lines) in suite.items() if other != test and later.get(other, 1) < tier]
    )
    both = union([others, suite[test][1]])
    return sum(bits.bit_count() for bits in both.values()) - sum(bits.bit_count() for bits in others.values())


@given(SUITES)
def test_the_first_tier_has_every_cheap_test_and_every_line_that_is_worth_its_time(suite: Suite) -> None:
    times = {test: seconds for test, (seconds, _) in suite.items()}
    later = later_tiers(times, {test: lines for test, (_, lines) in suite.items()})
    first = [lines for test, (_, lines) in suite.items() if test not in later]
    for test in later:
        seconds, lines = suite[test]
        new = sum(bits.bit_count() for bits in union([*first, lines]).values())
        new -= sum(bits.bit_count() for bits in union(first).values())
        assert new < WORTH * seconds
    for function in {test.partition("[")[0] for test in suite}:
        costs = {test: times[test] for test in suite if test.startswith(function + "[")}
        if max(costs.values()) <= LONG:
            assert not [test for test in later if test in costs and costs[test] <= CHEAP]
            assert min(costs.values()) > AFFORDABLE or costs.keys() - later.keys()
        second = [test for test in costs if later.get(test) == 2]
        needed = [test for test in second if brings(test, suite, later, 3) >= NEEDED * costs[test]]
        plain = [costs[test] for test in second if test not in needed]
        assert max(plain, default=0) <= LONG
        assert sum(plain) <= ENOUGH or len(plain) == 1
    for test, tier in later.items():
        assert tier == 2 or brings(test, suite, later, 3) < NEEDED * times[test]


def test_the_list_names_tests_that_exist() -> None:
    functions = {re.sub(r"\[.*", "", test, flags=re.S) for test in read_tiers(ROOT / "tests" / "tiers.txt")}
    by_file: dict[str, set[str]] = defaultdict(set)
    for function in functions:
        file, _, name = function.rpartition("::")
        by_file[file.partition("::")[0]].add(name)
    assert by_file
    for file, names in by_file.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert sorted(name for name in names if f"def {name}(" not in text) == [], file
