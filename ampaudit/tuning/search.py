"""Runs choices, corrects the budget by what they show, and takes away what is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ampaudit.core.config import Progress, silent
from ampaudit.report.tuning import TriedSet
from ampaudit.tuning.problem import Chosen, TuningProblem
from ampaudit.tuning.solve import Point, Solver

__all__ = ["Accuracy", "TuningSearch", "accuracy_of", "finite_db", "noise_of", "tried_set"]

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
