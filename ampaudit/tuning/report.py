"""Builds the report of ``tune`` from what was searched and audited."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ampaudit.audit.checks.interface import finding_source
from ampaudit.audit.plan_report import planned_weights
from ampaudit.audit.scan import Audited
from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.audit.sensitivity import noise_rows
from ampaudit.core.text import plural
from ampaudit.policy.schema import Reason
from ampaudit.report.finding import Severity
from ampaudit.report.model import ModelInfo
from ampaudit.report.tuning import FrontierPoint, KeptOp, KeptWeight, TriedSet, TuningReport
from ampaudit.run.sensitivity.precision_graph import PrecisionValue, ValueKind
from ampaudit.trace.caster import TOO_LARGE
from ampaudit.trace.values import dtype_name
from ampaudit.tuning.measured import LowPrecisionRun
from ampaudit.tuning.problem import Chosen, TuningProblem
from ampaudit.tuning.rule_file import rule_file
from ampaudit.tuning.search import Accuracy, TuningSearch, accuracy_of, finite_db, noise_of

__all__ = ["NAME", "Final", "Tuned", "policy_text", "tuning_report"]

NAME = "tuned"
SHOWN_NOISE = 40


@dataclass(frozen=True, slots=True)
class Final:
    """A choice with its rule file, audited as a whole."""

    chosen: Chosen
    text: str
    audited: Audited
    accuracy: Accuracy


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search came to.

    Attributes:
        low: the run with everything in 16 bits.
        problem: what was chosen from, with all that turned out to be out of range.
        search: the last one.
        final: the result.
        needed: by op, what its absence shows.
        tried: all choices that were run.
        seconds: wall time by phase.
    """

    low: LowPrecisionRun
    problem: TuningProblem
    search: TuningSearch
    final: Final
    needed: Mapping[str, Accuracy]
    tried: tuple[TriedSet, ...]
    seconds: dict[str, float]


def policy_text(low: LowPrecisionRun, problem: TuningProblem, chosen: Chosen) -> str:
    """Return the rule file of a choice."""
    values, ops = problem.graph.values, problem.ops(chosen)
    stored = [name for name, value in values.items() if value.kind is ValueKind.WEIGHT]
    groups = {
        Reason.RANGE: [
            *(name for name in ops if name in problem.required),
            *(v.name for v in values.values() if v.site is not None and v.site.decision.reason == TOO_LARGE),
        ],
        Reason.PRECISION: [*(name for name in ops if name not in problem.required), *sorted(low.appeared)],
        Reason.NO_KERNEL: [
            name
            for name, value in values.items()
            if value.kind is ValueKind.FLOAT32
            and value.site is not None
            and value.site.decision.reason == Reason.NO_KERNEL
        ],
    }
    every = [*(site.id for site in low.audit.sites if site.facts is not None), *low.appeared]
    target = low.trials.config.target_db
    goal = "" if target is None else f", for {target:g} dB"
    title = f"{plural(len(ops), 'op')} in float32{goal} in {dtype_name(low.trials.dtype)}"
    weights = [name for name in stored if name in chosen]
    return rule_file(low.trials.base, NAME, title, groups, weights, (every, stored))


def tuning_report(tuned: Tuned) -> TuningReport:
    """Return the report."""
    low, problem, final = tuned.low, tuned.problem, tuned.final
    source, config, record = low.trials.source, low.trials.config, low.audit.record
    start = low.trials.accuracy(frozenset())
    weights = planned_weights(final.audited.audit.converted, masters=False)
    return TuningReport(
        schema=1,
        tool=THIS_TOOL,
        model=ModelInfo(source.location, source.kind, source.sha256),
        device=record.device,
        dtype=dtype_name(low.trials.dtype),
        target_db=config.target_db,
        metric_drop=config.metric_drop,
        metric=final.accuracy.metric,
        cost_kind=config.cost,
        reached=final.accuracy.reached,
        low_db=finite_db(start.db),
        low_broken=start.db == -math.inf,
        low_predicted_db=accuracy_of(problem.noise(frozenset())),
        predicted_db=accuracy_of(problem.noise(final.chosen)),
        measured_db=finite_db(final.accuracy.db),
        ops=len(problem.ops(frozenset(problem.free))),
        kept=tuple(_kept_ops(tuned)),
        lower_bound=_least_ops(tuned),
        minimal=config.exhaustive and final.accuracy.reached,
        casts=len(problem.borders(problem.graph.in_float32(final.chosen))),
        weights=tuple(_kept_weights(tuned)),
        bytes_before=weights.before,
        bytes_after=weights.after,
        noise=noise_rows(problem.sensitivities, problem.graph, problem.graph.in_float32(()))[:SHOWN_NOISE],
        frontier=tuple(_frontier(tuned)),
        tried=tuned.tried,
        runs=len(tuned.tried) + record.batches,
        policy=final.text,
        name=NAME,
        rescale="",
        seconds=tuned.seconds,
        notes=(*source.notes, *final.audited.report.notes, *_errors(final), *_appeared(low)),
        environment=this_environment(),
        inputs=source.inputs,
    )


