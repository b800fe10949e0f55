"""Searches for the cheapest choice of float32 values that has the required accuracy.

Solves the problem for a budget, runs the solution, corrects the budget by the measured error, and removes
members that are not needed.

A value in float32 whose reader is in 16 bits costs a cast, and its rounding. Without the budget this is
submodular, a minimum cut (Kolmogorov and Zabih, 2004), so the linear relaxation is integral except for the
few budgets, and branch and bound ends after a few nodes. Its dual bound holds for every choice.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ampaudit.core.session import Progress, silent
from ampaudit.core.text import finite_or_none
from ampaudit.instruments.sensitivity.probe import PrecisionGraph, Sensitivities, ValueKind
from ampaudit.report.tuning import TriedSet

Choice = frozenset[str]  # names of ops and weights in float32
Numbers = np.ndarray[Any, np.dtype[np.float64]]
NODES = 50  # limit of the search tree; the dual bound says how far the best choice may be off
SECONDS = 60.0  # limit of one solve, for a machine that is stuck
GAP = 0.005  # relative gap of the cost at which a choice is good enough: half an op in a hundred
_POINTS = 12  # budgets that are solved for the frontier
_POINTS_GAP = 0.02  # relative gap of the cost on the frontier, which is a picture
_TIE = 0.1  # share of the least price: among choices that cost the same, the most accurate
_NEGLIGIBLE = 1e-9  # share of the budget; smaller coefficients only trouble the solver
TriedStep = Literal["start", "solve", "shrink", "exhaustive", "final"]

ROUNDS = 5  # rounds of solving and running
TRUSTED = 8.0  # factor between measured and predicted error up to which the prediction is a guide
SLACK = 1.05  # factor of the error that is worth another round
UNSURE = 1.25  # factor between measured and predicted error from which ops are also removed one by one
RUNS = 12  # limit of runs for that


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs by name of value: of holding it in float32, and of casting it in one direction."""

    values: Mapping[str, float]
    casts: Mapping[str, float]


@dataclass(frozen=True)
class TuningProblem:
    """Minimize the cost of float32 such that no column's predicted error exceeds a budget."""

    graph: PrecisionGraph  # values and their readers
    sensitivities: Sensitivities  # error that each rounding adds, relative to the squares of the outputs
    prices: Prices  # costs of float32 and of casts
    pinned: Choice = frozenset()  # ops and weights whose values 16 bits cannot represent
    # values that 16 bits cannot represent; their readers must take them in float32
    wide_reads: frozenset[str] = frozenset()

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The ops and weights to choose, in graph order."""
        return tuple(name for name, value in self.graph.values.items() if value.free)

    @cached_property
    def required(self) -> Choice:
        """Members of every choice: pinned ones, and readers of values that 16 bits cannot represent."""
        values = self.graph.values
        readers = {n for n, sources in self.graph.reads.items() if not self.wide_reads.isdisjoint(sources)}
        return frozenset(
            n for n in (*self.pinned, *readers, *self.wide_reads) if n in values and values[n].free
        )

    @cached_property
    def _arrays(self) -> tuple[dict[str, int], Numbers, Numbers, Numbers, Numbers]:
        index = {name: number for number, name in enumerate(self.graph.values)}
        columns = len(self.sensitivities.columns)
        value_rows = np.zeros((len(index), columns))
        for name, row in self.sensitivities.own.items():
            value_rows[index[name]] = row
        reads = self.sensitivities.reads
        source = np.array([index[value] for value, _ in reads], dtype=int)
        reader = np.array([index[reader] for _, reader in reads], dtype=int)
        read_rows = np.array(list(reads.values())).reshape(len(reads), columns)
        return index, value_rows, source, reader, read_rows

    def noise(self, choice: Collection[str]) -> float:
        """Return the predicted relative squared error of the worst column."""
        index, value_rows, source, reader, read_rows = self._arrays
        wide = np.zeros(len(index), dtype=bool)
        wide[[index[name] for name in self.graph.in_float32(choice)]] = True
        total = value_rows[~wide].sum(axis=0) + read_rows[wide[source] & ~wide[reader]].sum(axis=0)
        return float(total.max(initial=0.0))

    def reduced(self, choice: Choice, dropped: Collection[str]) -> Choice:
        """Return a choice without some members, and without weights that only 16-bit ops then read.

        A 16-bit op rounds its weights, in whatever format they are stored.
        """
        remaining = choice.difference(dropped)
        wide = self.graph.in_float32(remaining)
        read = self.required.union(source.name for source, user in self.graph.readers() if user.name in wide)
        values = self.graph.values
        return frozenset(n for n in remaining if values[n].kind is not ValueKind.WEIGHT or n in read)

    def cost(self, choice: Collection[str]) -> float:
        """Return the cost of a choice: of its values in float32, and of the casts at its borders."""
        wide = self.graph.in_float32(choice)
        casts = (self.prices.casts.get(name, 0.0) for name, _ in self.borders(wide))
        # fsum is exact, whatever the order of the set
        return math.fsum((*(self.prices.values.get(name, 0.0) for name in wide), *casts))

    def borders(self, wide: Collection[str]) -> Sequence[tuple[str, bool]]:
        """Return the values that are cast, each once per direction, and whether the cast is to float32."""
        casts: dict[tuple[str, bool], None] = {}
        for source, reader in self.graph.readers():
            differ = (source.name in wide) != (reader.name in wide)
            if differ and source.kind is not ValueKind.WEIGHT and reader.kind is not ValueKind.FOLLOW:
                casts[source.name, reader.name in wide] = None
        return list(casts)

    def ops(self, choice: Collection[str]) -> tuple[str, ...]:
        """Return the ops of a choice, in graph order."""
        values = self.graph.values
        return tuple(n for n in values if n in choice and values[n].kind is ValueKind.OP)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The measured accuracy of a choice."""

    # accuracy of the worst output; ``None`` if it is exact, ``-inf`` with inf or NaN in 16 bits
    db: float | None
    reached: bool  # whether that meets the requirement
    metric: tuple[float, float] | None = None  # the metric in FP32 and in this run, if the model has one

    @property
    def noise(self) -> float:
        """Squared error of the worst output, relative to its squares."""
        return 0.0 if self.db is None else noise_of(self.db)


