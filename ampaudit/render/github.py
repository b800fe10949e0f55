"""GitHub's workflow commands: findings as annotations on the lines of a pull request."""

from __future__ import annotations

from collections.abc import Iterable

from ampaudit.render.evidence import relative_path
from ampaudit.render.subjects import Alert, Subject, subjects_of
from ampaudit.report.documents import Document
from ampaudit.report.finding import Severity

__all__ = ["to_github"]

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_SHOWN = 10  # of each command in one step; a runner drops the others


def to_github(document: Document) -> str:
    """A line per annotation, the gravest first, and one that counts those that would not be shown."""
    return "".join(f"{line}\n" for subject in subjects_of(document) for line in _lines(subject))


def _lines(subject: Subject) -> Iterable[str]:
    for case, text in subject.errors.items():
        yield f"::error title={_property(f'ampaudit: {case}')}::{_message(text)}"
    for level, command in _COMMANDS.items():
        alerts = [a for a in subject.alerts if a.level is level and a.suppressed is None]
        for alert in alerts[:_SHOWN]:
            yield _annotation(subject, alert, command)
        if len(alerts) > _SHOWN:
            yield f"{len(alerts) - _SHOWN} more of level {command} are in the report of {subject.name}"
    verdict = "PASS" if subject.passed else "FAIL"
    yield f"ampaudit: {verdict} {subject.name} ({subject.label}), {len(subject.alerts)} findings"


def _annotation(subject: Subject, alert: Alert, command: str) -> str:
    fields = {"title": f"{alert.code} {alert.title}"}
    if alert.line is not None:
        fields = {"file": relative_path(alert.line.file), "line": str(max(alert.line.line, 1)), **fields}
    if alert.region is not None:
        fields["col"] = str(alert.region[0])
    properties = ",".join(f"{name}={_property(value)}" for name, value in fields.items())
    text = f"{alert.site} ({subject.label})\n{alert.text}\n{alert.advice}".rstrip()
    return f"::{command} {properties}::{_message(text)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
