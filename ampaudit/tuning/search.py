"""Runs choices, corrects the budget by what they show, and takes away what is not needed.

A value in float32 whose reader is in 16 bits costs a cast, and its rounding. Without the budget this is
submodular, a minimum cut (Kolmogorov and Zabih, 2004), so the linear relaxation is integral but for the few
budgets, and branch and bound ends after a few nodes. Its dual bound holds for every choice.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ampaudit.core.config import Progress, silent
from ampaudit.report.tuning import TriedSet
from ampaudit.run.sensitivity.precision_graph import ValueKind
from ampaudit.tuning.problem import Chosen, Prices, TuningProblem

__all__ = ["Accuracy", "Solver", "TuningSearch", "accuracy_of", "finite_db", "noise_of", "tried_set"]

NODES = 50  # of the search tree, after which the best choice is taken; the bound says how far it may be off
SECONDS = 60.0  # the same, for a machine that is stuck
GAP = 0.005  # of the cost, at which a choice is good enough: half an op in a hundred
_POINTS = 12  # of the frontier
_POINTS_GAP = 0.02  # the frontier is a picture
_TIE = 0.1  # of the least price: among choices that cost the same, the most accurate
_NEGLIGIBLE = 1e-9  # share of the budget; smaller coefficients only trouble the solver
TriedStep = Literal["start", "solve", "shrink", "exhaustive", "final"]

ROUNDS = 5  # of solving and running
TRUSTED = 8.0  # factor up to which measured and predicted errors may differ for the prediction to be a guide
SLACK = 1.05  # of the error, which is worth another round
UNSURE = 1.25  # factor between measured and predicted error from which ops are taken away one by one as well
RUNS = 12  # up to which that is done


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What a run showed.

    Attributes:
        db: accuracy of the worst output; ``None`` if it is exact, ``-inf`` with inf or NaN in 16 bits.
        reached: whether it is what was asked for.
        metric: the metric in FP32 and in this run, if there is one.
    """

    db: float | None
    reached: bool
    metric: tuple[float, float] | None = None

    @property
    def noise(self) -> float:
        """Squared error of the worst output, relative to its squares."""
        return 0.0 if self.db is None else noise_of(self.db)


def noise_of(db: float) -> float:
    """Return the relative squared error of an accuracy in dB."""
    return math.inf if db == -math.inf else 10.0 ** (-db / 10.0)


