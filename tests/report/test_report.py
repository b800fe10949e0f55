"""The report: its schema, its text, and names that must not be obeyed."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import jsonschema
import pytest
import torch
from rich.console import Console
from torch import nn

from ampaudit.audit.checks.interface import finding_about
from ampaudit.core.sites import SiteId
from ampaudit.core.text import escape_control
from ampaudit.findings.finding import Evidence
from ampaudit.render.json import to_json
from ampaudit.render.render import for_terminal
from ampaudit.report.documents import json_schema, parse_document, report_schema_text
from ampaudit.report.model import Report
from tests.support.paths import ROOT
from tests.support.planted import WIDTH, TwoBranches
from tests.support.planted import scan_under_autocast as scan


def text_of(report: Report, width: int = 100, verbosity: int = 0) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(for_terminal(report, verbosity), crop=False)
    return stream.getvalue()


@pytest.fixture(scope="module")
def failing() -> Report:
    torch.manual_seed(0)
    return scan(TwoBranches(left=6e4, right=5e4).eval(), torch.randn(8, WIDTH) * 3)


@pytest.mark.parametrize("ranges", [False, True])
def test_json_follows_the_schema_and_comes_back(ranges: bool) -> None:
    report = scan(TwoBranches(left=6e4).eval(), torch.randn(8, WIDTH) * 3, ranges=ranges)
    document = json.loads(to_json(report), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert document["schema"] == 1
    assert list(document)[:6] == ["schema", "tool", "model", "run", "verdict", "gate"]
    assert parse_document(to_json(report), "report") == report


def test_the_documented_schema_is_the_one_in_force() -> None:
    assert (ROOT / "docs" / "report.schema.json").read_text() == report_schema_text(), "run: make schema"


def test_the_design_fields_are_there(failing: Report) -> None:
    document = json.loads(to_json(failing))
    finding = document["findings"][0]
    assert {"code", "kind", "severity", "confidence", "phase", "layer", "op", "site", "source"} <= set(
        finding
    )
    assert {"evidence", "origin", "poisons", "cause", "advice"} <= set(finding)
    assert {"peak", "limit", "inf", "nan", "headroom_bits"} <= set(finding["evidence"])
    assert {"site", "layer", "op", "precision", "rule", "reason", "verdict", "forward"} <= set(
        document["sites"][0]
    )
    assert {"sites", "audited", "proved", "uncovered_ops"} <= set(document["coverage"])
    assert document["verdict"] == "fail"


@pytest.mark.parametrize("width", [80, 200])
def test_the_text_says_what_where_and_how_far(failing: Report, width: int) -> None:
    text = text_of(failing, width)
    assert all(len(line) <= width for line in text.splitlines())
    words = " ".join(text.split())
    for expected in (
        "FAIL 2 places break in float16 (2 errors)",
        "left.up linear AMP101 overflow",
        "right.up linear AMP101 overflow",
        "tests/support/planted.py:",
        "limit 65,504; headroom -",
        "poisons",
        "Nearest the limit",
        "Outputs",
    ):
        assert expected in words, expected
    assert text.index("FAIL") < text.index("left.up") < text.index("right.up") < text.index("Nearest")


def test_quiet_is_one_line_and_verbose_lists_every_site(failing: Report) -> None:
    assert text_of(failing, 120, -1).strip().count("\n") == 0
    verbose = "".join(text_of(failing, 200, 1).split())
    for site in failing.sites:
        assert site.site.replace(" ", "") in verbose


def test_names_with_escapes_and_markup_are_shown_and_not_obeyed() -> None:
    name = "evil\x1b[31m[bold red]x[/]\n<b>"
    model = nn.Sequential()
    model.add_module("ok", nn.Linear(WIDTH, WIDTH))
    model._modules[name] = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        model._modules[name].weight.mul_(1e6)  # type: ignore[union-attr, operator]
    report = scan(model.eval(), torch.randn(8, WIDTH), ranges=True)
    text = text_of(report, 200, 1)
    assert "\x1b" not in text
    assert "[bold red]x[/]" in text
    assert escape_control(name) == "evil\\x1b[31m[bold red]x[/]\\n<b>"


def test_an_empty_model_and_one_without_floats() -> None:
    class Integers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    report = scan(Integers().eval(), torch.arange(4))
    assert report.exit_code == 0
    assert report.coverage.sites == 0
    assert report.coverage.integer_sites == 1
    assert "nothing runs in float16" in text_of(report)
    assert scan(nn.Identity().eval(), torch.randn(4)).exit_code == 0


def test_complex_numbers_are_audited() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs()

    report = scan(Spectrum().eval(), torch.randn(4, 16))
    assert report.coverage.uncovered_ops == ()
    assert report.findings == ()


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (Evidence(flushed=0.75, headroom_bits=3.0), "75% flushed"),
        (Evidence(flushed=0.25, headroom_bits=3.0, sqnr_db=12.0), "12 dB"),
        (Evidence(flushed=0.75, headroom_bits=-2.0), "-2.0 bits"),
        (Evidence(flushed=0.75, inf=2), "2 inf"),
        (Evidence(flushed=0.75, inf=2, nan=1), "1 NaN"),
        (Evidence(headroom_bits=3.0), "+3.0 bits"),
        (Evidence(), ""),
    ],
)
def test_the_number_of_a_gradient_is_the_one_that_says_how_bad_it_is(evidence: Evidence, text: str) -> None:
    found = finding_about("AMP702", SiteId("a/b"), "a", "cause", "advice")
    assert replace(found, phase="backward", evidence=evidence).key_number == text
