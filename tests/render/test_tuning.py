"""Documents of ``tune``: their verdict, their picture, and numbers of any size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ampaudit.core.errors import UsageError
from ampaudit.render.blocks import Table
from ampaudit.render.html.page import to_html
from ampaudit.render.render import as_file, for_terminal, formats_of
from ampaudit.render.terminal import printable
from ampaudit.render.view import view_of
from ampaudit.report.bench import BenchReport
from ampaudit.report.documents import parse_document
from ampaudit.report.training import TrainingReport
from ampaudit.report.tuning import Noise, TuningReport
from ampaudit.views.training_plot import plot_bench, plot_training
from ampaudit.views.tuning_plot import frontier_figure, plot_tuning
from ampaudit.views.tuning_tables import format_accuracy, noise_section, tuning_tables
from tests.support.browser import Open
from tests.support.saved import sample, saved_report, text_of
from tests.support.tuned import SENSITIVITY, hostile, tuned, tuned_short

WHOLE = tuned()
LOW = "everything in 16 bits has 44.0 dB"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, f"has 52.1 dB (50 required); {LOW}; at least 5 must stay, by the error model"),
        ({"lower_bound": 6}, f"{LOW}; fewer do not suffice, by the error model"),
        (
            {"minimal": True},
            f"{LOW}; without any one that accuracy needs it falls short; at least 5 must stay,",
        ),
        ({"minimal": True, "kept": WHOLE.kept[:2]}, f"{LOW}; without any one of them it falls short; fewer"),
        (
            {"lower_bound": 1, "kept": tuple(replace(op, why="range") for op in WHOLE.kept[:1])},
            f"{LOW}; these ops stay for range, not accuracy",
        ),
        ({"weights": ()}, "float16 with 6 of 183 ops in float32 has 52.1 dB (50 required)"),
        ({"kept": ()}, "float16 with no op in float32 and 3 weights stored in float32 has 52.1 dB"),
        ({"kept": (), "weights": ()}, "float16 with no op in float32 has 52.1 dB (50 required)"),
        ({"low_db": None}, "everything in 16 bits is exact"),
        ({"low_db": None, "low_broken": True}, "everything in 16 bits has inf or NaN"),
        ({"measured_db": None}, "has outputs exactly as in FP32 (50 required)"),
        ({"measured_db": None, "broken": True}, "has inf or NaN (50 required)"),
        (
            {"target_db": None, "metric_drop": 0.01, "metric": (0.915, 0.911)},
            "has a metric of 0.911 (FP32 has 0.915; a drop of 0.01 is allowed) and 52.1 dB;",
        ),
        (
            {"target_db": None, "metric_drop": 0, "metric": (0.915, 0.915), "measured_db": None},
            "(FP32 has 0.915; a drop of 0 is allowed) and outputs exactly as in FP32;",
        ),
    ],
)
def test_the_verdict_says_what_was_reached_and_how_little_it_takes(changes: Any, said: str) -> None:
    report = replace(WHOLE, **changes)
    word, sentence = view_of(report).verdict()
    assert word == "PASS"
    assert said in sentence
    assert sentence in " ".join(as_file(report, "text").split())
    assert f"PASS</span> {sentence}" in to_html(report)


def test_what_is_not_reached_fails_and_names_no_bound() -> None:
    report = replace(tuned_short(), lower_bound=2)
    word, sentence = view_of(report).verdict()
    assert (word, report.exit_code) == ("FAIL", 1)
    assert "must stay" not in sentence
    assert "suffice" not in sentence
    assert report.headline.startswith("FAIL")


def test_stacked_layers_share_a_row_that_shows_the_worst_of_them() -> None:
    text = tables(WHOLE)
    (row,) = (line for line in text.splitlines() if line.startswith("layers.*/add"))
    assert row.split()[1:5] == ["4", "48.9", "dB", "49.0"]
    assert row.endswith("accuracy needs it")
    full = "\n".join(str(line) for line in lines_of(WHOLE, 1))
    assert all(f"layers.{i}/add" in full for i in range(4))


def tables(report: TuningReport) -> str:
    """The tables with stacked layers merged, as Markdown and pages have them."""
    from ampaudit.render.terminal import as_text

    sections = printable(tuning_tables(report, full=False, grouped=True))
    return as_text(lambda console: console.print(sections), 200)


def test_a_terminal_shows_ten_lines_and_the_rest_on_demand() -> None:
    brief, full = list(lines_of(WHOLE, 0)), "\n".join(lines_of(WHOLE, 1))
    assert len(brief) <= 10
    assert brief[-1].startswith("More")
    assert all(title in full for title in ("What stays", "Frontier", "Tried", "Sources of error"))


def lines_of(report: TuningReport, verbosity: int) -> Iterator[str]:
    from ampaudit.render.terminal import as_text

    yield from as_text(lambda console: console.print(for_terminal(report, verbosity)), 200).splitlines()


def test_a_prediction_that_does_not_hold_is_said() -> None:
    assert "trust measured numbers only" not in " ".join(tables(WHOLE).split())
    apart = replace(WHOLE, predicted_db=56.2)
    assert "The two differ by 4.1 dB" in tables(apart)


def test_a_long_frontier_keeps_its_ends_the_choice_and_what_was_measured() -> None:
    text = tables(WHOLE)
    table = text[text.index("ops in float32  of all") :].split("\n\n")[0].splitlines()[1:]
    assert len(table) == 10
    ops = [int(row.split()[0]) for row in table]
    assert {1, 3, 6, 120, 183} <= set(ops)
    assert ops == sorted(ops)
    assert [row.split()[0] for row in table if row.endswith("chosen")] == ["6"]


class Picture:
    def __init__(self, report: TuningReport) -> None:
        self.html = str(frontier_figure(report))
        self.svg = ElementTree.fromstring(re.search("<svg.*</svg>", self.html, re.S)[0])  # type: ignore[index]

    def circles(self, style: str) -> list[tuple[float, float]]:
        found = self.svg.findall(f".//circle[@class='{style}']")
        return [(float(c.attrib["cx"][:-1]), float(c.attrib["cy"])) for c in found]


def test_the_picture_places_each_point() -> None:
    picture = Picture(WHOLE)
    known = [point for point in WHOLE.frontier if point.predicted_db is not None]
    assert len(picture.circles("predicted")) == len(known)
    assert len(picture.circles("measured")) == sum(p.measured_db is not None for p in WHOLE.frontier)
    ((x, y),) = picture.circles("chosen")
    widest = max(point.share for point in known)
    assert x == pytest.approx(100 * (6 / 183) / widest, abs=0.01)
    # two accuracies whose heights are known fix the scale: the start, and what was asked for
    ((_, low),) = picture.circles("low")
    asked = float(picture.svg.findall(".//line[@class='asked']")[0].attrib["y1"])
    per_db = (low - asked) / (50 - 44)
    assert y == pytest.approx(asked - 2.1 * per_db, abs=0.2)
    texts = [text.text for text in picture.svg.iter("text")]
    assert {"50 dB required", "6 of 183 ops, 52.1 dB", "everything in 16 bits, 44.0 dB"} <= set(texts)


def test_the_line_passes_by_points_that_others_beat() -> None:
    beaten = replace(WHOLE.frontier[5], share=0.5, predicted_db=45.0)
    report = replace(WHOLE, frontier=(*WHOLE.frontier[:5], beaten, *WHOLE.frontier[5:]))
    picture = Picture(report)
    assert len(picture.circles("predicted")) == len(Picture(WHOLE).circles("predicted")) + 1
    lines = picture.svg.findall(".//line[@class='predicted']")
    heights = [float(line.attrib[name]) for line in lines for name in ("y1", "y2")]
    assert len(lines) > 10
    assert heights == sorted(heights, reverse=True)


def test_a_choice_that_breaks_has_no_place_in_the_picture() -> None:
    broken = replace(WHOLE.frontier[0], measured_db=None, broken=True)
    report = replace(WHOLE, frontier=(broken, *WHOLE.frontier[1:]))
    assert len(Picture(report).circles("predicted")) == len(Picture(WHOLE).circles("predicted")) - 1
    assert "44.3 dB predicted, inf or NaN measured" in to_html(report)


def test_a_search_by_metric_shows_the_metric_of_each_choice() -> None:
    tried = tuple(replace(row, metric=0.9 + i / 1000) for i, row in enumerate(WHOLE.tried))
    text = tables(replace(WHOLE, tried=tried, target_db=None, metric_drop=0.01))
    (row,) = (line for line in text.splitlines() if line.startswith("choose"))
    assert row.split()[-2:] == ["0.901", "no"]


def test_what_breaks_without_an_op_is_said() -> None:
    kept = (replace(WHOLE.kept[-1], measured_without_db=None, broken_without=True),)
    (row,) = (line for line in tables(replace(WHOLE, kept=kept)).splitlines() if "gate/topk" in line)
    assert "inf or NaN" in row


def test_every_point_leads_to_its_rule_file(page_of: Open) -> None:
    for width, scheme in ((390, "dark"), (1280, "light")):
        page = page_of(WHOLE, width=width, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        hidden = page.locator("#choice-5")
        assert not hidden.is_visible()
        page.locator("a[href='#choice-5']").first.click()
        hidden.wait_for(state="visible")
        assert hidden.inner_text().strip() == WHOLE.frontier[4].policy.strip()
        assert page.locator("#choice-3").is_visible(), "the choice is open from the start"
        boxes = page.locator(".frontier svg text").evaluate_all(
            "all => all.map((t) => [t.getBoundingClientRect().left, t.getBoundingClientRect().right])"
        )
        assert all(0 <= left < right <= width for left, right in boxes)


def test_labels_do_not_overlap() -> None:
    for target in (43.0, 44.0, 50.0, 52.0, 52.1, 53.0):
        for low in (52.0, 51.0, 44.0):
            picture = Picture(replace(WHOLE, target_db=target, low_db=low))
            heights = [
                float(text.attrib["y"])
                for text in picture.svg.iter("text")
                if str(text.text).startswith(("6 of", "everything"))
            ]
            assert len(heights) == 2
            assert abs(heights[0] - heights[1]) >= 12


def test_where_nothing_has_an_accuracy_there_is_no_picture(tmp_path: Path) -> None:
    points = tuple(replace(point, predicted_db=None, measured_db=None) for point in WHOLE.frontier)
    report = replace(WHOLE, frontier=points, low_db=None, measured_db=None)
    assert frontier_figure(report) == ""
    assert "<svg" not in to_html(report)
    with pytest.raises(UsageError, match="exact"):
        plot_tuning(report, tmp_path / "x.png")


@pytest.mark.parametrize(("suffix", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_picture_is_a_file(suffix: str, head: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"tuned.{suffix}"
    plot_tuning(WHOLE, path)
    assert path.read_bytes().startswith(head)
    plot_tuning(tuned_short(), path, force=True)


@pytest.mark.parametrize("kind", ["tuning", "bench", "training"])
def test_dollar_signs_in_names_make_no_formula(kind: str, tmp_path: Path) -> None:
    """Matplotlib parses a text between two of them, and raises where it is none."""
    pytest.importorskip("matplotlib")
    document, text = sample(kind), "$x_{$ \\frac{ <b>&\x1b"
    if isinstance(document, TrainingReport):
        variants = tuple(replace(variant, name=text) for variant in document.variants)
        plot_training(replace(document, optimizer=text, variants=variants), tmp_path / "x.svg")
    elif isinstance(document, BenchReport):
        named = replace(document, model=replace(document.model, source=text), device_name=text)
        rows = tuple(replace(row, mode=text) for row in document.rows)
        plot_bench(replace(named, rows=rows), tmp_path / "x.svg")
    else:
        plot_tuning(hostile(text), tmp_path / "x.svg")
    ElementTree.parse(tmp_path / "x.svg")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_none_breaks_no_format(value: float) -> None:
    point = replace(WHOLE.frontier[0], predicted_db=value, measured_db=value, share=value, cost=value)
    report = replace(
        WHOLE,
        **dict.fromkeys(("target_db", "low_db", "predicted_db", "measured_db", "low_predicted_db"), value),
        frontier=(point, *WHOLE.frontier[1:]),
        cost_kind="bytes",
    )
    for form in formats_of("tuning"):
        if form != "json":
            as_file(report, form)
    assert "nan" not in str(frontier_figure(report))
    assert "inf" not in str(frontier_figure(report)).replace("inf or NaN", "")


def test_empty_parts_leave_no_empty_table() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("kept", "weights", "noise", "frontier", "tried", "notes"), ())
    empty = replace(WHOLE, **nothing, seconds={}, policy="", rescale="")
    for form in formats_of("tuning"):
        assert as_file(empty, form).strip()
    text = tables(empty)
    for title in ("What stays", "Weights stored", "Frontier", "Tried", "What makes", "rescaled"):
        assert title not in text
    assert as_file(empty, "csv") == as_file(WHOLE, "csv").splitlines(keepends=True)[0]


def test_a_scan_ranks_roundings_and_older_reports_are_read() -> None:
    saved = json.loads(text_of("overflow"))
    assert saved.pop("sections") == {}
    old = saved_report()
    assert parse_document(json.dumps(saved), "r.json") == old
    assert "Sources of error" not in as_file(old, "text")
    site = next(site.site for site in old.sites if site.forward is not None)
    rows = (Noise(site, "op", 48.5, 0.25), *SENSITIVITY.rows)
    report = replace(old, sections={"sensitivity": replace(SENSITIVITY, rows=rows)})
    for form in ("text", "html", "markdown"):
        assert "Sources of error in the outputs" in as_file(report, form)
    assert parse_document(as_file(report, "json"), "r.json") == report
    (row,) = (row for row in view_of(report).rows() if row["site"] == site)
    assert (row["alone_db"], row["error_share"]) == (48.5, 0.25)


def test_a_long_ranking_says_what_the_rest_makes() -> None:
    rows = [Noise(f"layer_{i}/add", "op", 60.0, 0.002) for i in range(400)]
    short, full = (noise_section(rows, full=full) for full in (False, True))
    assert str(short.blocks[-1]) == "and 390 more, with 78.0%; -v shows more"
    assert str(full.blocks[-1]) == "and 200 more, with 40.0%; the JSON report has them"


def test_the_errors_of_stacked_layers_add_up() -> None:
    rows = [Noise(f"layers.{i}/add", "op", 60.0, 0.002) for i in range(100)]
    rows += [Noise(f"layers.{i}.weight", "weight", 50.0, 0.1) for i in range(2)]
    _, table = noise_section(rows).blocks
    assert isinstance(table, Table)
    assert [[str(cell) for cell in row[:5]] for row in table.rows] == [
        ["layers.*/add", "100", "", "40.0 dB", "20.0%"],
        ["layers.*.weight", "2", "(weight)", "47.0 dB", "20.0%"],
    ]


def test_what_fp32_itself_does_not_resolve_stretches_no_picture() -> None:
    beyond = replace(WHOLE.frontier[-1], predicted_db=274.3)
    picture = Picture(replace(WHOLE, frontier=(*WHOLE.frontier[:-1], beyond)))
    assert picture.html == Picture(WHOLE).html


def test_accuracy_in_words() -> None:
    assert format_accuracy(52.14) == "52.1 dB"
    assert format_accuracy(None) == "exact"
    assert format_accuracy(12.0, broken=True) == "inf or NaN"
    assert len(format_accuracy(1e308)) < 20