def noise_of(db: float) -> float:
    """Return the relative squared error of an accuracy in dB."""
    return math.inf if db == -math.inf else 10.0 ** (-db / 10.0)


@dataclass
class TuningSearch:
    """Search for the cheapest choice whose measured accuracy meets the requirement.

    Attributes:
        problem: Values to choose from.
        run: Function that measures a choice.
        budget: Allowed relative squared error; ``None`` where a metric decides.
        solver: Solver of the problem.
        tried: Choices that were run, in order.
    """

    problem: TuningProblem
    run: Callable[[Choice], Accuracy]
    budget: float | None
    on_progress: Progress = silent
    tried: list[TriedSet] = field(default_factory=list)
    results: dict[Choice, Accuracy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.solver = Solver(self.problem)

    def measure(self, choice: Choice, step: TriedStep, what: str) -> Accuracy:
        """Run a choice, once."""
        if choice not in self.results:
            self.on_progress(what, len(self.results), 0)
            result = self.results[choice] = self.run(choice)
            self.tried.append(tried_set(self.problem, choice, result, step, what))
        return self.results[choice]

    def _measure_ops(self, choice: Choice) -> Accuracy:
        return self.measure(choice, "solve", f"{len(self.problem.ops(choice))} ops in float32")

    def cheapest(self) -> Choice | None:
        """Return the cheapest choice that reaches the accuracy; ``None`` if none does."""
        first = self.measure(self.problem.required, "start", "everything else in 16 bits")
        if first.reached:
            return self.problem.required
        choice = None if self.budget is None else self._solve(self.budget, first)
        choice = self._bisect() if choice is None else choice
        if choice is None:
            return None
        choice = self._shrink(choice)
        pairs = ((result.noise, self.problem.noise(choice)) for choice, result in self.results.items())
        unsure = any(max(pair) > min(pair) * UNSURE for pair in pairs)
        return self._drop_ops(choice, "shrink", RUNS)[0] if unsure else choice

    def _solve(self, budget: float, first: Accuracy) -> Choice | None:
        """Return the cheapest choice for a budget that is corrected by measured errors."""
        correction = self._correction(self.problem.required, first, 1.0)
        best: Point | None = None
        for _ in range(ROUNDS):
            point = self.solver.solve(budget / correction)
            if point is None or (best is not None and point.cost >= best.cost):
                break
            result = self._measure_ops(point.choice)
            best = point if result.reached else best
            before, correction = correction, self._correction(point.choice, result, correction)
            if result.reached and correction >= before:
                break
        return best.choice if best is not None else None

    def _correction(self, choice: Choice, result: Accuracy, before: float) -> float:
        """Return the ratio of measured to predicted error, by which budgets are divided."""
        predicted = self.problem.noise(choice)
        if result.noise == 0.0 or predicted == 0.0 or math.isinf(result.noise):
            return before * 2
        return max(result.noise / predicted, before / TRUSTED if result.reached else before * SLACK)

    def _bisect(self) -> Choice | None:
        """Return the cheapest point of the frontier that reaches the accuracy, by measurements alone."""
        points = [*(point.choice for point in self.solver.frontier()), frozenset(self.problem.free)]
        if not self.measure(points[-1], "solve", "the most accurate choice").reached:
            return None
        low, high = 0, len(points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._measure_ops(points[middle]).reached:
                high = middle
            else:
                low = middle
        return points[high]

    def _shrink(self, choice: Choice) -> Choice:
        """Remove as many of the least useful members as the accuracy allows, by bisection."""
        order = self._least_useful(choice)
        low, high = 0, len(order)  # ``low`` members can be removed, and at most ``high``
        while low < high:
            count = min(2 * low or 1, (low + high + 1) // 2)
            fewer = self.problem.reduced(choice, order[:count])
            result = self.measure(fewer, "shrink", f"without the {count} least useful")
            low, high = (count, high) if result.reached else (low, count - 1)
        return self.problem.reduced(choice, order[:low])

    def _least_useful(self, choice: Choice) -> list[str]:
        """Return the optional members, those first whose rounding adds the least error."""
        members = choice - self.problem.required
        return sorted(members, key=lambda name: (self.problem.noise(choice - {name}), name))

    def minimize(self, choice: Choice) -> tuple[Choice, dict[str, Accuracy]]:
        """Drop each op that is not needed, in one run per op.

        Also return, for each op that is needed, the accuracy without it.
        """
        while True:
            smaller, needed = self._drop_ops(choice, "exhaustive")
            if smaller == choice:
                return choice, needed
            choice = smaller  # an op that was needed beside a dropped one may no longer be needed

    def _drop_ops(
        self, choice: Choice, step: TriedStep, runs: float = math.inf
    ) -> tuple[Choice, dict[str, Accuracy]]:
        """Drop single ops, the least useful first, while there are runs left."""
        needed: dict[str, Accuracy] = {}
        ops = set(self.problem.ops(choice))
        for name in self._least_useful(choice):
            if name in ops and len(self.results) < runs:
                fewer = self.problem.reduced(choice, [name])
                result = self.measure(fewer, step, f"without {name}")
                if result.reached:
                    choice = fewer
                else:
                    needed[name] = result
        return choice, needed


def accuracy_of(noise: float) -> float | None:
    """Return the accuracy of a relative squared error in dB; ``None`` if it is exact."""
    return None if noise == 0.0 else -10.0 * math.log10(noise)


def tried_set(
    problem: TuningProblem, choice: Choice, result: Accuracy, step: TriedStep, what: str
) -> TriedSet:
    """Return the report's entry for a choice that was run."""
    predicted = accuracy_of(problem.noise(choice))
    broken = result.db == -math.inf
    ops, metric = len(problem.ops(choice)), None if result.metric is None else result.metric[1]
    return TriedSet(step, what, ops, predicted, finite_or_none(result.db), broken, result.reached, metric)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard the output of the solver's C++ code, which ignores its own options."""
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
    """A choice with its cost and its predicted relative squared error, in the worst column."""

    choice: Choice
    cost: float
    noise: float
    bound: float  # lower bound on the cost of any choice within the budget


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
    """Solve one problem for any budget.

    There is a binary variable for each value in float32, for each pair of a float32 value and a 16-bit reader
    that casts it, and for each cast of a value, which is paid once per direction. The last variable is the
    error of the worst column.
    """

    def __init__(self, problem: TuningProblem) -> None:
        self.problem = problem
        self._index = {name: number for number, name in enumerate(problem.graph.values)}
        self._rows = _Rows()
        self._count = len(self._index)
        self._reads = {key: self._variable() for key in problem.sensitivities.reads}
        self._noise = self._variable()  # error of the worst column, in units of the budget
        self._casts: dict[tuple[str, bool], int] = {}
        self._constrain()

    def solve(self, budget: float, prices: Prices | None = None, gap: float = GAP) -> Point | None:
        """Return the cheapest choice whose predicted error is within a budget; ``None`` if none is.

        The budget is the relative squared error that each column may have, and ``gap`` the relative distance
        allowed between the choice's cost and the optimum.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        everything = frozenset(self.problem.free)
        noise = self.problem.noise(everything)
        if noise > budget:
            return None
        if budget <= _NEGLIGIBLE**2 * self.problem.noise(frozenset()):  # beyond what numbers can tell apart
            return Point(everything, self.problem.cost(everything), noise, 0.0)
        least, most, kinds = np.zeros(self._count), np.ones(self._count), np.zeros(self._count)
        for number, (name, value) in enumerate(self.problem.graph.values.items()):
            kinds[number] = value.free
            if value.kind is ValueKind.FLOAT32 or name in self.problem.required:
                least[number] = 1.0
            elif value.kind is ValueKind.LOW:
                most[number] = 0.0
        prices, objective = prices or self.problem.prices, np.zeros(self._count)
        for name, number in self._index.items():
            objective[number] = prices.values.get(name, 0.0)
        for (name, _), number in self._casts.items():
            objective[number] = prices.casts.get(name, 0.0)
        objective[self._noise] = tie = _TIE * min(objective[objective > 0], default=0.0)
        with _silenced():
            solution = milp(
                objective,
                constraints=LinearConstraint(*self._matrix(budget)),
                bounds=Bounds(least, most),
                integrality=kinds,
                options={"node_limit": NODES, "time_limit": SECONDS, "mip_rel_gap": gap},
            )
        if solution.x is None:
            return None
        choice = frozenset(name for name in self.problem.free if solution.x[self._index[name]] > 0.5)
        cost, noise = self.problem.cost(choice), self.problem.noise(choice)
        return Point(choice, cost, noise, max(float(solution.mip_dual_bound or 0.0) - tie, 0.0))

    def min_ops(self, budget: float) -> int:
        """Return a lower bound on the number of ops in any choice within the budget."""
        paid = self.problem.prices.values
        ops = self.problem.ops(frozenset(self.problem.free))
        point = self.solve(budget, Prices({name: 1.0 for name in ops if paid.get(name)}, {}))
        return 0 if point is None else math.ceil(point.bound - 1e-6)

    def frontier(self) -> list[Point]:
        """Return the best choices for budgets between everything in 16 bits and the most accurate."""
        first, last = self.problem.noise(self.problem.required), self.problem.noise(self.problem.free)
        if not first:
            return []
        steps = np.geomspace(first, max(last, first * 1e-4), _POINTS)  # 40 dB at most
        points: dict[Choice, Point] = {}
        for budget in steps:
            point = self.solve(float(budget) * (1 + 1e-9), gap=_POINTS_GAP)
            if point is not None:
                points.setdefault(point.choice, point)
        return sorted(points.values(), key=lambda point: point.cost)

    def _variable(self) -> int:
        self._count += 1
        return self._count - 1

    def _constrain(self) -> None:
        """Add the constraints on casts, and on ops whose dtype follows their inputs."""
        index, rows = self._index, self._rows
        for name, value in self.problem.graph.values.items():
            if value.kind is ValueKind.FOLLOW:  # float32 only if one of its inputs is
                sources = self.problem.graph.reads.get(name, ())
                rows.add({**{index[source]: -1.0 for source in sources}, index[name]: 1.0}, most=0.0)
        for (value_name, reader), number in self._reads.items():
            rows.add({number: 1.0, index[value_name]: -1.0, index[reader]: 1.0}, least=0.0)
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

    def _matrix(self, budget: float) -> tuple[Any, Any, Any]:
        """Return all constraints, including one on the error of each column in units of the budget."""
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
