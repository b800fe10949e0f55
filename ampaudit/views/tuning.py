"""Renders a tuning: the ops that stay in float32, the accuracy with them, and what was tried."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.core.text import escape_control
from ampaudit.render.blocks import Section, headline, line
from ampaudit.render.findings import MARKS
from ampaudit.render.view import Row, View, ViewPage
from ampaudit.report.tuning import TuningReport
from ampaudit.views.tuning_tables import (
    code_title,
    point_words,
    tuning_policy,
    tuning_summary,
    tuning_tables,
    tuning_verdict,
)
from ampaudit.views.verdict import verdict_section


class TuningView(View[TuningReport]):
    """A row per op and weight in float32."""

    about = "model.source"
    columns = (
        *("kind", "name", "layer", "op", "why", "text", "without_db", "measured_without_db", "bytes"),
        *("file", "line"),
    )

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the verdict and what stays in float32; if verbose, also why and what was tried."""
        report, full = self.document, verbosity > 0
        word, sentence = self.verdict()
        verdict = verdict_section(word.lower(), sentence)
        if verbosity < 0:
            yield verdict
            return
        yield headline(report.tool.version, f"{self.name}: {self.subject()}")
        yield verdict
        if not full:
            yield tuning_summary(report)
            return
        yield from tuning_tables(report, full=True, grouped=False)
        yield from tuning_policy(report)

    def verdict(self) -> tuple[str, str]:
        """Return ``PASS`` or ``FAIL``, and the accuracy with its cost."""
        return tuning_verdict(self.document)

    def subject(self) -> str:
        """Describe the goal, the format and the device."""
        report = self.document
        goal = "" if report.target_db is None else f" for {report.target_db:g} dB"
        if report.metric_drop is not None:
            goal = f" for a metric within {report.metric_drop:g} of FP32's"
        made_up = f", {report.inputs.made_up}" if report.inputs is not None and report.inputs.made_up else ""
        return escape_control(f"tuned{goal} in {report.dtype} on {report.device}{made_up}")

    def rows(self) -> Iterator[Row]:
        """Return a row per op and weight in float32."""
        report = self.document
        for op in report.kept:
            place = op.source.user_line if op.source is not None else None
            names = ("layer", "op", "why", "text", "without_db", "measured_without_db")
            cells = {name: getattr(op, name) for name in names}
            cells |= {"file": place.file, "line": place.line} if place is not None else {}
            yield self._row("op", op.site, cells)
        for weight in report.weights:
            cells = {name: getattr(weight, name) for name in ("why", "without_db", "bytes")}
            yield self._row("weight", weight.name, cells)

    def _row(self, kind: str, name: str, cells: Row) -> Row:
        return {"kind": kind, "name": name, **{n: cells.get(n) for n in self.columns[2:]}}

    def digest(self) -> Iterator[Section]:
        """Render the verdict, the tables and the rule file."""
        word, sentence = self.verdict()
        title = line(f"{MARKS[word.lower()]}: ", (self.name, "code"))
        yield Section((line(sentence), line(self.subject())), title, level=2)
        yield from tuning_tables(self.document, full=False, grouped=True)
        yield from tuning_policy(self.document)

    def page(self) -> ViewPage:
        """Return the chart of the frontier, the tables, and the rule file of each point."""
        from ampaudit.views.tuning_plot import frontier_figure

        report = self.document
        word, sentence = self.verdict()
        values = {
            "kind": report.kind,
            "version": report.tool.version,
            "word": word,
            "sentence": sentence,
            "subject": self.subject(),
            "sections": list(tuning_tables(report, full=True, grouped=True)),
            "figure": frontier_figure(report),
            "points": [(point_words(report, p), p.policy, p.chosen) for p in report.frontier],
            "code": report.code,
            "code_title": code_title(report),
            "policy_text": "" if any(point.chosen for point in report.frontier) else report.policy,
        }
        return ViewPage("tuning.html.j2", ("theme.js",), None, values)
