"""Assigns each test a tier, by its time and the lines it executes, and writes tests/tiers.txt.

``make test`` runs the first tier, ``make test-all`` the second, and ``make test-long`` the third.

A test is in the first tier if it

- takes at most CHEAP processor seconds, or
- is the cheapest case of its function and takes at most AFFORDABLE seconds, or
- executes lines of the package that the first tier would miss, WORTH or more per second (greedy set cover).

The first two do not apply to a function with a case of more than LONG seconds, because its cheap cases may
only use what that case has prepared.

Of the other tests, the second tier takes the cheapest cases of each function that take at most LONG seconds:
as many as take ENOUGH seconds together, and at least one. It also takes tests that execute NEEDED or more
lines per second that both tiers would miss. The rest is in the third tier.

A test that was not measured stays in its tier, and a new one is in the first. Each script that a smoke test
runs counts as a function.

``python -m tools.tiers --times TIMES... --coverage DATA...``: ``tests.support.measured`` writes TIMES, and
coverage.py writes DATA, with a context per test. ``make measure`` runs both.
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

Lines = dict[str, int]  # by file: a number with a bit for each line


def later_tiers(times: Mapping[str, float], lines: Mapping[str, Lines]) -> dict[str, int]:
    """Return the tests of the second and third tier, with their tier."""
    by_cost = sorted(times, key=lambda test: (times[test], test))
    cheapest: dict[str, str] = {}
    for test in by_cost:
        cheapest.setdefault(_function(test), test)
    # cases may look cheap because a long one prepares what they use, until that one is left out
    slow_functions = {_function(test) for test in by_cost if times[test] > LONG}
    first = {test for test in by_cost if times[test] <= CHEAP}
    first |= {test for test in cheapest.values() if times[test] <= AFFORDABLE}
    first = {test for test in first if _function(test) not in slow_functions}
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
    """Return the name of a test without its case; each case of a smoke test counts as a function."""
    return test if "test_smoke" in test else test.partition("[")[0]


def _cover(first: set[str], times: Mapping[str, float], lines: Mapping[str, Lines], worth: float) -> set[str]:
    """Return a few cheap tests that execute ``worth`` or more lines per second that ``first`` does not."""
    none: Lines = {}
    executed = _union(lines.get(test, none) for test in first)
    before = dict(executed)

    def value(test: str) -> float:
        """Return minus the number of new lines per second, since the heap takes the smallest first."""
        new = ((bits & ~executed[file]).bit_count() for file, bits in lines.get(test, none).items())
        return -sum(new) / max(times[test], 0.001)

    queue = [(value(test), test) for test in times.keys() - first]
    heapq.heapify(queue)
    chosen: list[str] = []
    while queue:
        last, test = heapq.heappop(queue)
        now = value(test)  # worse than before, if tests chosen since then execute some of its lines
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
    """Return the tests of the second and third tier that a file lists, with their tier."""
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
