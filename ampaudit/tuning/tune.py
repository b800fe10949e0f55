"""``ampaudit tune``: finds the fewest ops that must stay in float32 for an accuracy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ampaudit.audit.advice.attempts import Attempts
from ampaudit.audit.advice.interface import AdviceContext, Exemption
from ampaudit.audit.advice.pytorch import half_method, with_code
from ampaudit.audit.checks.interface import context_of, finding_source
from ampaudit.audit.checks.model_code import refused_sites
from ampaudit.audit.config import PolicyConfig, ScanConfig
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.metric import within_drop
from ampaudit.audit.plan import planned_weights
from ampaudit.audit.scan import Audited
from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.core.config import with_options
from ampaudit.core.errors import AuditError, RunFailed, UsageError
from ampaudit.core.session import DEFAULT_SESSION, Session
from ampaudit.core.sites import SiteId
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import plural
from ampaudit.instruments.sensitivity.measuring import noise_rows
from ampaudit.instruments.sensitivity.probe import PrecisionValue, ValueKind
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.schema import Cast, Reason
from ampaudit.report.finding import Severity
from ampaudit.report.model import ModelInfo, Report
from ampaudit.report.tuning import FrontierPoint, KeptOp, KeptWeight, TriedSet, TuningReport
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.share import ALONE
from ampaudit.source import ModelSource
from ampaudit.source.stored_weights import with_plain_weights
from ampaudit.source.twins import using_twins
from ampaudit.trace.caster import TOO_LARGE
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Role
from ampaudit.trace.isolation import preserved
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name
from ampaudit.tuning.config import TuneConfig
from ampaudit.tuning.search import (
    Accuracy,
    Choice,
    TuningProblem,
    TuningSearch,
    accuracy_of,
    finite_db,
    noise_of,
    tried_set,
)
from ampaudit.tuning.trials import (
    LowPrecisionRun,
    Trials,
    follow,
    loaded,
    rescale_text,
    rule_file,
    run_low_precision,
)

__all__ = ["tune", "tuned_rules"]

NAME = "tuned"
SHOWN_NOISE = 40
_KINDS = ("python", "import", "huggingface", "object")  # kinds of sources with layers of the user's code
ROUNDS = 4  # rounds of a search and an audit of its result


@with_options(TuneConfig)
@preserved()
def tune(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    source: SourceConfig | None = None,
    config: TuneConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> TuningReport:
    """Find the fewest ops and weights that must stay in float32 for the accuracy that is asked for.

    Args:
        model: Model in the mode to tune (usually ``eval()``), which is not changed; or its location: a path,
            or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        source: Options to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: What the call works with; ``on_progress`` and ``share`` are used.
        **options: Fields of ``TuneConfig``, which override those of ``config``.

    Returns:
        The report, with a rule file, the reason for each op that it keeps in float32, and the frontier of
        accuracy and cost.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
        PartDone: Another machine has the report.
    """
    settings = TuneConfig.given(config, options)
    settings.check()
    opened = with_plain_weights(as_source(model, inputs, options=source or SourceConfig(seed=settings.seed)))
    _refuse(opened, settings)
    formats = ("float16", "bfloat16") if settings.dtype == "auto" else (settings.dtype,)
    session = replace(session, share=session.share or ALONE)
    with using_twins(settings.twins):
        if session.share.follows:
            follow(opened, settings, session)
        reports = [_tuned(opened, dtype, settings, session) for dtype in formats]
    return min(
        reports, key=lambda report: (not report.reached, len(report.kept), -(report.measured_db or math.inf))
    )


def tuned_rules(
    source: ModelSource, dtype: str, min_sqnr: float, config: PolicyConfig, session: Session
) -> RuleSet:
    """Return the policy with the fewest ops in float32 for an accuracy in dB.

    Raises:
        RunFailed: No choice of ops has that accuracy.
        AuditError: See ``tune``.
    """
    tuning = TuneConfig(
        min_sqnr=min_sqnr,
        dtype="bfloat16" if dtype == "bfloat16" else "float16",
        device=config.device,
        seed=config.seed,
    )
    report = tune(source, config=tuning, session=session)
    if not report.reached:
        best = "" if report.measured_db is None else f"; the best one has {report.measured_db:.0f} dB"
        raise RunFailed(
            f"no choice of ops gives every output {min_sqnr:g} dB{best}",
            hint="ask for less, or see what ampaudit tune says",
        )
    return loaded(report.policy)


def _refuse(source: ModelSource, config: TuneConfig) -> None:
    """Reject models and options that cannot be tuned."""
    if source.kind == "converted" or source.dtype is not None:
        hint = "tune the model that it was converted from"
        raise UsageError(f"{source.location} has its casts in its program", hint=hint)
    if source.release is not None:
        raise UsageError("tune keeps the values of a whole run in memory", hint="leave out --stream")
    if config.metric_drop is not None and source.metric is None:
        hint = "add to the model file: def metric(output, batch): return ...  # larger is better"
        raise UsageError(f"--metric-drop: {source.location} has no metric(output, batch)", hint=hint)


def _tuned(source: ModelSource, dtype: str, config: TuneConfig, session: Session) -> TuningReport:
    session.share.tell("start", dtype)
    trials = Trials(source, dtype, config, session)
    report = _Tuning(trials).report()
    started = time.perf_counter()
    code = pytorch_code(trials, report)
    return replace(report, code=code, seconds=report.seconds | {"code": time.perf_counter() - started})


class _Tuning:
    """Tunes a model in one 16-bit format."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._config = trials.config
        self._seconds: defaultdict[str, float] = defaultdict(float)
        with self._timing("run and probes"):
            self._low = run_low_precision(trials)
        self._tried: list[TriedSet] = []

    def report(self) -> TuningReport:
        """Search, audit the result, and tighten the search until the audit agrees."""
        config, problem = self._config, self._low.problem
        target = config.target_db
        budget = None if target is None else noise_of(target)
        for _ in range(ROUNDS):
            with self._timing("search"):
                search, choice, needed = self._searched(problem, budget)
            self._tried += search.tried
            with self._timing("audits"):
                final = self._final(choice if choice is not None else frozenset(problem.free), problem)
            broken, low = self._broken(final), self._low_casts(final)
            if final.accuracy.reached or (choice is None and not broken):
                break
            if low:
                self._trials.keep_low(low)
                problem = replace(problem, graph=self._trials.graph)
            elif broken:
                problem = replace(problem, pinned=problem.pinned | broken)
            elif budget is None or target is None or final.accuracy.noise <= noise_of(target):
                break  # it is accurate; what else the audit finds is in the notes
            else:
                budget *= min(noise_of(target) / final.accuracy.noise, 0.99)
        if not final.accuracy.reached:
            final = self._audited_along(search, final) or final
        report = tuning_report(
            Tuned(self._low, problem, search, final, needed, tuple(self._tried), dict(self._seconds))
        )
        return self._with_rescale(report)

    def _searched(
        self, problem: TuningProblem, budget: float | None
    ) -> tuple[TuningSearch, Choice | None, dict[str, Accuracy]]:
        """Search for a choice; with ``exhaustive``, also measure the accuracy without each op."""
        search = TuningSearch(problem, self._trials.accuracy, budget, self._trials.session.on_progress)
        choice = search.cheapest()
        if choice is None or not self._config.exhaustive:
            return search, choice, {}
        return search, *search.minimize(choice)

    def _audited_along(self, search: TuningSearch, short: Final) -> Final | None:
        """Return the cheapest point of the frontier whose audit passes, where that of the result did not."""
        problem = search.problem
        points = [point.choice for point in search.solver.frontier()]
        points = [choice for choice in points if problem.cost(choice) > problem.cost(short.choice)]
        points.append(frozenset(problem.free))
        best: Final | None = None
        low, high = -1, len(points) - 1
        middle = high  # everything in float32 first: if that falls short, all do
        while middle > low:
            with self._timing("audits"):
                audited = self._final(points[middle], problem)
            if audited.accuracy.reached:
                best, high = audited, middle
            elif best is None:
                return None
            else:
                low = middle
            middle = (low + high) // 2
        return best

    @contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - started

    def _with_rescale(self, report: TuningReport) -> TuningReport:
        """Add a rescaled residual stream, if less must stay in float32 after it."""
        if not any(op.why == "range" for op in report.kept):
            return report
        trials = self._trials.rescaled()
        if trials is None:
            return report
        after = _Tuning(trials).report()
        better = after.reached and (not report.reached or len(after.kept) < len(report.kept))
        return replace(report, rescale=rescale_text(trials.changes, after)) if better else report

    def _final(self, choice: Choice, problem: TuningProblem) -> Final:
        """Audit a choice under its rule file."""
        self._trials.session.on_progress("auditing the policy", 0, 0)
        text = policy_text(self._low, problem, choice)
        target, drop = self._config.target_db, self._config.metric_drop
        audited, metric = self._trials.audit(text)
        db = _accuracy(audited.report)
        if drop is not None and metric is not None:
            accuracy = Accuracy(db, within_drop(*metric, drop) and db != -math.inf, metric)
        else:
            fits = db is None or target is None or db >= target
            accuracy = Accuracy(db, fits and audited.report.exit_code == 0)
        self._tried.append(tried_set(problem, choice, accuracy, "final", "the policy, audited as a whole"))
        if not accuracy.reached and (appeared := self._appeared(audited) - self._low.appeared):
            self._low.appeared.update(appeared)
            return self._final(choice, problem)
        return Final(choice, text, audited, accuracy)

    def _appeared(self, audited: Audited) -> set[str]:
        """Return 16-bit ops of a policy's trace that do not exist with everything in 16 bits.

        Some ops are split, or renamed, once their input is in float32.
        """
        low_ops = {site.id for site in self._low.audit.sites}
        sites = (site for site in audited.audit.converted.traced.sites if site.facts is not None)
        return {s.id for s in sites if s.decision.cast is Cast.LOWER and s.id not in low_ops}

    def _broken(self, final: Final) -> frozenset[str]:
        """Return the 16-bit ops at which the audit found errors."""
        values = self._low.problem.graph.values
        errors = {f.site for f in final.audited.report.findings if f.severity == Severity.ERROR}
        return frozenset(s for s in errors if s in values and values[s].free and s not in final.choice)

    def _low_casts(self, final: Final) -> frozenset[str]:
        """Return casts in the model's code to 16 bits whose inputs are in float32.

        The target of ``x.to(y.dtype)`` depends on the policy; the problem assumes the dtype of ``x``.
        """
        values = self._low.problem.graph.values
        wide = self._low.problem.graph.in_float32(final.choice)
        sites = final.audited.audit.converted.traced.sites
        casts = (site.id for site in sites if site.role is Role.CAST and site.dtype in LOW_PRECISION_DTYPES)
        return frozenset(name for name in casts if name in wide and values[name].kind is ValueKind.FOLLOW)


