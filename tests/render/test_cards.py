"""Documents in Python: cards for notebooks, files by suffix, data frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampaudit.core.errors import OutputError, UsageError
from ampaudit.render.html.page import to_html
from ampaudit.render.render import as_file, formats_of
from ampaudit.render.view import Strip, strip_svg, view_of
from ampaudit.report.documents import Document
from ampaudit.report.model import Comparison
from tests.support.saved import NAMES, sample, saved, saved_report

KINDS = (*NAMES, "conversion", "verification", "lint", "diff", "tuning")
SUFFIXES = {
    ".html": "html",
    ".json": "json",
    ".md": "markdown",
    ".csv": "csv",
    ".txt": "text",
    ".xml": "junit",
}


def document(name: str) -> Document:
    return saved(name) if name in NAMES else sample(name)


def fills(card: str) -> list[str]:
    return re.findall(r'<rect [^>]*fill="(#\w+)"', card)


def test_a_card_has_the_verdict_the_strip_and_the_findings() -> None:
    report = saved_report()
    card = report._repr_html_()
    assert '<i class="FAIL">FAIL</i> 2 places break in float16 (2 errors)' in card
    assert "policy torch-cuda, float16, eval mode" in card
    assert "least -2.7 bits at blocks.1.wo/linear" in card
    assert "#b2182b" in fills(card)
    for finding in report.active[:8]:
        assert f"<td>{finding.code}</td><td>{finding.layer}</td>" in card
    healthy = saved("policies").reports[2]  # type: ignore[union-attr]
    assert '<i class="PASS">PASS</i>' in healthy._repr_html_()
    assert "#b2182b" not in fills(healthy._repr_html_())


def test_a_card_of_several_policies_has_a_strip_for_each() -> None:
    card = saved("policies")._repr_html_()
    assert card.count("<svg") == 3
    for policy, word in (("torch-cuda", "FAIL"), ("half", "FAIL"), ("ampaudit", "PASS")):
        assert f">{word}</td><td>{policy}</td>" in card
        assert f"{policy}: headroom over depth" in card


def test_gradients_have_a_strip_of_their_own() -> None:
    card = saved("gradients")._repr_html_()
    assert "headroom over depth: least 13.9 bits" in card
    assert "gradients times the loss scale: least" in card


def test_a_strip_keeps_the_worst_of_each_stretch() -> None:
    cells = [(9.0, False, f"site {i}") for i in range(4000)]
    cells[1234] = (5.0, True, "<broken>")
    drawn = strip_svg(Strip("headroom", tuple(cells)))
    assert fills(drawn) == ["#8fbcdb", "#b2182b", "#8fbcdb"]
    assert "<title>&lt;broken&gt;</title>" in drawn
    assert sum(map(int, re.findall(r'<rect x="\d+" width="(\d+)"', drawn))) == 40
    alternating = tuple((2.0 + 9 * (i % 2), False, f"site {i}") for i in range(30))
    assert len(fills(strip_svg(Strip("headroom", alternating)))) == 30


def test_a_card_names_the_model_and_not_its_directory() -> None:
    for source, title in (
        ("/home/somebody/work/model.py", "model.py"),
        ("/home/somebody/model.py:build", "model.py:build"),
        ("C:\\work\\model.py", "model.py"),
        ("/models/bert-base", "bert-base"),
        ("examples/model.py", "examples/model.py"),
        ("package.module:build", "package.module:build"),
        ("/", "/"),
    ):
        report = saved_report()
        named = replace(report, model=replace(report.model, source=source))
        assert f"<b>{title}</b>" in named._repr_html_()
        assert view_of(Comparison((named, named))).title == title
        assert f"<h1>{title}</h1>" in to_html(named)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cards_fit_a_notebook(chromium: Any, scheme: str, tmp_path: Path) -> None:
    cards = "".join(document(name)._repr_html_() for name in KINDS)
    (tmp_path / "cards.html").write_text(
        f"<!doctype html><meta charset='utf-8'><main>{cards}</main>", "utf-8"
    )
    context = chromium.new_context(viewport={"width": 700, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto((tmp_path / "cards.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.locator(".ampaudit").count() == len(KINDS)
    heights = page.locator(".ampaudit").evaluate_all("all => all.map((card) => card.offsetHeight)")
    assert all(60 < height < 500 for height in heights), heights
    context.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_document_is_saved_in_the_format_of_its_suffix(name: str, tmp_path: Path) -> None:
    shown = document(name)
    for suffix, form in SUFFIXES.items():
        target = tmp_path / f"report{suffix}"
        if form in formats_of(shown.kind):
            shown.save(target)
            assert target.read_text("utf-8") == as_file(shown, form)
        else:
            with pytest.raises(UsageError, match="has no format"):
                shown.save(str(target))
            assert not target.exists()


def test_a_saved_file_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what cannot be saved is kept
    report, target = saved_report(), tmp_path / "report.txt"
    report.save(target, "json")
    assert target.read_text("utf-8") == as_file(report, "json")
    with pytest.raises(OutputError, match="exists"):
        report.save(target)
    report.save(target, force=True)
    assert target.read_text("utf-8") == as_file(report, "text")
    with pytest.raises(UsageError, match="path is missing"):
        report.save(None)  # type: ignore[arg-type]


def test_rows_become_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[[Any], Any] = lambda rows: ("frame", rows)  # noqa: E731
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=made))
    report = saved_report()
    kind, rows = report.to_pandas()
    assert kind == "frame"
    assert [row["site"] for row in rows] == [site.site for site in report.sites]
    with pytest.raises(UsageError, match="'conversion' has no table"):
        document("conversion").to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="needs pandas\n  next: pip install pandas"):
        report.to_pandas()
