"""Renders JUnit XML, so that continuous integration lists layers as tests."""

from __future__ import annotations

from collections import defaultdict
from xml.etree import ElementTree

from ampaudit.core.text import escape_lines
from ampaudit.render.findings import Alert, Suite, relative_path
from ampaudit.render.view import Renderable, view_of


def to_junit(document: Renderable) -> str:
    """Return one suite per audit with a case per layer, run or target; only findings that fail it fail."""
    root = ElementTree.Element("testsuites", name="ampaudit")
    totals = {"tests": 0, "failures": 0, "errors": 0}
    for suite in view_of(document).suites():
        element = _element(suite)
        root.append(element)
        for name in totals:
            totals[name] += int(element.get(name, "0"))
    root.attrib |= {name: str(count) for name, count in totals.items()}
    ElementTree.indent(root, " ")
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _element(suite: Suite) -> ElementTree.Element:
    by_case: defaultdict[str, list[Alert]] = defaultdict(list)
    for alert in suite.alerts:
        by_case[alert.case].append(alert)
    failed = {alert.case for alert in suite.alerts if alert.fails} - suite.errors.keys()
    element = ElementTree.Element(
        "testsuite",
        name=escape_lines(suite.title),
        tests=str(len(suite.cases)),
        failures=str(len(failed)),
        errors=str(len(suite.errors)),
        skipped="0",
        time=f"{sum(suite.seconds.values()):.3f}",
    )
    properties = ElementTree.SubElement(element, "properties")
    for name in ("verdict", "gate", "inputs", "gaps"):
        if text := getattr(suite, name):
            ElementTree.SubElement(properties, "property", name=name, value=text)
    for case in suite.cases:
        seconds = f"{suite.seconds.get(case, 0.0):.3f}"
        attributes = {"classname": escape_lines(suite.name), "name": escape_lines(case), "time": seconds}
        testcase = ElementTree.SubElement(element, "testcase", attributes)
        if case in suite.errors:
            first = suite.errors[case].partition("\n")[0]
            inner = ElementTree.SubElement(testcase, "error", type="error", message=escape_lines(first))
            inner.text = escape_lines(suite.errors[case])
        else:
            _fill(testcase, by_case[case])
    if suite.combined is not None:
        policy = f"{suite.combined.title}: {suite.combined.in_words}\n{suite.combined.text}"
        ElementTree.SubElement(element, "system-out").text = escape_lines(policy)
    return element


def _fill(case: ElementTree.Element, alerts: list[Alert]) -> None:
    failing = [alert for alert in alerts if alert.fails]
    others = [alert for alert in alerts if not alert.fails]
    if failing:
        first, more = failing[0], len(failing) - 1
        message = f"{first.code} {first.title} at {first.site}" + (f", and {more} more" if more else "")
        inner = ElementTree.SubElement(case, "failure", type=first.code, message=escape_lines(message))
        inner.text = escape_lines("\n\n".join(map(_paragraph, failing)))
    if others:
        ElementTree.SubElement(case, "system-out").text = escape_lines("\n\n".join(map(_paragraph, others)))


def _paragraph(alert: Alert) -> str:
    where = f" {relative_path(alert.line.file)}:{alert.line.line}" if alert.line is not None else ""
    hidden = f" (suppressed: {alert.suppressed})" if alert.suppressed is not None else ""
    head = f"{alert.level.value}: {alert.code} {alert.title} at {alert.site}{where}{hidden}"
    return f"{head}\n{alert.text}\n{alert.advice}".rstrip()