def _accuracy(report: Report) -> float | None:
    """Return the accuracy of the worst output; ``None`` if all are exact."""
    if report.broken_outputs:
        return -math.inf
    return None if report.worst_output is None else report.worst_output.accuracy_db


def pytorch_code(trials: Trials, report: TuningReport) -> str:
    """Return code that casts a model and keeps the layers of what a tuning keeps in float32.

    Layers are kept as a whole, so more than the choice is in float32. The code is empty if it does not reach
    the accuracy, or if no layer has the ops.
    """
    source, form = trials.source, trials.number_format
    if source.kind not in _KINDS or not report.reached:
        return ""
    least = report.measured_db if report.target_db is None else report.target_db
    settings = ScanConfig(dtype=form.name, device=trials.config.device, min_sqnr=least or 0.0)
    half = load_policy("half")
    plan = RunConfig(half, load_policy("torch-cuda"), form, trials.device, trials.config.seed)
    try:
        (audit,) = run_audits(source.model, source.batches, [plan], trials.session.on_progress)
    except AuditError:
        return ""
    context = context_of(audit, form, settings)
    subject = AdviceContext(source.model, half, context)
    attempts = Attempts(subject, source, plan, settings, refused_sites(context), ())
    members = [Exemption(tuple(SiteId(op.site) for op in report.kept), "")] if report.kept else []
    members += [Exemption((), "", weight.name) for weight in report.weights]
    tensors = (leaf for batch in source.batches for leaf in tensor_leaves(batch.args, batch.kwargs))
    floats = any(tensor.is_floating_point() for tensor in tensors)
    then = f"\n# it takes floating-point inputs in {form.name}" if floats else ""
    if not members:
        return f"model.{half_method(form)}(){then}" if attempts.judge(context).cures else ""
    suggestion = with_code(subject, members)
    if suggestion is None:
        return ""
    text, proposal = suggestion
    attempt = attempts.run(proposal)
    return f"{text}{then}" if attempt is not None and attempt.cures else ""


