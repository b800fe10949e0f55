"""Examines random branches: trace, bounds, runs; and cuts down what is found."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ampaudit.bounds import BoundTable, bound
from ampaudit.core.assumptions import Assumption
from ampaudit.core.errors import AuditError
from ampaudit.core.formats import format_named
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.graph import Slot
from tests.support.soundness.check import Runs
from tests.support.soundness.generate import branch_of
from tests.support.soundness.inputs import hostile
from tests.support.soundness.program import Branch, BranchModel

BRANCHES = 40  # of one trace
RAISED = ("bound raises", "a transfer fails")


@dataclass(frozen=True)
class Setting:
    """A policy and a 16-bit format."""

    policy: str
    dtype: str

    @property
    def lower(self) -> torch.dtype | None:
        """The dtype of inputs and parameters, if the policy stores them in 16 bits."""
        stored: torch.dtype = getattr(torch, self.dtype)
        return stored if self.policy == "half" else None

    def __str__(self) -> str:
        return f"{self.policy} {self.dtype}"


SETTINGS = (
    Setting("half", "float16"),
    Setting("torch-cuda", "float16"),
    Setting("half", "bfloat16"),
    Setting("as-is", "float16"),  # FP32, and the casts of the program's own
    Setting("torch-cuda", "bfloat16"),
)


@dataclass(frozen=True)
class Counterexample:
    """A branch with a value outside its bound, or one for which the bound pass raises."""

    branch: Branch
    setting: Setting
    seed: int
    rounds: int
    problem: str

    def __str__(self) -> str:
        return f"{self.setting}, seed {self.seed}\n{self.branch}\n    {self.problem}"


@dataclass
class Report:
    """What was examined and found.

    Attributes:
        branches: how many were checked; ``untraced`` and ``not_run`` are those that were not.
        values: by op, how many values were checked; ``bounded`` those with bounds tighter than their dtype.
        found: the counterexamples.
    """

    branches: int = 0
    untraced: int = 0
    not_run: int = 0
    values: Counter[str] = field(default_factory=Counter)
    bounded: Counter[str] = field(default_factory=Counter)
    found: list[Counterexample] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Join the results of another run."""
        self.branches += other.branches
        self.untraced += other.untraced
        self.not_run += other.not_run
        self.values.update(other.values)
        self.bounded.update(other.bounded)
        self.found += other.found


def examine_seed(seed: int, setting: Setting, *, branches: int = BRANCHES, rounds: int = 7) -> Report:
    """Examine as many random branches; each has a seed of its own."""
    return examine(random_branches(seed, setting, branches), setting, seed, rounds)


def random_branches(seed: int, setting: Setting, branches: int = BRANCHES) -> list[Branch]:
    """The branches of a seed."""
    return [branch_of(seed * branches + index, setting.lower) for index in range(branches)]


def examine(branches: Sequence[Branch], setting: Setting, seed: int, rounds: int = 7) -> Report:
    """Examine branches in one trace; where the bound pass or a run raises, half of them at a time."""
    prepared = Prepared.of(branches, setting, seed)
    if prepared is None:
        return _halved(branches, setting, seed, rounds) if len(branches) > 1 else Report(untraced=1)
    report = prepared.report(rounds)
    if report is None:
        return _halved(branches, setting, seed, rounds)
    return report