@dataclass
class TuningSearch:
    """Searches for the cheapest choice that has the accuracy as measured.

    Attributes:
        problem: what is to be chosen.
        run: runs a choice.
        budget: relative squared error that is allowed; ``None`` where a metric decides.
        solver: of the problem.
        tried: the choices that were run, in order.
    """

    problem: TuningProblem
    run: Callable[[Chosen], Accuracy]
    budget: float | None
    on_progress: Progress = silent
    tried: list[TriedSet] = field(default_factory=list)
    _known: dict[Chosen, Accuracy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.solver = Solver(self.problem)

    @property
    def runs(self) -> int:
        """The number of choices that were run."""
        return len(self._known)

    def measured(self, chosen: Chosen, step: TriedStep, what: str) -> Accuracy:
        """Run a choice, once."""
        if chosen not in self._known:
            self.on_progress(what, len(self._known), 0)
            found = self._known[chosen] = self.run(chosen)
            self.tried.append(tried_set(self.problem, chosen, found, step, what))
        return self._known[chosen]

    def known(self, chosen: Chosen) -> Accuracy | None:
        """Return what a run of a choice showed, if there was one."""
        return self._known.get(chosen)

    def solved(self) -> Chosen | None:
        """Return the cheapest choice that was found to reach the accuracy; ``None`` if none does."""
        first = self.measured(self.problem.required, "start", "everything else in 16 bits")
        if first.reached:
            return self.problem.required
        chosen = None if self.budget is None else self._solved(self.budget, first)
        chosen = self._bisected() if chosen is None else chosen
        if chosen is None:
            return None
        chosen = self._shrunk(chosen)
        return self._taken_away(chosen, "shrink", RUNS)[0] if self._is_unsure() else chosen

    def _solved(self, budget: float, first: Accuracy) -> Chosen | None:
        """Return the cheapest choice found for a budget that is corrected by what runs show."""
        correction = self._correction(self.problem.required, first, 1.0)
        best: Point | None = None
        for _ in range(ROUNDS):
            point = self.solver.solve(budget / correction)
            if point is None or (best is not None and point.cost >= best.cost):
                break
            found = self.measured(
                point.chosen, "solve", f"{len(self.problem.ops(point.chosen))} ops in float32"
            )
            best = point if found.reached else best
            before, correction = correction, self._correction(point.chosen, found, correction)
            if found.reached and correction >= before:
                break
        return best.chosen if best is not None else None

    def _correction(self, chosen: Chosen, found: Accuracy, before: float) -> float:
        """Return measured over predicted error, by which budgets are divided."""
        predicted = self.problem.noise(chosen)
        if found.noise == 0.0 or predicted == 0.0 or math.isinf(found.noise):
            return before * 2
        ratio = found.noise / predicted
        if found.reached:
            return max(ratio, before / TRUSTED)
        return max(ratio, before * SLACK)

    def _bisected(self) -> Chosen | None:
        """Return the cheapest point of the frontier that reaches the accuracy, whatever is predicted."""
        points = [*(point.chosen for point in self.solver.frontier()), frozenset(self.problem.free)]
        if not self.measured(points[-1], "solve", "the most accurate choice").reached:
            return None
        low, high = 0, len(points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            ops = f"{len(self.problem.ops(points[middle]))} ops in float32"
            low, high = (
                (low, middle) if self.measured(points[middle], "solve", ops).reached else (middle, high)
            )
        return points[high]

    def _shrunk(self, chosen: Chosen) -> Chosen:
        """Take away as many of the least useful members as the accuracy allows, by bisection."""
        order = self.least_useful(chosen)
        low, high = 0, len(order)  # so many can go for certain; so many perhaps
        while low < high:
            count = min(2 * low or 1, (low + high + 1) // 2)
            fewer = self.problem.reduced(chosen, order[:count])
            found = self.measured(fewer, "shrink", f"without the {count} least useful")
            low, high = (count, high) if found.reached else (low, count - 1)
        return self.problem.reduced(chosen, order[:low])

    def least_useful(self, chosen: Chosen) -> list[str]:
        """Return the members that may go, those first whose rounding adds the least error."""
        members = chosen - self.problem.required
        return sorted(members, key=lambda name: (self.problem.noise(chosen - {name}), name))

    def minimal(self, chosen: Chosen) -> tuple[Chosen, dict[str, Accuracy]]:
        """Take away each op that is not needed, one run each; return what the others' absence shows."""
        while True:
            found, needed = self._taken_away(chosen, "exhaustive")
            if found == chosen:
                return chosen, needed
            chosen = found  # what was needed beside an op that is gone may not be needed any more

    def _is_unsure(self) -> bool:
        """Return whether some run showed that its error was predicted badly."""
        pairs = ((found.noise, self.problem.noise(chosen)) for chosen, found in self._known.items())
        return any(max(pair) > min(pair) * UNSURE for pair in pairs)

    def _taken_away(
        self, chosen: Chosen, step: TriedStep, runs: float = math.inf
    ) -> tuple[Chosen, dict[str, Accuracy]]:
        """Take away single ops, the least useful first, while there are runs left."""
        needed: dict[str, Accuracy] = {}
        ops = set(self.problem.ops(chosen))
        for name in self.least_useful(chosen):
            if name in ops and self.runs < runs:
                fewer = self.problem.reduced(chosen, [name])
                found = self.measured(fewer, step, f"without {name}")
                if found.reached:
                    chosen = fewer
                else:
                    needed[name] = found
        return chosen, needed


def accuracy_of(noise: float) -> float | None:
    """Return the accuracy of a relative squared error in dB; ``None`` if it is exact."""
    return None if noise == 0.0 else -10.0 * math.log10(noise)


def finite_db(db: float | None) -> float | None:
    """Return an accuracy for a report; ``None`` also for infinite ones."""
    return None if db is None or math.isinf(db) else db


def tried_set(
    problem: TuningProblem, chosen: Chosen, found: Accuracy, step: TriedStep, what: str
) -> TriedSet:
    """Return a choice that was run, for the report."""
    predicted = accuracy_of(problem.noise(chosen))
    broken = found.db == -math.inf
    ops, metric = len(problem.ops(chosen)), None if found.metric is None else found.metric[1]
    return TriedSet(step, what, ops, predicted, finite_db(found.db), broken, found.reached, metric)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Send what the solver's C++ code prints, whatever its options say, to the null device."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@dataclass(frozen=True, slots=True)
class Point:
    """A choice with its cost and its predicted relative squared error, in the worst column.

    Attributes:
        bound: no choice within the budget costs less.
    """

    chosen: Chosen
    cost: float
    noise: float
    bound: float


@dataclass
class _Rows:
    """Linear constraints, row by row."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def add(self, terms: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> None:
        self.entries += [(len(self.least), column, number) for column, number in terms.items()]
        self.least.append(least)
        self.most.append(most)


class Solver:
    """Solves one problem for any budget.

    Variables are 1 for a value in float32; for a value in float32 that a reader in 16 bits casts; and for a
    cast of a value, which is paid once per direction. One more is the error of the worst column.
    """

    def __init__(self, problem: TuningProblem) -> None:
        self.problem = problem
        self._index = {name: number for number, name in enumerate(problem.graph.values)}
        self._rows = _Rows()
        self._count = len(self._index)
        self._reads = {key: self._variable() for key in problem.sensitivities.reads}
        self._noise = self._variable()  # of the worst column, in units of the budget
        self._casts: dict[tuple[str, bool], int] = {}
        self._constrain()

    def solve(self, budget: float, prices: Prices | None = None, gap: float = GAP) -> Point | None:
        """Return the cheapest choice whose predicted error is within a budget; ``None`` if none is.

        Args:
            budget: relative squared error that each column may have.
            prices: instead of the problem's own.
            gap: share of the cost by which the choice may exceed the least one.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        everything = frozenset(self.problem.free)
        if self.problem.noise(everything) > budget:
            return None
        if budget <= _NEGLIGIBLE**2 * self.problem.noise(frozenset()):  # beyond what numbers can tell apart
            cost = self.problem.cost(everything)
            return Point(everything, cost, self.problem.noise(everything), 0.0)
        least, most = self._limits()
        kinds = np.zeros(self._count)
        kinds[: len(self._index)] = [v.free for v in self.problem.graph.values.values()]
        objective = self._objective(prices or self.problem.prices)
        objective[self._noise] = tie = _TIE * min(objective[objective > 0], default=0.0)
        with _silenced():
            found = milp(
                objective,
                constraints=LinearConstraint(*self._matrix(budget)),
                bounds=Bounds(least, most),
                integrality=kinds,
                options={"node_limit": NODES, "time_limit": SECONDS, "mip_rel_gap": gap},
            )
        if found.x is None:
            return None
        chosen = frozenset(name for name in self.problem.free if found.x[self._index[name]] > 0.5)
        cost, noise = self.problem.cost(chosen), self.problem.noise(chosen)
        return Point(chosen, cost, noise, max(float(found.mip_dual_bound or 0.0) - tie, 0.0))

    def least_ops(self, budget: float) -> int:
        """Return how many ops any choice within the budget has at least."""
        found = self.solve(budget, self.problem.prices.counting(self.problem.graph))
        return 0 if found is None else math.ceil(found.bound - 1e-6)

    def frontier(self) -> list[Point]:
        """Return the best choices for budgets between everything in 16 bits and the most accurate."""
        first, last = self.problem.noise(self.problem.required), self.problem.noise(self.problem.free)
        if not first:
            return []
        steps = np.geomspace(first, max(last, first * 1e-4), _POINTS)  # 40 dB at most
        found: dict[Chosen, Point] = {}
        for budget in steps:
            point = self.solve(float(budget) * (1 + 1e-9), gap=_POINTS_GAP)
            if point is not None:
                found.setdefault(point.chosen, point)
        return sorted(found.values(), key=lambda point: point.cost)

    def _variable(self) -> int:
        self._count += 1
        return self._count - 1

    def _constrain(self) -> None:
        """Say when a value is cast, and that an op without a rule follows its inputs."""
        index, rows = self._index, self._rows
        for name, value in self.problem.graph.values.items():
            if value.kind is ValueKind.FOLLOW:  # float32 only if one of its inputs is
                sources = self.problem.graph.reads.get(name, ())
                rows.add({**{index[source]: -1.0 for source in sources}, index[name]: 1.0}, most=0.0)
        for (made, reader), number in self._reads.items():
            rows.add({number: 1.0, index[made]: -1.0, index[reader]: 1.0}, least=0.0)
        for source, user in self.problem.graph.readers():
            first, second = index[source.name], index[user.name]
            if user.kind is ValueKind.FOLLOW:
                rows.add({second: 1.0, first: -1.0}, least=0.0)
            elif self.problem.prices.casts.get(source.name) and source.kind is not ValueKind.WEIGHT:
                for up in (False, True):
                    cast = self._casts.setdefault((source.name, up), self._count)
                    self._count = max(self._count, cast + 1)
                    sign = 1.0 if up else -1.0
                    rows.add({cast: 1.0, first: sign, second: -sign}, least=0.0)

    def _objective(self, prices: Prices) -> Any:
        cost = np.zeros(self._count)
        for name, number in self._index.items():
            cost[number] = prices.values.get(name, 0.0)
        for (name, _), number in self._casts.items():
            cost[number] = prices.casts.get(name, 0.0)
        return cost

    def _limits(self) -> tuple[Any, Any]:
        least, most = np.zeros(self._count), np.ones(self._count)
        for name, value in self.problem.graph.values.items():
            if value.kind is ValueKind.FLOAT32 or name in self.problem.required:
                least[self._index[name]] = 1.0
            elif value.kind is ValueKind.LOW:
                most[self._index[name]] = 0.0
        return least, most

    def _matrix(self, budget: float) -> tuple[Any, Any, Any]:
        """Return the constraints, with one about the error of each column, in units of the budget."""
        from scipy.sparse import coo_array

        rows = _Rows(list(self._rows.entries), list(self._rows.least), list(self._rows.most))
        errors = self.problem.sensitivities
        for column in range(len(errors.columns)):
            terms: dict[int, float] = {}
            constant = 0.0
            for name, row in errors.own.items():
                constant += row[column] / budget
                terms[self._index[name]] = -row[column] / budget
            for key, row in errors.reads.items():
                terms[self._reads[key]] = row[column] / budget
            large = {number: x for number, x in terms.items() if abs(x) > _NEGLIGIBLE}
            rows.add({**large, self._noise: -1.0}, most=-constant)
        numbers, columns, values = zip(*rows.entries, strict=True)
        shape = len(rows.least), self._count
        return coo_array((values, (numbers, columns)), shape=shape).tocsr(), rows.least, rows.most
