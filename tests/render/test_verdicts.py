"""What was found, and what the gate makes of it, are the same in each format."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ampaudit.cli.output import as_text
from ampaudit.cli.program import main
from ampaudit.findings.finding import Gate, Verdict
from ampaudit.findings.pages import all_pages
from ampaudit.render.render import FORMAT_REGISTRY, as_file, for_terminal, formats_of
from ampaudit.report.documents import Document
from tests.support.saved import sample, saved

OVERFLOWS = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return x * self.weight * 500
def example_inputs():
    return torch.full((2, 4), 300.0)
"""
WARNS = OVERFLOWS.replace("500", "210")
KINDS = ("overflow", "training", "lint", "check")
# what stands before the verdict
STARTS = {"text": "^", "html": 'class="pill [A-Z]+">', "markdown": "^## \\W+", "github": "^ampaudit: "}
PAIRS = list(product(("pass", "warn", "fail"), ("pass", "fail")))


def shown_text(document: Document) -> str:
    return as_text(lambda console: console.print(for_terminal(document)), 200)


def seen_in(text: str, form: str) -> tuple[str, str]:
    """Return the verdict and the gate that a reader of a format sees."""
    if form == "json":
        data = json.loads(text)
        return data["verdict"], data["gate"]
    if form == "junit":
        named = {e.get("name"): e.get("value") for e in ElementTree.fromstring(text).iter("property")}
        return str(named["verdict"]), str(named["gate"]).partition(" ")[0]
    if form == "sarif":
        about: dict[str, Any] = json.loads(text)["runs"][0]["properties"]
        return about["verdict"], about["gate"].partition(" ")[0]
    assert form in STARTS, f"say in seen_in how a reader of {form} sees the verdict and the gate"
    word = re.search(rf"{STARTS[form]}(PASS|WARN|FAIL)\b", text, re.MULTILINE)
    assert word is not None
    gate = re.search(r"\bgate:? +(\w+)", re.sub(r"<[^>]*>", "", text))
    if gate is None:  # the verdict speaks for both
        assert form in {"text", "html"}
        return word[1].lower(), "fail" if word[1] == "FAIL" else "pass"
    return word[1].lower(), gate[1]


@pytest.mark.parametrize(("verdict", "gate"), PAIRS)
@pytest.mark.parametrize("name", KINDS)
def test_verdict_and_gate_are_the_same_in_each_format(name: str, verdict: Verdict, gate: Gate) -> None:
    document: Any = replace(sample(name) if name == "lint" else saved(name), verdict=verdict, gate=gate)
    assert seen_in(shown_text(document), "text") == (verdict, gate)
    for form in formats_of(document.kind):
        if form != "text" and FORMAT_REGISTRY[form].needs != "rows":  # a table has no verdict
            assert seen_in(as_file(document, form), form) == (verdict, gate), form


@pytest.mark.parametrize(
    ("code", "fail_on", "verdict", "gate"),
    [
        (OVERFLOWS, "error", "fail", "fail"),
        (OVERFLOWS, "never", "fail", "pass"),
        (WARNS, "error", "pass", "pass"),
        (WARNS, "warning", "pass", "fail"),
        (WARNS, "never", "pass", "pass"),
    ],
)
def test_a_scan_as_it_is_typed(tmp_path: Path, code: str, fail_on: str, verdict: str, gate: str) -> None:
    model = tmp_path / "model.py"
    model.write_text(code)
    command = ["scan", str(model), "--policy", "half", "--fail-on", fail_on]
    for form in ("text", "json", "markdown", "github", "junit", "sarif", "html"):
        found = CliRunner().invoke(main, [*command, "--format", form])
        assert found.exit_code == (gate == "fail")
        assert seen_in(found.stdout, form) == (verdict, gate), form
    said = CliRunner(env={"COLUMNS": "200"}).invoke(main, command).stdout
    grave = "error" if code == OVERFLOWS else "warning"
    assert f"(1 {grave})" in said
    assert re.search(rf"^ 1  {grave}  ", said, re.MULTILINE)


@pytest.mark.parametrize(("fail_on", "gate"), [("error", "fail"), ("never", "pass")])
def test_a_check_as_it_is_typed(tmp_path: Path, fail_on: str, gate: str) -> None:
    model = tmp_path / "model.py"
    model.write_text(OVERFLOWS)
    command = ["check", str(model), "--policy", "half", "--fail-on", fail_on]
    for form in ("text", "json", "markdown", "github", "junit"):
        found = CliRunner().invoke(main, [*command, "--format", form])
        assert found.exit_code == (gate == "fail")
        assert seen_in(found.stdout, form) == ("fail", gate), form


@pytest.mark.parametrize(("fail_on", "gate"), [("warning", "fail"), ("never", "pass")])
def test_lint_as_it_is_typed(tmp_path: Path, fail_on: str, gate: str) -> None:
    (tmp_path / "train.py").write_text(all_pages()["AMP820"].bad.code)
    command = ["lint", str(tmp_path), "--fail-on", fail_on]
    assert CliRunner().invoke(main, [*command, "--format", "json"]).exit_code == (gate == "fail")
    for form in ("text", "json", "markdown", "github", "junit", "sarif"):
        found = CliRunner().invoke(main, [*command, "--format", form])
        assert seen_in(found.stdout, form)[1] == gate, form
