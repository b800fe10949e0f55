"""Renders SARIF 2.1.0, with which code hosts show findings on source lines.

Section numbers below are those of OASIS "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
Code hosts require more than it does: relative paths, fingerprints, and a category per run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_json, model_file
from ampaudit.findings.pages import all_pages
from ampaudit.render.findings import Alert, Suite, relative_path
from ampaudit.render.view import Renderable, view_of

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_PATH_SHOWN = 20
_MAX_RESULTS = 25_000  # per run; code hosts reject files with more
_ROOT = "%SRCROOT%"


def to_sarif(document: Renderable) -> str:
    """Return one run per suite; suppressed findings are included as such."""
    runs = [_run(suite) for suite in view_of(document).suites()]
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": runs}
    return escape_json(json.dumps(log, indent=1, ensure_ascii=False)) + "\n"


def _run(suite: Suite) -> dict[str, Any]:
    alerts = suite.alerts[:_MAX_RESULTS]
    codes = sorted({alert.code for alert in alerts})
    titles = {alert.code: alert.title for alert in alerts}
    omitted = len(suite.alerts) - len(alerts)
    notifications = [f"{omitted} more findings are in the JSON report"] if omitted else []
    notifications += [f"{case}: {text}" for case, text in suite.errors.items()]
    about = ("verdict", "gate", "inputs", "gaps")
    properties = {name: text for name in about if (text := getattr(suite, name))}
    if suite.combined is not None:
        properties["combinedPolicy"] = suite.combined.text
    return {
        "tool": {
            "driver": {
                "name": "ampaudit",
                "version": suite.tool_version,
                **_information(),
                "rules": [_rule(code, titles[code]) for code in codes],
            }
        },
        "automationDetails": {"id": f"ampaudit/{suite.name}/" + (f"{suite.label}/" if suite.label else "")},
        "invocations": [
            {
                "executionSuccessful": not suite.errors,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": _text(text)}} for text in notifications
                ],
            }
        ],
        "results": [_result(suite, alert, codes.index(alert.code)) for alert in alerts],
        "columnKind": "unicodeCodePoints",
        "properties": properties,
    }


def _information() -> dict[str, str]:
    """Return the project's home page according to its package metadata, if there is one."""
    with contextlib.suppress(PackageNotFoundError):
        urls = (text.partition(", ") for text in metadata("ampaudit").get_all("Project-URL", []))
        addresses = {label.lower(): address for label, _, address in urls}
        if "homepage" in addresses:
            return {"informationUri": addresses["homepage"]}
    return {}


def _rule(code: str, title: str) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": code,
        "name": "".join(word.capitalize() for word in title.split()),
        "shortDescription": {"text": title},
    }
    page = all_pages().get(code)
    if page is None:
        return rule
    says = page.text.partition("## What it says")[2].partition("##")[0]
    return rule | {
        "fullDescription": {"text": " ".join(says.split())},
        "help": {"text": page.text, "markdown": page.text},
        "defaultConfiguration": {"level": page.severity},
        "properties": {"tags": sorted({"precision", page.kind})},
    }


def _result(suite: Suite, alert: Alert, rule: int) -> dict[str, Any]:
    text = f"{alert.site}: {alert.text}\n{alert.advice}".rstrip()
    result: dict[str, Any] = {
        "ruleId": alert.code,
        "ruleIndex": rule,
        "level": alert.level.value,
        "message": {"text": _text(text)},
        "locations": [_location(_shown_at(suite, alert), alert)],
        "partialFingerprints": {"ampauditSite/v1": _fingerprint(suite, alert)},
    }
    if alert.related is not None:
        result["relatedLocations"] = [_location(alert.related, None, "the line that computes the value")]
    if alert.path:
        result["codeFlows"] = [{"threadFlows": [{"locations": list(_flow(suite, alert))}]}]
    if alert.suppressed is not None:
        how = "inSource" if alert.suppressed.startswith("comment:") else "external"
        result["suppressions"] = [{"kind": how, "justification": alert.suppressed}]
    return result


def _flow(suite: Suite, alert: Alert) -> Iterable[dict[str, Any]]:
    """Return the code flow from the origin to the poisoned sites."""
    yield {"location": _location(_shown_at(suite, alert), alert, f"{alert.site} breaks")}
    for site in alert.path[:_PATH_SHOWN]:
        message = {"message": {"text": _text(f"{site} is poisoned")}}
        yield {"location": {"logicalLocations": [_logical(site)], **message}}


def _shown_at(suite: Suite, alert: Alert) -> SourceLine:
    """Return the line of a finding, or the first line of the model's file if it is unknown."""
    return alert.line or SourceLine(model_file(suite.name), 1)


def _location(line: SourceLine, alert: Alert | None, message: str = "") -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(line.line, 1)}
    if alert is not None and alert.region is not None and alert.line is line:
        start_column, end_line, end_column = alert.region
        region |= {"startColumn": start_column, "endLine": end_line, "endColumn": end_column}
    elif line.code:
        region["snippet"] = {"text": line.code}
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": _artifact(line.file), "region": region}
    }
    if alert is not None:
        location["logicalLocations"] = [_logical(alert.site)]
    if message:
        location["message"] = {"text": _text(message)}
    return location


def _artifact(file: str) -> dict[str, str]:
    """Return a URI relative to the source root if possible, else an absolute one."""
    path = str(PurePosixPath(relative_path(file)))
    if re.match("[A-Za-z]:/", path):  # a drive
        return {"uri": f"file:///{quote(path, safe='/:')}"}
    if path.startswith("/"):
        return {"uri": f"file://{quote(path)}"}  # Path.as_uri takes the locale's encoding
    return {"uri": quote(path), "uriBaseId": _ROOT}


def _logical(site: str) -> dict[str, str]:
    return {"fullyQualifiedName": site, "kind": "member"}


def _text(text: str) -> str:
    """Escape a message, in which braces are placeholders (3.11.5) and ``[a](b)`` is a link (3.11.6)."""
    doubled = text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")
    return doubled.replace("](", "\\](")


def _fingerprint(suite: Suite, alert: Alert) -> str:
    """Return a fingerprint that is stable across runs and moved lines."""
    # findings of lint have a region; their code tells apart the same mistake twice in a function
    is_lint = alert.region is not None and alert.line is not None
    subject = alert.line.code if is_lint and alert.line is not None else suite.label
    identity = "\n".join((subject, alert.case, alert.code, alert.site))
    return hashlib.sha256(identity.encode()).hexdigest()[:32]
