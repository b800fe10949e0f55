"""Writes which tests ``make test`` leaves to ``make test-all`` and to ``make test-long``: tests/tiers.txt.

The rule: a test is in the first tier if it takes at most CHEAP processor seconds; if it is the cheapest case
of its function, and takes at most AFFORDABLE; or if it is needed so that the first tier executes the lines of
the package that all tests execute, at the least cost (a greedy set cover), and is worth it: it brings WORTH
new lines or more for each second. Of the others, those of at most LONG seconds are in the second tier: of
each function the cheapest, up to ENOUGH seconds together, and at least one case; and what brings NEEDED new
lines or more for each second to these two. What is left is in the third. A test that was not measured stays
where it is, and a new one is in the first. Of a function with a case that takes more than LONG seconds, none
is in the first unless the lines need it. Each script that a smoke test runs counts as a function.

``python -m tools.tiers --times TIMES... --coverage DATA...``: TIMES is what ``tests.support.measured`` has
written, DATA what coverage.py has recorded with a context per test; ``make measure`` makes both.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.measured import executed, read_times

CHEAP = 0.05
AFFORDABLE = 0.5
WORTH = 3
NEEDED = 1
ENOUGH = 2
LONG = 10

Lines = dict[str, int]  # by file: a bit for each line


def later_tiers(times: Mapping[str, float], lines: Mapping[str, Lines]) -> dict[str, int]:
    """Return the tests of the second and the third tier by the rule."""
    by_cost = sorted(times, key=lambda test: (times[test], test))
    cheapest: dict[str, str] = {}
    for test in by_cost:
        cheapest.setdefault(_function(test), test)
    # what one case prepares for all costs the others nothing, until it is left out
    dear = {_function(test) for test in by_cost if times[test] > LONG}
    first = {test for test in by_cost if times[test] <= CHEAP}
    first |= {test for test in cheapest.values() if times[test] <= AFFORDABLE}
    first = {test for test in first if _function(test) not in dear}
    first |= _cover(first, times, lines, WORTH)
    later: dict[str, int] = {}
    spent: dict[str, float] = defaultdict(float)
    for test in by_cost:
        if test not in first:
            function = _function(test)
            spent[function] += times[test]
            later[test] = 2 if times[test] <= LONG and spent[function] <= max(ENOUGH, times[test]) else 3
    executed = {test for test in times if later.get(test, 1) < 3}
    return later | dict.fromkeys(_cover(executed, times, lines, NEEDED), 2)


def _function(test: str) -> str:
    """Return the name of a test without its case; the cases of a smoke test run a script each."""
    return test if "test_smoke" in test else test.partition("[")[0]


def _cover(first: set[str], times: Mapping[str, float], lines: Mapping[str, Lines], worth: float) -> set[str]:
    """Return few and cheap tests that execute the lines that the given ones do not."""
    none: Lines = {}
    executed = _union(lines.get(test, none) for test in first)
    before = dict(executed)

    def value(test: str) -> float:
        """Minus the number of new lines for a second: the smallest is the best."""
        new = ((bits & ~executed[file]).bit_count() for file, bits in lines.get(test, none).items())
        return -sum(new) / max(times[test], 0.001)

    queue = [(value(test), test) for test in times.keys() - first]
    heapq.heapify(queue)
    chosen: list[str] = []
    while queue:
        last, test = heapq.heappop(queue)
        now = value(test)  # which has become worse, as others were chosen
        if now == last <= -worth:
            chosen.append(test)
            executed = _union([executed, lines[test]])
        elif now <= -worth:
            heapq.heappush(queue, (now, test))
    needed = set(chosen)
    for test in sorted(chosen, key=lambda test: (-times[test], test)):
        others = _union([before, *(lines[other] for other in needed - {test})])
        if all(not bits & ~others[file] for file, bits in lines[test].items()):
            needed.remove(test)
    return needed


def _union(parts: Iterable[Lines]) -> Lines:
    total: Lines = defaultdict(int)
    for part in parts:
        for file, bits in part.items():
            total[file] |= bits
    return total


def lines_by_test(databases: Iterable[Path]) -> dict[str, Lines]:
    """Return the lines that each test executes, from coverage.py's databases."""
    lines: dict[str, Lines] = defaultdict(lambda: defaultdict(int))
    for file, test, bits in executed(databases):
        lines[test][file] |= bits
    return lines


def read_tiers(path: Path) -> dict[str, int]:
    """Return the tests of the second and the third tier as a file lists them."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {test: int(tier) for tier, _, test in (line.partition(" ") for line in lines)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--times", type=Path, nargs="+", required=True)
    parser.add_argument("--coverage", type=Path, nargs="+", required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("tests/tiers.txt"))
    options = parser.parse_args(arguments)
    times = read_times(options.times)
    later = later_tiers(times, lines_by_test(options.coverage))
    later |= {test: tier for test, tier in read_tiers(options.output).items() if test not in times}
    text = "".join(f"{later[test]} {test}\n" for test in sorted(later))
    options.output.write_text(text, encoding="utf-8")
    for tier in (1, 2, 3):
        seconds = [times[test] for test in times if later.get(test, 1) == tier]
        print(f"tier {tier}: {len(seconds)} tests, {sum(seconds):.0f} processor seconds")


if __name__ == "__main__":
    main()
