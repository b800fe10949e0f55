"""The page in a real browser: clicked through, without a request, an error, or a name that is obeyed."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampaudit.core.sites import SiteId
from ampaudit.core.text import escape_control, format_number
from ampaudit.findings.finding import Severity
from ampaudit.render.html.page import to_html
from ampaudit.report.bench import BenchReport
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Comparison, Report
from tests.support.browser import Open
from tests.support.saved import HOSTILE, named, sample, saved, saved_report

SECTIONS = ("plan", "conversion", "verification", "check", "training", "lint", "diff", "tuning")
PAGES = ("overflow", "policies", "gradients", "ranges", "static")


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def many_sites(count: int) -> Report:
    report = saved_report()
    measured = [site for site in report.sites if site.forward is not None]
    made = []
    for i in range(count):
        site = measured[i % len(measured)]
        place = f"stack.{i // len(measured)}.{site.layer or 'top'}"
        made.append(replace(site, layer=place, site=SiteId(f"{place}/{site.op}#{i}")))
    return replace(report, sites=tuple(made))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_at_every_width(page_of: Open, name: str, width: int, scheme: str) -> None:
    page = page_of(saved(name), width=width, scheme=scheme)
    assert page.locator(".pill").first.inner_text() in ("PASS", "FAIL", "WARN")
    assert page.locator("#range-rows svg").first.bounding_box()["width"] > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")
    place = os.environ.get("AMPAUDIT_SCREENSHOTS")  # to be looked at
    if place:
        page.screenshot(path=Path(place) / f"{name}-{scheme}-{width}.png", full_page=True)


def test_it_begins_with_what_breaks(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    assert page.locator("h1").inner_text() == "examples/t5_feed_forward.py"
    assert "2 places break in float16" in page.locator(".sentence").inner_text()
    assert page.locator(".row-name[aria-selected=true]").inner_text() == "blocks.1.wo"
    assert page.locator("#detail h3").inner_text() == "blocks.1.wo"
    detail = page.locator("#detail").inner_text()
    for expected in ("436,400", "−2.7 bits", "4,496 infinite of 8,192", "t5_feed_forward.py:36", "AMP101"):
        assert expected in detail
    label = page.locator("#detail svg").get_attribute("aria-label")
    assert label == "Histogram of exponents: from 2⁸ to 2¹⁹, most of them at 2¹⁶."


def test_rows_are_chosen_by_mouse_and_by_keyboard(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    page.locator(".row-name", has_text="blocks.0.wi").click()
    assert page.locator("#detail h3").inner_text() == "blocks.0.wi"
    page.keyboard.press("ArrowDown")
    assert page.locator("#detail h3").inner_text() == "blocks.0.wo"
    page.keyboard.press("Home")
    assert page.locator("#detail h3").inner_text() == texts(page, ".row-name")[0]
    page.keyboard.press("End")
    assert page.locator("#detail h3").inner_text() == texts(page, ".row-name")[-1]
    assert page.locator(".row-name[tabindex='0']").count() == 1
    picture = page.locator("#range-rows svg").first
    picture.click(position={"x": 50, "y": 22 * 2 + 11})  # the third row
    assert page.locator("#detail h3").inner_text() == texts(page, ".row-name")[2]


def test_rows_are_ordered_and_filtered(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    page.select_option("#order", "headroom")
    assert texts(page, ".row-name")[:2] == ["blocks.1.wo", "blocks.2.wo"]
    page.fill("#name", "blocks.1.w")
    assert set(texts(page, ".row-name")) == {"blocks.1.wo", "blocks.1.wi"}
    assert page.locator("#row-count").inner_text() == "2 of 14 rows"
    page.fill("#name", "")
    page.select_option("#kind", "found")
    report = saved_report()
    measured = {site.site for site in report.sites if site.forward is not None}
    found = {f.layer for f in report.findings if f.site in measured}
    assert set(texts(page, ".row-name")) == found
    page.select_option("#kind", "all")
    page.select_option("#rows", "sites")
    assert page.locator("#row-count").inner_text() == f"{len(measured)} rows"
    page.fill("#name", "no such layer")
    assert "No row matches" in page.locator("#range-rows").inner_text()


def test_a_layer_is_as_near_to_the_limit_as_its_worst_op(page_of: Open) -> None:
    report = saved_report()
    own = [s for s in report.sites if s.layer == "norm" and s.precision == "float32" and s.forward]
    heads = [s.forward.headroom_bits for s in own if s.forward]
    assert min(heads) not in (heads[0], heads[-1])
    page = page_of(report)
    page.locator(".row-name", has_text="norm").last.click()
    said = page.locator("#detail").inner_text().replace("−", "-")
    assert f"In float16\n{min(heads):.1f} bits" in said
    assert f"Peak\n{format_number(max(s.forward.peak for s in own if s.forward))}" in said


def test_the_strip_goes_to_its_row(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    assert "−2.7 bits at blocks.1.wo/linear" in page.locator("#strip-text").inner_text()
    box = page.locator("#strip-plot svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 10)
    assert page.locator("#detail h3").inner_text() == "blocks.2.wo/linear"


def test_findings_are_filtered_and_lead_to_their_page(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    report = saved_report()
    notes = sum(f.severity.value == "note" for f in report.findings)
    assert page.locator(".finding:visible").count() == len(report.findings) - notes
    page.check('[name="severity"][value="note"]')
    assert page.locator(".finding:visible").count() == len(report.findings)
    page.fill("#text", "blocks.2.wo")
    shown = page.locator(".finding:visible")
    assert shown.count() >= 1
    assert all("blocks.2.wo" in text for text in texts(page, ".finding:visible"))
    page.fill("#text", "")
    page.select_option("#code", "AMP101")
    assert page.locator(".finding:visible").count() == 2
    page.locator(".finding:visible a").first.click()
    assert page.locator("#page-AMP101").get_attribute("open") is not None
    assert "What it says" in page.locator("#page-AMP101").inner_text()


def test_choosing_a_policy_changes_everything_below(page_of: Open) -> None:
    page = page_of(saved("policies"))
    assert texts(page, ".policies .pill") == ["FAIL", "FAIL", "PASS"]
    page.locator(".choose", has_text="ampaudit").click()
    assert texts(page, ".sentence:visible .pill") == ["PASS"]
    assert page.locator(".finding.error:visible").count() == 0
    assert "policy ampaudit" in page.locator(".heading:visible").inner_text()
    assert texts(page, ".facts:visible").__len__() == 1
    page.locator(".choose", has_text="half").click()
    assert page.locator(".finding.error:visible").count() == 3
    assert page.locator(".choose[aria-pressed=true]").inner_text() == "half"


def test_loss_scales_are_drawn(page_of: Open) -> None:
    page = page_of(saved("gradients"))
    assert "Loss scales from 2^" in page.locator(".scales").inner_text()
    assert page.locator("#window-plot svg").get_attribute("aria-label").startswith("Windows of ")
    assert "suit every layer" in page.locator("#scale-plot svg").get_attribute("aria-label")
    assert "times the loss scale" in page.locator("#range-key").inner_text()


@pytest.mark.parametrize("width", [1200, 390])
def test_both_charts_of_loss_scales_have_the_same_axis(page_of: Open, width: int) -> None:
    page = page_of(saved("gradients"))
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(300)
    axes = [
        page.locator(f"{chart} svg text", has_text=re.compile("^2[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+$")).evaluate_all(
            "texts => texts.map(t => [t.textContent, Math.round(t.getBoundingClientRect().x)])"
        )
        for chart in ("#scale-plot", "#window-plot")
    ]
    assert len(axes[0]) > 1
    assert axes[0] == axes[1]


def test_light_and_dark_at_a_click(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    assert page.locator("#theme").inner_text() == "Dark"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert page.locator("#theme").inner_text() == "Light"


def test_the_picture_can_be_saved(page_of: Open, tmp_path: Path) -> None:
    page = page_of(saved("overflow"))
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "var(" not in text
    assert all(name in text for name in ("blocks.1.wo", "max 65,504", "FAIL: examples/t5_feed_forward.py"))


def test_it_prints_its_findings(page_of: Open) -> None:
    page = page_of(saved("overflow"))
    page.emulate_media(media="print")
    assert page.locator("#finding-controls").is_hidden()
    assert page.locator(".finding.error .body").first.is_visible()
    assert len(page.pdf()) > 20_000


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_are_shown_and_not_obeyed(page_of: Open, name: str) -> None:
    report = named(saved_report(), name)
    page = page_of(Comparison((report, report)), csp=False)  # escaping alone must hold
    page.select_option("#rows", "sites")
    page.locator(".row-name").first.click()
    page.fill("#text", "no")
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img").count() == 0
    assert page.locator("h1").inner_text() == " ".join(escape_control(name).split())
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_script_that_got_in_would_not_run(page_of: Open, chromium: Any, tmp_path: Path) -> None:
    text = to_html(saved("overflow")).replace("</main>", "<script>window.pwned = 1</script></main>")
    (tmp_path / "x.html").write_text(text, encoding="utf-8")
    page = chromium.new_page()
    page.goto((tmp_path / "x.html").as_uri())
    assert page.evaluate("window.pwned") is None
    assert page.locator("#range-rows svg").count() > 0
    page.close()


def test_five_thousand_sites_without_lag(page_of: Open) -> None:
    page = page_of(many_sites(5000))
    started = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert started < 3000, "milliseconds until the page is ready"
    spent = page.evaluate(
        """() => {
          const start = performance.now();
          const rows = document.querySelector("#rows");
          rows.value = "sites";
          rows.dispatchEvent(new Event("input"));
          return performance.now() - start;
        }"""
    )
    assert spent < 1500, "milliseconds from layers to sites"
    assert page.locator("#row-count").inner_text() == "5000 rows"
    assert page.locator(".range-chunk svg").count() < 10  # only what can be seen is drawn
    page.locator(".row-name").first.focus()
    page.keyboard.press("End")
    assert page.locator("#detail h3").inner_text().endswith("#4999")
    page.locator(".range-chunk:last-child svg").wait_for(state="attached")


def test_a_report_with_nothing_in_it(page_of: Open) -> None:
    report = replace(saved_report(), findings=(), sites=(), outputs=(), verdict="pass")
    page = page_of(report)
    assert "No findings." in page.locator("main").inner_text()
    assert page.locator("#range").is_hidden()


def test_many_findings_open(page_of: Open) -> None:
    report = saved_report()
    first = report.findings[0]
    found = tuple(replace(first, site=SiteId(f"{first.site}#{i}")) for i in range(20_000))
    page = page_of(replace(report, findings=found))
    assert page.locator(".finding").count() == 1000
    assert "19,000 more findings" in page.locator("main").inner_text()


def barriers(page: Any) -> list[tuple[str, str]]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(v["id"], v["nodes"][0]["html"][:200]) for v in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [*PAGES, "bench"])
def test_no_barrier_that_axe_finds(page_of: Open, name: str, scheme: str) -> None:
    page = page_of(saved(name), scheme=scheme, csp=False)  # axe is a script of its own
    assert barriers(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", SECTIONS)
def test_a_page_made_of_sections(page_of: Open, kind: str, scheme: str) -> None:
    page = page_of(sample(kind), width=420, scheme=scheme, csp=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert page.locator("main section").count() > 1
    assert barriers(page) == []
    place = os.environ.get("AMPAUDIT_SCREENSHOTS")
    if place:
        page.screenshot(path=Path(place) / f"{kind}-{scheme}.png", full_page=True)


def test_names_on_a_page_made_of_sections_are_not_obeyed(page_of: Open) -> None:
    report = sample("lint")
    assert isinstance(report, LintReport)
    bad = replace(report.findings[0], file=HOSTILE[0], cause=HOSTILE[1], advice=HOSTILE[2], source=HOSTILE[0])
    page = page_of(replace(report, findings=(bad,)), csp=False)
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img").count() == 0
    assert HOSTILE[0] in page.locator("main").inner_text()


def test_without_scripts_the_findings_can_be_read(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text(to_html(saved("overflow")), encoding="utf-8")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "x.html").as_uri())
    assert "need JavaScript" in page.locator("noscript").inner_text()
    assert "436,400" in page.locator(".finding.error .body").first.inner_text()
    context.close()


def test_a_gradient_is_drawn_as_it_is_held(page_of: Open) -> None:
    """Peak and exponents of a report differ by the loss scale: 2^16 here."""
    report = saved_report("gradients")
    assert report.backward is not None
    assert report.backward.loss_scale == 65536
    page = page_of(report)
    page.select_option("#rows", "sites")  # a layer has the gradients of its weights, too
    normal = page.locator("#range-rows rect").first.bounding_box()["width"] / 30  # 2^-14 to 2^16
    lines = page.locator('#range-rows line[stroke="var(--gradient)"]')
    widths = [lines.nth(i).bounding_box()["width"] / normal for i in range(lines.count())]
    assert len(widths) >= 6
    assert all(0 < width < 15 for width in widths), widths


def test_a_gradient_at_fault_is_red_and_its_values_are_not(page_of: Open) -> None:
    report = saved_report("gradients")
    site = next(s for s in report.sites if s.gradient is not None and s.layer == "3" and s.forward)
    fault = replace(
        report.findings[0], code="AMP701", severity=Severity.ERROR, phase="backward", site=site.site
    )
    page = page_of(replace(report, findings=(fault,)))
    page.select_option("#rows", "sites")
    assert page.locator('#range-rows line[stroke="var(--broken)"]').count() == 1
    assert "error" in page.locator(f'.row-name[title^="{site.site}:"]').get_attribute("class")
    forward = replace(fault, code="AMP101", phase="forward")
    page = page_of(replace(report, findings=(forward,)))
    page.select_option("#rows", "sites")
    assert page.locator('#range-rows line[stroke="var(--broken)"]').count() == 2  # thin and thick


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_the_page_of_a_bench(page_of: Open, width: int, scheme: str) -> None:
    page = page_of(saved("bench"), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#memory-plot svg").get_attribute("aria-label").startswith("Peak memory: fp32")
    assert "bf16" in page.locator("#speed-plot svg").get_attribute("aria-label")
    assert texts(page, "thead th")[0] == "mode"
    place = os.environ.get("AMPAUDIT_SCREENSHOTS")
    if place:
        page.screenshot(path=Path(place) / f"bench-{scheme}-{width}.png", full_page=True)


def test_names_in_a_bench_are_not_obeyed(page_of: Open) -> None:
    report = saved("bench")
    assert isinstance(report, BenchReport)
    bad = replace(report, model=replace(report.model, source=HOSTILE[0]), device_name=HOSTILE[1])
    bad = replace(bad, rows=tuple(replace(row, note=HOSTILE[2], how=HOSTILE[0]) for row in bad.rows))
    page = page_of(bad, csp=False)
    assert page.evaluate("window.pwned") is None
    assert page.locator("h1").inner_text() == HOSTILE[0]
