"""A summary in GitHub-flavoured Markdown, for a pull request or a workflow's summary page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ampaudit.core.text import escape_control, format_bytes, format_number
from ampaudit.render.bench_tables import bench_tables
from ampaudit.render.evidence import ran_on, relative_path
from ampaudit.render.gradient_tables import scales_that_suit
from ampaudit.render.subjects import Alert, Subject, subjects_of
from ampaudit.report.bench import BenchReport
from ampaudit.report.comparison import Comparison
from ampaudit.report.documents import Document
from ampaudit.report.finding import Severity
from ampaudit.report.model import Report
from ampaudit.report.training import TrainingReport

__all__ = ["code", "escaped", "table", "to_markdown"]

_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#|~&@!:\n]")
_ROWS, _DETAILS, _NEAREST = 25, 10, 5


def to_markdown(document: Document) -> str:
    """Verdict, what was found, the nearest to the limit, and the numbers of the run."""
    if isinstance(document, BenchReport):
        return "\n".join(_bench(document)) + "\n"
    subjects = subjects_of(document)
    reports = _reports(document)
    parts: list[str] = []
    for index, subject in enumerate(subjects):
        parts += _verdict(subject)
        parts += _alerts(subject)
        if index < len(reports):
            parts += _about(reports[index])
    if len(reports) > 1:
        parts[:0] = ["## Policies side by side", "", *_policies(reports), ""]
    if isinstance(document, TrainingReport):
        parts += _runs(document)
    version = subjects[0].tool_version if subjects else ""
    parts += [f"<sub>ampaudit {escaped(version)}</sub>"]
    return "\n".join(parts) + "\n"


def _bench(report: BenchReport) -> Iterable[str]:
    what = "training steps" if report.train else "forward passes"
    yield f"{code(report.model.source)}: {what} on {escaped(report.device_name)}, median of {report.repeats}"
    yield ""
    for found in bench_tables(report):
        if ":" not in found.title:  # predictions are in the other formats
            yield from (f"{escaped(found.title)}:", "")
            rows = (tuple(map(escaped, row)) for row in found.rows)
            yield from (*table(found.heads, rows, right=range(1, len(found.heads))), "")


def escaped(text: str) -> str:
    """Text in which nothing is Markdown, HTML, a mention or a reference."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", escape_control(text))


def code(text: str) -> str:
    """A name as code; where it could break out of that, as escaped text."""
    safe = escape_control(text)
    return f"`{safe}`" if safe.strip() and not re.search(r"[`|\\]", safe) else escaped(text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Iterable[str]:
    """A table; the columns in ``right`` are set flush right."""
    rule = ("--:" if index in right else "---" for index in range(len(heads)))
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(rule)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _reports(document: Document) -> tuple[Report, ...]:
    if isinstance(document, Report):
        return (document,)
    return document.reports if isinstance(document, Comparison) else ()


def _verdict(subject: Subject) -> list[str]:
    mark = "✅ PASS" if subject.passed else "❌ FAIL"
    active = [alert for alert in subject.alerts if alert.suppressed is None]
    counts = [(level, sum(a.level is level for a in active)) for level in Severity]
    said = ", ".join(f"{n} {level.value}{'s' if n != 1 else ''}" for level, n in counts if n) or "no findings"
    errors = [f"- {code(case)}: {escaped(text)}" for case, text in subject.errors.items()]
    title = f"## {mark}: {code(subject.name)}"
    return [title, "", f"{escaped(subject.label)}: {said}", "", *errors, *([""] if errors else [])]


def _alerts(subject: Subject) -> list[str]:
    shown = [a for a in subject.alerts if a.suppressed is None and a.level is not Severity.NOTE]
    if not shown:
        return []
    rows = [(a.level.value, escaped(f"{a.code} {a.title}"), code(a.site), _line(a)) for a in shown[:_ROWS]]
    parts = [*table(("", "finding", "where", "line"), rows), ""]
    if len(shown) > _ROWS:
        parts += [f"and {len(shown) - _ROWS} more", ""]
    for alert in shown[:_DETAILS]:
        parts += _details(alert)
    return parts


def _details(alert: Alert) -> list[str]:
    lines = [
        escaped(line)
        for line in (*alert.text.split("\n"), *([f"next: {alert.advice}"] if alert.advice else []))
    ]
    title = f"{escaped(alert.code)} at {escaped(alert.site)}"
    diffs = [line for diff in alert.diffs for line in (*_fenced(diff), "")]
    return [f"<details><summary>{title}</summary>", "", "<br>\n".join(lines), "", *diffs, "</details>", ""]


def _fenced(diff: str) -> list[str]:
    """A diff as a block of code; its fence is longer than any row of backticks in it."""
    ticks = max((len(row) for row in re.findall("`+", diff)), default=0)
    fence = "`" * max(3, ticks + 1)
    return [f"{fence}diff", diff, fence]


def _line(alert: Alert) -> str:
    return code(f"{relative_path(alert.line.file)}:{alert.line.line}") if alert.line is not None else ""


def _about(report: Report) -> list[str]:
    parts: list[str] = []
    nearest = report.nearest_sites[:_NEAREST]
    if nearest:
        rows = [
            (code(s.site), format_number(f.peak), f"{f.headroom_bits:.1f} bits")
            for s in nearest
            if (f := s.forward)
        ]
        parts += ["Nearest the limit:", "", *table(("site", "peak", "headroom"), rows, right=(1, 2)), ""]
    cover = report.coverage
    facts = [f"{cover.audited} of {cover.sites} floating-point sites audited"]
    if report.proofs is not None:
        facts.append(f"{report.proofs.proved} of {report.proofs.sites} proved")
    if report.promoted:
        facts.append(f"{len(report.promoted)} promoted to float32 because of their values")
    if report.weights.working_bytes:
        kept, made = format_bytes(report.weights.master_bytes), format_bytes(report.weights.working_bytes)
        facts.append(f"weights {kept} in FP32, {made} in 16 bits")
    if report.backward is not None:
        facts.append(scales_that_suit(report.backward))
    facts.append(ran_on(report.run))
    return [*parts, *(f"- {escaped(fact)}" for fact in facts), ""]


def _policies(reports: Sequence[Report]) -> Iterable[str]:
    rows = []
    for report in reports:
        least = report.least_headroom
        bits = f"{least.forward.headroom_bits:.1f} bits" if least and least.forward else ""
        verdict = "✅ PASS" if report.exit_code == 0 else "❌ FAIL"
        breaks = str(report.count(Severity.ERROR))
        rows.append((code(report.run.policy), verdict, breaks, bits, report.accuracy))
    return table(("policy", "", "breaks", "least headroom", "output"), rows, right=(2, 3, 4))


def _runs(report: TrainingReport) -> list[str]:
    def shown(value: float | None) -> str:
        return "not finite" if value is None else format_number(value)

    rows = [
        (
            code(v.name),
            shown(v.final_loss),
            "" if v.metric is None else shown(v.metric),
            str(v.health.skipped),
        )
        for v in report.variants
    ]
    return [*table(("run", "last loss", "metric", "skipped steps"), rows, right=(1, 2, 3)), ""]