@dataclass(frozen=True, slots=True)
class Final:
    """A choice with its rule file, audited as a whole."""

    choice: Choice
    text: str
    audited: Audited
    accuracy: Accuracy


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a search.

    Attributes:
        low: Run with everything in 16 bits.
        problem: Final problem, with all ops that turned out to be out of range.
        search: Last search.
        final: Choice with its audit.
        needed: Accuracy without each op.
        tried: All choices that were run.
        seconds: Wall time by phase, in seconds.
    """

    low: LowPrecisionRun
    problem: TuningProblem
    search: TuningSearch
    final: Final
    needed: Mapping[str, Accuracy]
    tried: tuple[TriedSet, ...]
    seconds: dict[str, float]


def policy_text(low: LowPrecisionRun, problem: TuningProblem, choice: Choice) -> str:
    """Return the rule file of a choice."""
    values, ops = problem.graph.values, problem.ops(choice)
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
    weights = [name for name in stored if name in choice]
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
        predicted_db=accuracy_of(problem.noise(final.choice)),
        measured_db=finite_db(final.accuracy.db),
        ops=len(problem.ops(frozenset(problem.free))),
        kept=tuple(_kept_op(tuned, problem.graph.values[name]) for name in problem.ops(final.choice)),
        lower_bound=_min_ops(tuned),
        minimal=config.exhaustive and final.accuracy.reached,
        casts=len(problem.borders(problem.graph.in_float32(final.choice))),
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
    """List the errors that the audit of the policy found."""
    report = final.audited.report
    errors = dict.fromkeys(f"{f.code} at {f.site}" for f in report.active if f.severity == Severity.ERROR)
    return [f"the audit of the policy has errors: {', '.join(list(errors)[:3])}"] if errors else []


def _min_ops(tuned: Tuned) -> int:
    """Return a lower bound on the ops in float32 under the error model, calibrated by the final run."""
    final, target = tuned.final, tuned.low.trials.config.target_db
    if target is None or not final.accuracy.reached:
        return len(tuned.problem.ops(tuned.problem.required))
    predicted, measured = tuned.problem.noise(final.choice), final.accuracy.noise
    # if one run is better than predicted, others may be
    scale = max(predicted / measured, 1.0) if measured and predicted else 1.0
    return tuned.search.solver.min_ops(noise_of(target) * scale)


def _kept_op(tuned: Tuned, value: PrecisionValue) -> KeptOp:
    """Return an op that stays in float32, with the number that says why."""
    problem, name, site = tuned.problem, value.name, value.site
    assert site is not None
    measured = tuned.needed.get(name)
    out = name in problem.required
    without = None if out else accuracy_of(problem.noise(tuned.final.choice - {name}))
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
    problem, choice = tuned.problem, tuned.final.choice
    traced, weights = tuned.low.audit.converted.traced, list[KeptWeight]()
    nodes = {place.name: place.node for place in traced.placeholders}
    for name, value in problem.graph.values.items():
        if value.kind is ValueKind.WEIGHT and name in choice and name in nodes:
            out = name in problem.required
            without = None if out else accuracy_of(problem.noise(choice - {name}))
            extra = 2 * traced.tensors[nodes[name]].numel()
            weights.append(KeptWeight(name, extra, "range" if out else "accuracy", without))
    return weights


def _frontier(tuned: Tuned) -> list[FrontierPoint]:
    """Return the points of the frontier, with the result among them, by growing accuracy."""
    problem, final = tuned.problem, tuned.final
    points = {point.choice: point.noise for point in tuned.search.solver.frontier()}
    points.setdefault(final.choice, problem.noise(final.choice))
    every = max(len(problem.ops(frozenset(problem.free))), 1)
    frontier = []
    for choice, noise in sorted(points.items(), key=lambda item: -item[1]):
        result = final.accuracy if choice == final.choice else tuned.search.results.get(choice)
        ops = len(problem.ops(choice))
        frontier.append(
            FrontierPoint(
                ops=ops,
                share=ops / every,
                casts=len(problem.borders(problem.graph.in_float32(choice))),
                cost=problem.cost(choice),
                predicted_db=accuracy_of(noise),
                measured_db=None if result is None else finite_db(result.db),
                policy=policy_text(tuned.low, problem, choice),
                chosen=choice == final.choice,
                broken=result is not None and result.db == -math.inf,
                weights=sum(problem.graph.values[name].kind is ValueKind.WEIGHT for name in choice),
            )
        )
    return frontier
