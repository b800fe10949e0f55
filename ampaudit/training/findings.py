"""Finds problems of training runs, and builds the report of several runs or a watched loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ampaudit.audit.checks.interface import finding_about
from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.sites import SiteId
from ampaudit.core.text import finite_or_none, format_number, format_scale, plural
from ampaudit.findings.finding import FailOn, Finding, Severity, Verdict, gate_at
from ampaudit.report.model import ModelInfo
from ampaudit.report.training import Health, ParameterHealth, TrainingReport, Variant

MAX_RELATIVE = 0.1  # deviation, relative to FP32's smoothed loss
MAX_OF_START = 0.02  # deviation, relative to FP32's first loss
MAX_LOST = 0.1  # share of updates
MAX_SKIPPED = 0.1  # share of steps
MAX_METRIC_DROP = 0.05  # drop, relative to FP32's metric
MAX_FLUSHED = 0.5  # share of gradient elements, or of second moments
# share of a weight gradient's peak; a bias gradient below it is a sum that cancels to rounding errors
NOISE = 2.0**-10


def findings_of(variant: Variant, reference: Variant | None = None) -> tuple[Finding, ...]:
    """Return the problems of one variant, the gravest first; ``reference`` is the FP32 run."""
    if variant.name == "fp32":
        return ()
    checks = (
        _diverged(variant, reference),
        _skipped(variant),
        _lost(variant),
        _state(variant),
        _flushed(variant, reference),
    )
    findings = (finding for check in checks for finding in check)
    return tuple(sorted(findings, key=lambda finding: -finding.severity.rank))


def _finding(
    variant: Variant, code: str, layer: str, cause: str, advice: str, severity: Severity | None
) -> Finding:
    finding = finding_about(
        code, SiteId(f"{variant.name}/{layer or 'loop'}"), layer, cause, advice, severity=severity
    )
    return replace(finding, phase="backward", confidence="observed")


def _diverged(variant: Variant, reference: Variant | None) -> Iterator[Finding]:
    steps = len(variant.health.steps)
    exact = reference.metric if reference is not None else None
    reasons = [] if reference is not None else list(_broken(variant.health))
    if variant.diverged is not None:
        end = format_number(variant.final_loss) if variant.final_loss is not None else "NaN or infinite"
        count = steps - variant.diverged
        last = f"all {steps}" if count == steps else f"the last{f' {count}' if count > 1 else ''} of {steps}"
        reasons.append(f"in {last} steps the loss deviates from FP32's; it ends at {end}")
    if exact is not None:
        drop = math.inf if variant.metric is None else exact - variant.metric
        if drop > MAX_METRIC_DROP * abs(exact):
            metric = format_number(variant.metric) if variant.metric is not None else "not finite"
            reasons.append(f"after training the metric is {metric}, FP32's {format_number(exact)}")
    if reasons:
        cause = f"{variant.name}: {'; '.join(reasons)}"
        advice = "see the other findings about this run; keep FP32 masters and a loss scale"
        if reference is None:
            advice = "find the first op that overflows with ampaudit scan --backward"
        yield _finding(variant, "AMP711", "", cause, advice, None)


def _broken(health: Health) -> Iterator[str]:
    """Describe where a loop without an FP32 reference broke; skipped steps are harmless."""
    broken = [step for step in health.recorded if step.broken]
    if broken and (not all(step.skipped for step in broken) or broken[-1] is health.recorded[-1]):
        share = f"{len(broken)} of {plural(len(health.recorded), 'recorded step')}"
        yield f"the loss is NaN or infinite in {share}, first in step {broken[0].step} (counted from 0)"
    stepped = sum(not health.steps[number].skipped for number in health.watched)
    count = max((p.broken for p in health.parameters), default=0) - (len(health.watched) - stepped)
    if count > 0:
        yield f"a gradient is NaN or infinite in {count} of {plural(stepped, 'measured step')}"
    if health.broken_state:
        (name, step), *others = health.broken_state
        more = f" and {plural(len(others), 'other buffer')} are" if others else " is"
        since = "" if step is None else f" since step {step} (counted from 0)"
        yield f"{name}{more} NaN or infinite{since}: the forward pass writes it in skipped steps as well"


def _skipped(variant: Variant) -> Iterator[Finding]:
    health = variant.health
    share = health.skipped / max(len(health.steps), 1)
    if share <= MAX_SKIPPED:
        return
    last = health.steps[-1]
    cause = (
        f"{variant.name}: {health.skipped} of {len(health.steps)} steps are skipped; "
        f"the scale ends at {format_scale(last.scale)}"
    )
    start = "start with a lower scale, and " if health.steps[0].scale > 1 else ""
    advice = f"{start}find the layer whose gradient overflows with scan --backward"
    yield _finding(variant, "AMP712", "", cause, advice, Severity.ERROR if share == 1.0 else None)


def _lost(variant: Variant) -> Iterator[Finding]:
    rows = [p for p in _in_16_bits(variant.health) if p.lost is not None]
    share = _weighted(rows, "lost")
    if share is None or share < MAX_LOST:
        return
    noise = _cancelled(variant.health)
    worst = max(rows, key=lambda p: (p.name not in noise, p.lost or 0.0))
    cause = (
        f"{variant.name}: {share:.0%} of the updates are lost in {variant.health.dtype} weights: less "
        f"than half an ulp; most in {worst.name} ({worst.lost:.0%})"
    )
    advice = "keep FP32 masters (policy apex-o2): they add up what a 16-bit weight loses"
    yield _finding(variant, "AMP713", worst.name.rpartition(".")[0], cause, advice, None)


def _state(variant: Variant) -> Iterator[Finding]:
    health = variant.health
    stored = _in_16_bits(health)
    if not stored:
        return
    rows = [p for p in stored if p.state_flushed is not None]
    share = _weighted(rows, "state_flushed") or 0.0
    reasons = []
    if health.eps is not None and health.eps > 0 and health.eps_held == 0:
        reasons.append(f"its eps {health.eps:g} is 0 in {health.dtype}")
    if share > MAX_FLUSHED:
        reasons.append(f"{share:.0%} of its second moments are 0 in {health.dtype}")
    if reasons:
        cause = f"{variant.name}: the optimizer's state is in {health.dtype}: {', and '.join(reasons)}"
        advice = "keep the optimizer's state in float32, or at least use eps=1e-4"
        yield _finding(variant, "AMP714", "", cause, advice, None)


def _in_16_bits(health: Health) -> list[ParameterHealth]:
    return [parameter for parameter in health.parameters if parameter.storage in LOW_PRECISION_NAMES]


def _flushed(variant: Variant, reference: Variant | None) -> Iterator[Finding]:
    """Find gradients that are flushed to 0, compared with FP32; without FP32, those that are always 0."""
    exact = {p.name: p.zero for p in reference.health.parameters} if reference is not None else {}
    guessed = reference is None and variant.health.may_flush

    def lost(parameter: ParameterHealth) -> float:
        zeros = parameter.zero - exact[parameter.name] if parameter.name in exact else 0.0
        always = guessed and all(peak == 0 for peak in parameter.gradient_peaks)
        return max(parameter.flushed, zeros, float(always))

    noise = _cancelled((variant if reference is None else reference).health)
    rows = [p for p in variant.health.parameters if lost(p) > MAX_FLUSHED and p.name not in noise]
    if not rows:
        return
    worst = max(rows, key=lost)
    others = f", and more than half of {plural(len(rows) - 1, 'other')}" if len(rows) > 1 else ""
    cause = (
        f"{variant.name}: {lost(worst):.0%} of the gradient of {worst.name} is lost{others}: too small "
        f"for {variant.health.dtype} at the loss scale of its steps"
    )
    advice = "raise the loss scale: scan --backward says how far"
    yield _finding(variant, "AMP715", worst.name.rpartition(".")[0], cause, advice, None)


def _cancelled(health: Health) -> set[str]:
    """Return biases whose gradients are rounding errors, such as those before batch norm and of keys."""
    peaks = {p.name: p.largest_gradient for p in health.parameters}
    biases = {name: peak for name, peak in peaks.items() if name.endswith("bias") and peak}
    weights = {name: peaks.get(name.removesuffix("bias") + "weight") or 0.0 for name in biases}
    return {name for name, peak in biases.items() if peak <= NOISE * weights[name]}


def _weighted(rows: Sequence[ParameterHealth], field: str) -> float | None:
    total = sum(row.elements for row in rows)
    return sum(getattr(row, field) * row.elements for row in rows) / total if total else None


def training_report(
    model: ModelInfo,
    device: str,
    dtype: str,
    variants: Sequence[Variant],
    *,
    seed: int | None,
    optimizer: str,
    fail_on: FailOn,
    judged: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> TrainingReport:
    """Build the report of several runs; only findings about the ``judged`` ones can fail it."""
    exact = next((variant for variant in variants if variant.name == "fp32"), None)
    findings = tuple(f for variant in variants for f in findings_of(variant, exact))
    names = {v.name for v in variants} if judged is None else set(judged)
    severities = [f.severity for f in findings if f.site.rpartition("/")[0] in names]
    steps = len(variants[0].health.steps) if variants else 0
    verdict: Verdict = "pass" if steps else "warn"
    if Severity.ERROR in severities:
        verdict = "fail"
    return TrainingReport(
        schema=1,
        tool=THIS_TOOL,
        model=model,
        device=device,
        dtype=dtype,
        steps=steps,
        seed=seed,
        optimizer=optimizer,
        verdict=verdict,
        gate=gate_at(severities, fail_on),
        fail_on=fail_on,
        findings=findings,
        variants=tuple(variants),
        notes=tuple(notes),
        environment=this_environment(),
    )


def watched_report(
    model: nn.Module, loops: Sequence[tuple[torch.optim.Optimizer, Health]], notes: Sequence[str] = ()
) -> TrainingReport:
    """Build the report of one watched loop, with a variant per optimizer."""
    several = len(loops) > 1
    kinds = [type(optimizer).__name__ for optimizer, _ in loops]
    variants = [
        Variant(
            name=f"optimizer {index} ({kind})" if several else "watched",
            how="a loop of the user's",
            health=health,
            diverged=None,
            final_loss=smoothed_end([step.loss for step in health.recorded]),
            metric=None,
            seconds=None,
            bytes_held=None,
            peak_bytes=None,
        )
        for index, (kind, (_, health)) in enumerate(zip(kinds, loops, strict=True))
    ]
    healths = [health for _, health in loops]
    device = loops[0][0].param_groups[0]["params"][0].device.type
    left_out = []
    if any(health.steps for health in healths) and not any(health.recorded for health in healths):
        left_out.append("no loss was recorded: call loss(value) of the monitor in the loop")
    if dropped := sum(health.dropped for health in healths):
        left_out.append(f"{plural(dropped, 'recorded loss')} left out: the loop took no step on them")
    return training_report(
        ModelInfo(type(model).__name__, "object", None),
        device,
        healths[0].dtype,
        variants,
        seed=None,
        optimizer=", ".join(dict.fromkeys(kinds)),
        fail_on="error",
        notes=(*notes, *left_out),
    )


def diverged_at(losses: Sequence[float | None], reference: Sequence[float | None]) -> int | None:
    """Return the first step from which the smoothed loss stays above FP32's; ``None`` if it does not.

    A loss is above if it exceeds FP32's by more than a tenth of it plus a fiftieth of the first FP32 loss, or
    if it is not finite.
    """
    width = max(len(losses) // 20, 1)
    ours, theirs = _smoothed(losses, width), _smoothed(reference, width)
    start = abs(next((value for value in reference if value is not None), 0.0))
    first: int | None = None
    for step, (loss, other) in enumerate(zip(ours, theirs, strict=True)):
        inside = (
            loss is not None
            and other is not None
            and loss - other <= MAX_RELATIVE * abs(other) + MAX_OF_START * start
        )
        first = None if inside else (step if first is None else first)
    return first


def smoothed_end(losses: Sequence[float | None]) -> float | None:
    """Return the mean of the last tenth; ``None`` if there is none, or one is not finite."""
    return finite_or_none(_mean(losses[-max(len(losses) // 10, 1) :]))


def _smoothed(losses: Sequence[float | None], width: int) -> list[float | None]:
    """Compute running means over ``width`` steps; ``None`` where one of them is not finite."""
    return [_mean(losses[max(end - width, 0) : end]) for end in range(1, len(losses) + 1)]


def _mean(losses: Sequence[float | None]) -> float | None:
    values = [value for value in losses if value is not None]
    return sum(values) / len(values) if values and len(values) == len(losses) else None