@dataclass
class Prepared:
    """Branches that are traced and ready to run, so that they can be held against more than one table."""

    branches: Sequence[Branch]
    setting: Setting
    seed: int
    traced: TracedModel
    model: BranchModel
    runs: Runs

    @classmethod
    def of(cls, branches: Sequence[Branch], setting: Setting, seed: int) -> Prepared | None:
        """Trace them; ``None`` if they cannot be, all together."""
        traced, model = traced_branches(branches, setting, seed)
        return None if traced is None else cls(branches, setting, seed, traced, model, Runs(traced))

    def report(self, rounds: int) -> Report | None:
        """Bound and run them; ``None`` if it takes fewer branches to tell whose fault an error is."""
        report = Report(untraced=len(self.model.failed))
        if len(self.model.failed) == len(self.branches):
            return report
        problem, table = "", None
        try:
            table = table_of(self.traced, self.model, self.setting)
            problem = "; ".join(f"a transfer fails: {text}" for text in table.failed)
        except Exception as error:
            problem = f"bound raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if problem or table is None:
            report.found.append(Counterexample(self.branches[0], self.setting, self.seed, rounds, problem))
            return report if len(self.branches) == 1 else None
        return self._run(report, table, rounds)

    def _run(self, report: Report, table: BoundTable, rounds: int) -> Report | None:
        owners, first = _owners(self.traced, self.model), dict[int, Counterexample]()
        for number, native in itertools.product(range(rounds), (True, False)):
            inputs = [item.tensor(hostile(item, number, self.seed)) for item in self.model.inputs]
            found = self.runs.checked(table, inputs, native=native)
            if found.failed is not None:
                report.not_run += 1
                return report if len(self.branches) == 1 else None
            report.values.update(found.values)
            report.bounded.update(found.bounded)
            for escape in found.escapes:
                owner = owners.get(escape.node, 0)
                problem = f"{escape} ({'native' if native else 'emulated'})"
                example = Counterexample(self.branches[owner], self.setting, self.seed, rounds, problem)
                first.setdefault(owner, example)
        report.found += first.values()
        report.branches += len(self.branches) - len(self.model.failed)
        return report


def _halved(branches: Sequence[Branch], setting: Setting, seed: int, rounds: int) -> Report:
    middle = len(branches) // 2
    report = examine(branches[:middle], setting, seed, rounds)
    report.add(examine(branches[middle:], setting, seed, rounds))
    return report


def traced_branches(
    branches: Sequence[Branch], setting: Setting, seed: int
) -> tuple[TracedModel | None, BranchModel]:
    model = BranchModel(branches).eval()
    inputs = tuple(item.tensor(hostile(item, 0, seed)) for item in model.inputs)
    rules, author = load_policy(setting.policy), load_policy("torch-cuda")
    try:
        return trace(model, inputs, {}, TraceConfig(rules, author, format_named(setting.dtype))), model
    except AuditError:
        return None, model


def table_of(traced: TracedModel, model: BranchModel, setting: Setting) -> BoundTable:
    """Bounds for the ranges that the branches state."""
    places = [place for place in traced.placeholders if place.slot is Slot.INPUT]
    domain = {
        place.node: Assumption(place.name, item.low, item.high, "stated")
        for place, item in zip(places, model.inputs, strict=True)
    }
    return bound(traced, domain, format_named(setting.dtype))


def _owners(traced: TracedModel, model: BranchModel) -> dict[str, int]:
    """The branch of each node: that of the inputs and weights that it reads, or that of its readers."""
    given = iter(i for i, branch in enumerate(model.branches) for _ in branch.inputs)
    owners: dict[fx.Node, int] = {}
    places = {place.node: place for place in traced.placeholders}
    nodes = list(traced.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            place = places[node.name]
            if place.slot is Slot.INPUT:
                owners[node] = next(given)
            elif place.name.startswith("b") and "_" in place.name:
                owners[node] = int(place.name[1:].split("_")[0])
    for _ in range(2):
        for node in nodes:
            near = [owners[n] for n in node.all_input_nodes if n in owners]
            if node.op != "output" and near:
                owners.setdefault(node, near[0])
        for node in reversed(nodes):
            for source in node.all_input_nodes:
                if node in owners:
                    owners.setdefault(source, owners[node])
    return {node.name: owner for node, owner in owners.items()}


def shrunk(example: Counterexample, budget: int = 60) -> Counterexample:
    """The smallest branch found that still has a problem of the same kind."""
    raises = example.problem.startswith(RAISED)
    current, progress = example, True
    while progress and budget > 0:
        progress = False
        for simpler in current.branch.simpler():
            budget -= 1
            problem = _problem(replace(current, branch=simpler), raises)
            if problem is not None:
                current, progress = problem, True
                break
            if budget <= 0:
                break
    return current


def _problem(example: Counterexample, raises: bool) -> Counterexample | None:
    try:
        found = examine([example.branch], example.setting, example.seed, example.rounds).found
    except Exception:  # what a shortened program does wrong is its own matter
        return None
    alike = [item for item in found if item.problem.startswith(RAISED) == raises]
    return alike[0] if alike else None
