"""``ampaudit tune``: finds the fewest ops that must stay in float32 for an accuracy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from ampaudit.audit.advice.attempts import Attempts
from ampaudit.audit.advice.interface import AdviceContext, Exemption
from ampaudit.audit.advice.pytorch import half_method, with_code
from ampaudit.audit.checks.interface import context_of, finding_source
from ampaudit.audit.config import PolicyConfig, ScanConfig
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.metric import within_drop
from ampaudit.audit.plan import planned_weights
from ampaudit.audit.scan import Audited
from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.core.config import with_options
from ampaudit.core.errors import AuditError, RunFailed, UsageError
from ampaudit.core.session import DEFAULT_SESSION, Session
from ampaudit.core.sites import SiteId, globs_of
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import finite_or_none, plural
from ampaudit.findings.finding import Severity
from ampaudit.instruments.sensitivity.measuring import noise_rows
from ampaudit.instruments.sensitivity.probe import PrecisionValue, ValueKind
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.schema import Cast, Reason
from ampaudit.report.model import ModelInfo, Report
from ampaudit.report.tuning import FrontierPoint, KeptOp, KeptWeight, TriedSet, TuningReport
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.share import ALONE
from ampaudit.source import ModelSource
from ampaudit.source.dequantize import with_plain_weights
from ampaudit.source.twins import using_twins
from ampaudit.trace.caster import TOO_LARGE
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.graph import Role
from ampaudit.trace.isolation import isolated
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name
from ampaudit.tuning.config import TuneConfig
from ampaudit.tuning.search import (
    Accuracy,
    Choice,
    TuningProblem,
    TuningSearch,
    accuracy_of,
    noise_of,
    tried_set,
)
from ampaudit.tuning.trials import (
    Trials,
    follow,
    rescale_text,
    rules_from_text,
    run_low_precision,
)

SHOWN_NOISE = 40
_KINDS = ("python", "import", "huggingface", "object")  # kinds of sources with layers of the user's code
NAME = "tuned"
_WHY = {
    Reason.RANGE: "its values leave the range of the 16-bit format.",
    Reason.PRECISION: "the accuracy that was asked for needs it.",
    Reason.NO_KERNEL: "PyTorch has no 16-bit kernel for it.",
}
ROUNDS = 4  # rounds of a search and an audit of its result


@with_options(TuneConfig)
@isolated()
def tune(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    source: SourceConfig | None = None,
    config: TuneConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> TuningReport:
    """Find the fewest ops and weights that must stay in float32 for the required accuracy.

    Args:
        model: Model in the mode to tune (usually ``eval()``), which is not changed; or its location: a path,
            or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        source: Options to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: Context of the call; ``on_progress`` and ``share`` are used.
        **options: Fields of ``TuneConfig``, which override those of ``config``.

    Returns:
        The report, with a rule file, the reason for each op that it keeps in float32, and the frontier of
        accuracy and cost.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
        PartDone: Another machine has the report.
    """
    config = TuneConfig.merged(config, options)
    config.check()
    opened = with_plain_weights(as_source(model, inputs, options=source or SourceConfig(seed=config.seed)))
    _refuse(opened, config)
    formats = ("float16", "bfloat16") if config.dtype == "auto" else (config.dtype,)
    session = replace(session, share=session.share or ALONE)
    with using_twins(config.twins):
        if session.share.follows:
            follow(opened, config, session)
        reports = [_tuned(opened, dtype, config, session) for dtype in formats]
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
    return rules_from_text(report.policy)


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


@dataclass(frozen=True, slots=True)
class Final:
    """A choice with its rule file, audited as a whole."""

    choice: Choice
    text: str
    audited: Audited
    accuracy: Accuracy


class _Tuning:
    """Tunes a model in one 16-bit format."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._config = trials.config
        self._seconds: defaultdict[str, float] = defaultdict(float)
        with self._timing("run and probes"):
            self._audit, self._problem, self._ranges = run_low_precision(trials)
        self._search: TuningSearch
        self._needed: dict[str, Accuracy] = {}  # the accuracy without each op
        self._appeared: set[str] = set()  # ops that exist only with inputs in float32, and stay in float32
        self._tried: list[TriedSet] = []

    def report(self) -> TuningReport:
        """Search, audit the result, and tighten the search until the audit agrees."""
        target = self._config.target_db
        budget = None if target is None else noise_of(target)
        for _ in range(ROUNDS):
            with self._timing("search"):
                on_progress = self._trials.session.on_progress
                self._search = TuningSearch(self._problem, self._trials.accuracy, budget, on_progress)
                choice, self._needed = self._search.cheapest(), {}
                if choice is not None and self._config.exhaustive:  # measure the accuracy without each op
                    choice, self._needed = self._search.minimize(choice)
                self._tried += self._search.tried
            with self._timing("audits"):
                every = frozenset(self._problem.free)
                final = self._final(every if choice is None else choice, self._problem)
            broken, low = self._broken(final), self._low_casts(final)
            if final.accuracy.reached or (choice is None and not broken):
                break
            if low:
                self._trials.keep_low(low)
                self._problem = replace(self._problem, graph=self._trials.graph)
            elif broken:
                self._problem = replace(self._problem, pinned=self._problem.pinned | broken)
            elif budget is None or target is None or final.accuracy.noise <= noise_of(target):
                break  # it is accurate; what else the audit finds is in the notes
            else:
                budget *= min(noise_of(target) / final.accuracy.noise, 0.99)
        if not final.accuracy.reached:
            final = self._audit_frontier(final) or final
        return self._with_rescale(self._report(final))

    def _audit_frontier(self, failed: Final) -> Final | None:
        """Find, on the frontier, the cheapest choice above ``failed`` whose audit passes."""
        problem = self._search.problem
        points = [point.choice for point in self._search.solver.frontier()]
        points = [choice for choice in points if problem.cost(choice) > problem.cost(failed.choice)]
        points.append(frozenset(problem.free))
        best: Final | None = None
        low, high = -1, len(points) - 1
        middle = high  # everything in float32 first: if that fails, all do
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
        text = self._policy_text(choice, problem)
        target, drop = self._config.target_db, self._config.metric_drop
        audited, metric = self._trials.audit(text)
        db = _accuracy(audited.report)
        if drop is not None and metric is not None:
            accuracy = Accuracy(db, within_drop(*metric, drop) and db != -math.inf, metric)
        else:
            fits = db is None or target is None or db >= target
            accuracy = Accuracy(db, fits and audited.report.exit_code == 0)
        self._tried.append(tried_set(problem, choice, accuracy, "final", "the policy, audited as a whole"))
        if not accuracy.reached:
            # some ops are split, or renamed, once their input is in float32
            low_ops = {site.id for site in self._audit.sites} | self._appeared
            sites = (site for site in audited.audit.converted.traced.sites if site.facts is not None)
            more = {s.id for s in sites if s.decision.cast is Cast.LOWER and s.id not in low_ops}
            if more:
                self._appeared |= more
                return self._final(choice, problem)
        return Final(choice, text, audited, accuracy)

    def _broken(self, final: Final) -> frozenset[str]:
        """Return the 16-bit ops at which the audit found errors."""
        values = self._problem.graph.values
        errors = {f.site for f in final.audited.report.findings if f.severity == Severity.ERROR}
        return frozenset(s for s in errors if s in values and values[s].free and s not in final.choice)

    def _low_casts(self, final: Final) -> frozenset[str]:
        """Return casts in the model's code to 16 bits whose inputs are in float32.

        The target of ``x.to(y.dtype)`` depends on the policy; the problem assumes the dtype of ``x``.
        """
        values, wide = self._problem.graph.values, self._problem.graph.in_float32(final.choice)
        sites = final.audited.audit.converted.traced.sites
        casts = (site.id for site in sites if site.role is Role.CAST and site.dtype in LOW_PRECISION_DTYPES)
        return frozenset(name for name in casts if name in wide and values[name].kind is ValueKind.FOLLOW)

    def _policy_text(self, choice: Choice, problem: TuningProblem) -> str:
        """Return a rule file (YAML) that extends the base policy and keeps a choice in float32."""
        values, ops = problem.graph.values, problem.ops(choice)
        stored = [name for name, value in values.items() if value.kind is ValueKind.WEIGHT]
        reasons = {v.name: v.site.decision.reason for v in values.values() if v.site is not None}
        groups = {
            Reason.RANGE: [
                *(name for name in ops if name in problem.required),
                *(name for name, reason in reasons.items() if reason == TOO_LARGE),
            ],
            Reason.PRECISION: [
                *(name for name in ops if name not in problem.required),
                *sorted(self._appeared),
            ],
            Reason.NO_KERNEL: [
                name
                for name, reason in reasons.items()
                if reason == Reason.NO_KERNEL and values[name].kind is ValueKind.FLOAT32
            ],
        }
        target, base = self._config.target_db, self._trials.base
        goal = "" if target is None else f", for {target:g} dB"
        title = f"{plural(len(ops), 'op')} in float32{goal} in {dtype_name(self._trials.dtype)}"
        data: dict[str, Any] = {"name": NAME, "title": title, "extends": [base.location or base.name]}
        # patterns must tell the members of a group from all other sites and weights
        if weights := [name for name in stored if name in choice]:
            keep = {"keep": [{"parameter": globs_of(weights, stored)}]}
            data["weights"] = base.file.weights.model_dump(mode="json", exclude_defaults=True) | keep
        every = [*(site.id for site in self._audit.sites if site.facts is not None), *self._appeared]
        rules = [
            {
                "id": f"{NAME}/{reason.value}",
                "match": {"site": globs_of(members, every)},
                "cast": Cast.FLOAT32.value,
                "reason": reason.value,
                "why": _WHY[reason],
                "source": "ampaudit tune",
            }
            for reason, members in groups.items()
            if members
        ]
        if rules:
            data["rules"] = rules
        return yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)

    def _report(self, final: Final) -> TuningReport:
        problem, graph, config = self._problem, self._problem.graph, self._config
        source, record = self._trials.source, self._audit.record
        start = self._trials.accuracy(frozenset())
        weights = planned_weights(final.audited.audit.converted, masters=False)
        report = final.audited.report
        errors = dict.fromkeys(f"{f.code} at {f.site}" for f in report.active if f.severity == Severity.ERROR)
        notes = [*source.notes, *report.notes]
        if errors:
            notes.append(f"the audit of the policy has errors: {', '.join(list(errors)[:3])}")
        if self._appeared:
            names = ", ".join(sorted(self._appeared)[:3])
            notes.append(f"in float32 as well, where their inputs are: {names}")
        return TuningReport(
            schema=1,
            tool=THIS_TOOL,
            model=ModelInfo(source.location, source.kind, source.sha256),
            device=record.device,
            dtype=dtype_name(self._trials.dtype),
            target_db=config.target_db,
            metric_drop=config.metric_drop,
            metric=final.accuracy.metric,
            cost_kind=config.cost,
            reached=final.accuracy.reached,
            low_db=finite_or_none(start.db),
            low_broken=start.db == -math.inf,
            low_predicted_db=accuracy_of(problem.noise(frozenset())),
            predicted_db=accuracy_of(problem.noise(final.choice)),
            measured_db=finite_or_none(final.accuracy.db),
            ops=len(problem.ops(frozenset(problem.free))),
            kept=tuple(self._kept_op(graph.values[name], final) for name in problem.ops(final.choice)),
            lower_bound=self._min_ops(final),
            minimal=config.exhaustive and final.accuracy.reached,
            casts=len(problem.borders(graph.in_float32(final.choice))),
            weights=tuple(self._kept_weights(final)),
            bytes_before=weights.before,
            bytes_after=weights.after,
            noise=noise_rows(problem.sensitivities, graph, graph.in_float32(()))[:SHOWN_NOISE],
            frontier=tuple(self._frontier(final)),
            tried=tuple(self._tried),
            runs=len(self._tried) + record.batches,
            policy=final.text,
            name=NAME,
            rescale="",
            seconds=dict(self._seconds),
            notes=tuple(notes),
            environment=this_environment(),
            inputs=source.inputs,
        )

    def _min_ops(self, final: Final) -> int:
        """Return a lower bound on the ops in float32 under the error model, calibrated by the final run."""
        target = self._config.target_db
        if target is None or not final.accuracy.reached:
            return len(self._problem.ops(self._problem.required))
        predicted, measured = self._problem.noise(final.choice), final.accuracy.noise
        # if one run is better than predicted, others may be
        scale = max(predicted / measured, 1.0) if measured and predicted else 1.0
        return self._search.solver.min_ops(noise_of(target) * scale)

    def _without(self, name: str, choice: Choice) -> float | None:
        """Return the predicted accuracy without a member of a choice; ``None`` if its range needs float32."""
        problem = self._problem
        return None if name in problem.required else accuracy_of(problem.noise(choice - {name}))

    def _kept_op(self, value: PrecisionValue, final: Final) -> KeptOp:
        """Return an op that stays in float32, with the number that says why."""
        name, site = value.name, value.site
        assert site is not None
        measured, without = self._needed.get(name), self._without(name, final.choice)
        out = name in self._problem.required
        if out:
            text = self._ranges.get(name, "it reads values near the limit of 16 bits, or beyond it")
        else:
            text = "accuracy needs it" if without is None else f"without it, outputs have {without:.1f} dB"
        return KeptOp(
            site=name,
            layer=site.layer,
            op=site.op,
            why="range" if out else "accuracy",
            text=text,
            without_db=without,
            measured_without_db=None if measured is None else finite_or_none(measured.db),
            source=finding_source(site),
            broken_without=measured is not None and measured.db == -math.inf,
        )

    def _kept_weights(self, final: Final) -> Iterator[KeptWeight]:
        traced, problem = self._audit.converted.traced, self._problem
        nodes = {place.name: place.node for place in traced.placeholders}
        for name, value in problem.graph.values.items():
            if value.kind is ValueKind.WEIGHT and name in final.choice and name in nodes:
                extra = 2 * traced.tensors[nodes[name]].numel()
                why: Literal["range", "accuracy"] = "range" if name in problem.required else "accuracy"
                yield KeptWeight(name, extra, why, self._without(name, final.choice))

    def _frontier(self, final: Final) -> Iterator[FrontierPoint]:
        """Yield the points of the frontier, with the result among them, by growing accuracy."""
        problem = self._problem
        points = {point.choice: point.noise for point in self._search.solver.frontier()}
        points.setdefault(final.choice, problem.noise(final.choice))
        every = max(len(problem.ops(frozenset(problem.free))), 1)
        for choice, noise in sorted(points.items(), key=lambda item: -item[1]):
            result = final.accuracy if choice == final.choice else self._search.results.get(choice)
            ops = len(problem.ops(choice))
            yield FrontierPoint(
                ops=ops,
                share=ops / every,
                casts=len(problem.borders(problem.graph.in_float32(choice))),
                cost=problem.cost(choice),
                predicted_db=accuracy_of(noise),
                measured_db=None if result is None else finite_or_none(result.db),
                policy=self._policy_text(choice, problem),
                chosen=choice == final.choice,
                broken=result is not None and result.db == -math.inf,
                weights=sum(problem.graph.values[name].kind is ValueKind.WEIGHT for name in choice),
            )


def _accuracy(report: Report) -> float | None:
    """Return the accuracy of the worst output; ``None`` if all are exact."""
    if report.broken_outputs:
        return -math.inf
    return None if report.worst_output is None else report.worst_output.accuracy_db


def pytorch_code(trials: Trials, report: TuningReport) -> str:
    """Return code that casts a model to 16 bits, except the layers of the ops that stay in float32.

    Layers are kept as a whole, so more ops than those of the report are in float32. The code is empty if it
    does not reach the accuracy, or if no layer has the ops.
    """
    source, form = trials.source, trials.number_format
    if source.kind not in _KINDS or not report.reached:
        return ""
    least = report.measured_db if report.target_db is None else report.target_db
    config = ScanConfig(dtype=form.name, device=trials.config.device, min_sqnr=max(least or 0.0, 0.0))
    half = load_policy("half")
    run_config = RunConfig(half, load_policy("torch-cuda"), form, trials.device, trials.config.seed)
    try:
        (audit,) = run_audits(source.model, source.batches, [run_config], trials.session.on_progress)
    except AuditError:
        return ""
    context = context_of(audit, form, config)
    subject = AdviceContext(source.model, half, context)
    attempts = Attempts(subject, source, run_config, config, ())
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
