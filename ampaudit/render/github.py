"""Renders findings as GitHub workflow commands, which annotate the lines of a pull request."""

from __future__ import annotations

from collections.abc import Iterable

from ampaudit.findings.finding import Severity
from ampaudit.render.findings import Alert, Suite, relative_path
from ampaudit.render.view import Renderable, view_of

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_SHOWN = 10  # GitHub's limit per level and step


def to_github(document: Renderable) -> str:
    """Return one line per annotation, errors first, and a line that counts the rest."""
    return "".join(f"{line}\n" for suite in view_of(document).suites() for line in _lines(suite))


def _lines(suite: Suite) -> Iterable[str]:
    for case, text in suite.errors.items():
        level = "warning" if suite.tolerates_errors else "error"
        yield f"::{level} title={_property(f'ampaudit: {case}')}::{_message(text)}"
    for severity, command in _COMMANDS.items():
        alerts = [alert for alert in suite.active if alert.level is severity]
        for alert in alerts[:_SHOWN]:
            yield _annotation(suite, alert, command)
        if len(alerts) > _SHOWN:
            yield f"{len(alerts) - _SHOWN} more of level {command} are in the report of {suite.name}"
    if suite.combined is not None:
        message = f"{suite.combined.in_words}\n{suite.combined.text}"
        yield f"::notice title={suite.combined.title}::{_message(message)}"
    gaps = f"; {suite.gaps}" if suite.gaps else ""
    inputs = f"; inputs: {suite.inputs}" if suite.inputs else ""
    word = suite.verdict.upper()
    about = suite.label or suite.extent
    yield f"ampaudit: {word} {suite.name} ({about}), {suite.counts}{gaps}{inputs}; gate: {suite.gate}"


def _annotation(suite: Suite, alert: Alert, command: str) -> str:
    fields = {"title": f"{alert.code} {alert.title}"}
    if alert.line is not None:
        fields = {"file": relative_path(alert.line.file), "line": str(max(alert.line.line, 1)), **fields}
    if alert.region is not None:
        fields["col"] = str(alert.region[0])
    properties = ",".join(f"{name}={_property(value)}" for name, value in fields.items())
    where = f"{alert.site} ({suite.label})" if suite.label else alert.site
    text = f"{where}\n{alert.text}\n{alert.advice}".rstrip()
    return f"::{command} {properties}::{_message(text)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
