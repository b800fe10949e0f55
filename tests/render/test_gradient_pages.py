"""Pages of models whose gradients break: every part of a page says so, with the numbers of the findings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.text import format_number
from tests.support.browser import Open
from tests.support.saved import saved

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class SquaredTwice(torch.autograd.Function):
    """Its backward squares numbers that 16 bits hold, and divides by the square."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> torch.Tensor:
        big = (gradient.abs() + 1) * 500
        return gradient * (big * big) / (big * big)


class TwoLayers(nn.Module):
    def __init__(self, factor: float, custom: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.factor, self.custom = factor, custom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * self.factor
        return self.second(SquaredTwice.apply(h) if self.custom else h)  # type: ignore[no-untyped-call]


def report_on(factor: float, weight: float, scale: float | None, custom: bool = False) -> ampaudit.Report:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.abs().sum() * weight

    model = TwoLayers(factor, custom).train()
    return ampaudit.scan(model, X, backward=True, loss=loss, loss_scale=scale)


CASES: dict[str, tuple[Callable[[], ampaudit.Report], str, str]] = {
    "overflow": (lambda: report_on(31.5, 1.0, 2.0**15), "AMP701", "bits"),
    "underflow": (lambda: report_on(1.0, 1e-9, 1.0), "AMP702", "flushed"),
    "nan": (lambda: report_on(1.0, 1.0, 2.0**8, custom=True), "AMP701", "NaN"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_page_marks_gradients_that_break(page_of: Open, case: str) -> None:
    make, code, said = CASES[case]
    report = make()
    assert (report.verdict, report.findings[0].code, report.findings[0].phase) == ("fail", code, "backward")
    page = page_of(report)
    assert page.locator(".tile.good").count() == 0
    tile = page.locator(".tile.bad", has_text="Gradients")
    assert said in tile.locator("strong").inner_text()
    fills = page.locator("#slopes-plot rect").evaluate_all("all => all.map((r) => r.getAttribute('fill'))")
    assert "var(--heat-0)" in fills
    assert "breaks" in page.locator("#strip-key").inner_text()
    bars = page.locator("#range-rows svg").first.evaluate("svg => svg.outerHTML")
    assert "var(--broken)" in bars


@pytest.mark.parametrize("case", CASES)
def test_a_panel_holds_the_numbers_of_its_findings(page_of: Open, case: str) -> None:
    report = CASES[case][0]()
    page = page_of(report)
    page.select_option("#rows", "sites")
    rows = {site.site for site in report.sites if site.forward or site.gradient}
    compared = 0
    for finding in report.findings:
        peak = finding.evidence.peak
        # what only passes values on has no row: there, it is that of the gradient
        own = finding.site if finding.site in rows else finding.evidence.about.removeprefix("gradient of ")
        if peak is None or own not in rows:
            continue
        page.locator(f'.row-name[aria-label^="{own}:"]').click()
        assert format_number(peak) in page.locator("#detail").inner_text()
        assert format_number(peak) in (page.locator(".finding").first.text_content() or "")
        compared += 1
    assert compared


NUMBERS = (
    0.0,
    4.2e-05,
    0.00012345,
    1.0,
    999.96,
    32768.0,
    62710.4,
    65504.0,
    1972000.0,
    9999999.0,
    1.744e7,
    5.4e-10,
)


def test_numbers_read_the_same_on_a_page_and_in_text(page_of: Open) -> None:
    script = Path(ampaudit.__file__).parent / "render" / "html" / "script" / "values.js"
    function = re.search(r"^function number\(.*?^}", script.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert function is not None
    page = page_of(saved("overflow"), csp=False)
    shown = page.evaluate(f"(numbers) => {{ {function[0]}; return numbers.map(number); }}", list(NUMBERS))
    assert shown == [format_number(value) for value in NUMBERS]
