"""What a page shows without scrolling, on a desk and on a phone, and what stays to tell rows apart."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ampaudit.core.sites import SiteId
from ampaudit.render.html.page import to_html
from ampaudit.report.model import OutputAccuracy, Report
from tests.support.browser import Open
from tests.support.saved import NAMES, sample, saved, saved_report


def placed(report: Report, names: list[str]) -> Report:
    """A report whose measured sites lie in these layers."""
    measured = [site for site in report.sites if site.forward is not None and not site.by_design]
    sites = [
        replace(measured[i % len(measured)], layer=name, site=SiteId(f"{name}/linear"))
        for i, name in enumerate(names)
    ]
    return replace(report, sites=tuple(sites), findings=())


def bottom(page: Any, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    return float(box["y"] + box["height"])


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
@pytest.mark.parametrize("name", ["overflow", "policies"])
def test_the_line_at_fault_is_above_the_fold(page_of: Open, name: str, width: int, height: int) -> None:
    page = page_of(saved(name), width=width)
    text = page.locator(".culprit").first.inner_text()
    for expected in (
        "blocks.1.wo",
        "linear",
        "AMP101 overflow",
        "t5_feed_forward.py:36",
        "return x + self.wo",
    ):
        assert expected in text
    assert bottom(page, ".culprit") < height


def test_a_healthy_page_has_no_line_at_fault(page_of: Open) -> None:
    page = page_of(saved("policies").reports[2])  # type: ignore[union-attr]
    assert page.locator(".culprit").count() == 0


@pytest.mark.parametrize("width", [390, 1440])
def test_labels_keep_what_tells_rows_apart(page_of: Open, width: int) -> None:
    stack = "model.language_model.decoder.transformer_layers"
    names = [f"{stack}.{i}.self_attention.output_projection" for i in range(48)]
    names += [f"{stack}.{i}.a_feed_forward_network_with_a_long_name" for i in range(12)]
    page = page_of(placed(saved_report(), names), width=width)
    labels = page.locator(".row-name").all_inner_texts()
    assert len(labels) >= 40
    assert len(set(labels)) == len(labels)
    boxes = page.locator(".row-name").evaluate_all("all => all.map((b) => [b.scrollWidth, b.clientWidth])")
    assert all(inner <= outer for inner, outer in boxes), "no label is cut a second time"
    titles = page.locator(".row-name").evaluate_all("all => all.map((b) => b.title)")
    assert titles[0].startswith(names[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_chart_that_goes_on_says_so(page_of: Open) -> None:
    page = page_of(placed(saved_report(), [f"layer.{i}" for i in range(300)]))
    said = page.locator("#range-more").inner_text()
    assert said.endswith("more rows below: scroll, or use the arrow keys")
    seen = page.locator("#range-rows").evaluate("box => Math.ceil(box.clientHeight / 22)")
    assert int(said.split()[0]) == page.locator("#range-rows").evaluate("box => box.scrollHeight / 22") - seen
    page.locator("#range-rows").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.locator("#range-more:empty").wait_for(state="attached")
    short = page_of(placed(saved_report(), ["one", "two"]))
    assert short.locator("#range-more").inner_text() == ""


@pytest.mark.parametrize("kind", ["check", "training", "bench"])
def test_the_switch_between_light_and_dark_works_on_every_page(page_of: Open, kind: str) -> None:
    page = page_of(sample(kind) if kind not in NAMES else saved(kind), scheme="dark")
    assert page.locator("#theme").inner_text() == "Light"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("kind", ["check", "training", "lint", "verification"])
def test_a_page_made_of_sections_begins_with_the_verdict(page_of: Open, kind: str) -> None:
    page = page_of(sample(kind))
    assert page.locator("h1 + .sentence .pill").inner_text() == "FAIL"


@pytest.mark.parametrize("width", [390, 700])
def test_the_names_of_limits_lie_inside(page_of: Open, width: int) -> None:
    page = page_of(saved("gradients"), width=width)
    right = page.locator("#range-axis").bounding_box()
    for text in page.locator("#range-axis text").all():
        box = text.bounding_box()
        assert box["x"] + box["width"] <= right["x"] + right["width"] + 1, text.text_content()


def test_warnings_leave_no_green_card() -> None:
    for name in ("ranges", "gradients"):
        assert not re.search(r'tile good"><span class="label">Errors', to_html(saved(name)))


def test_the_worst_output_comes_first() -> None:
    exact = [OutputAccuracy(f"mask{i}", None, None, kind="integer") for i in range(9)]
    bad, good = OutputAccuracy("bad", None, 12.0), OutputAccuracy("good", None, 60.0)
    flat = OutputAccuracy("flat", None, 1.0, constant=0.0)
    lost = OutputAccuracy("lost", None, None, problem="nothing of it is left")
    report = replace(saved_report(), findings=(), sites=(), outputs=(*exact, flat, good, bad, lost))
    assert [output.name for output in report.worst_outputs_first][:3] == ["lost", "bad", "good"]