def _appeared(low: LowPrecisionRun) -> list[str]:
    names = ", ".join(sorted(low.appeared)[:3])
    return [f"in float32 as well, where their inputs are: {names}"] if names else []


def _errors(final: Final) -> list[str]:
    """Say what the audit of the policy finds, if that is why it is rejected."""
    report = final.audited.report
    errors = dict.fromkeys(f"{f.code} at {f.site}" for f in report.active if f.severity == Severity.ERROR)
    return [f"the audit of the policy has errors: {', '.join(list(errors)[:3])}"] if errors else []


def _least_ops(tuned: Tuned) -> int:
    """Return how many ops must stay in float32 under the model of errors, calibrated by the result's run."""
    final, target = tuned.final, tuned.low.trials.config.target_db
    if target is None or not final.accuracy.reached:
        return len(tuned.problem.ops(tuned.problem.required))
    predicted, measured = tuned.problem.noise(final.chosen), final.accuracy.noise
    # one run that came out better than predicted says that others may
    scale = max(predicted / measured, 1.0) if measured and predicted else 1.0
    return tuned.search.solver.least_ops(noise_of(target) * scale)


def _kept_ops(tuned: Tuned) -> list[KeptOp]:
    problem, chosen = tuned.problem, tuned.final.chosen
    return [_kept_op(tuned, problem.graph.values[name]) for name in problem.ops(chosen)]


def _kept_op(tuned: Tuned, value: PrecisionValue) -> KeptOp:
    """Return an op that stays in float32, with the number that says why."""
    problem, name, site = tuned.problem, value.name, value.site
    assert site is not None
    measured = tuned.needed.get(name)
    out = name in problem.required
    without = None if out else accuracy_of(problem.noise(tuned.final.chosen - {name}))
    if out:
        text = tuned.low.ranges.get(name, "it reads values near the limit of 16 bits, or beyond it")
    else:
        text = "accuracy needs it" if without is None else f"without it, outputs have {without:.1f} dB"
    return KeptOp(
        site=name,
        layer=site.layer,
        op=site.op,
        why="range" if out else "accuracy",
        text=text,
        without_db=without,
        measured_without_db=None if measured is None else finite_db(measured.db),
        source=finding_source(site),
        broken_without=measured is not None and measured.db == -math.inf,
    )


def _kept_weights(tuned: Tuned) -> list[KeptWeight]:
    problem, chosen = tuned.problem, tuned.final.chosen
    traced, found = tuned.low.audit.converted.traced, list[KeptWeight]()
    nodes = {place.name: place.node for place in traced.placeholders}
    for name, value in problem.graph.values.items():
        if value.kind is ValueKind.WEIGHT and name in chosen and name in nodes:
            out = name in problem.required
            without = None if out else accuracy_of(problem.noise(chosen - {name}))
            extra = 2 * traced.tensors[nodes[name]].numel()
            found.append(KeptWeight(name, extra, "range" if out else "accuracy", without))
    return found


def _frontier(tuned: Tuned) -> list[FrontierPoint]:
    """Return the points of the frontier, with the result among them, by growing accuracy."""
    problem, final = tuned.problem, tuned.final
    points = {point.chosen: point.noise for point in tuned.search.solver.frontier()}
    points.setdefault(final.chosen, problem.noise(final.chosen))
    every = max(len(problem.ops(frozenset(problem.free))), 1)
    found = []
    for chosen, noise in sorted(points.items(), key=lambda item: -item[1]):
        known = final.accuracy if chosen == final.chosen else tuned.search.known(chosen)
        ops = len(problem.ops(chosen))
        found.append(
            FrontierPoint(
                ops=ops,
                share=ops / every,
                casts=len(problem.borders(problem.graph.in_float32(chosen))),
                cost=problem.cost(chosen),
                predicted_db=accuracy_of(noise),
                measured_db=None if known is None else finite_db(known.db),
                policy=policy_text(tuned.low, problem, chosen),
                chosen=chosen == final.chosen,
                broken=known is not None and known.db == -math.inf,
                weights=sum(problem.graph.values[name].kind is ValueKind.WEIGHT for name in chosen),
            )
        )
    return found
