"""Every check has a page, and the page's own examples: it fires on the bad one and is silent on the good."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampaudit.audit import instruments as audit_instruments
from ampaudit.audit import scan as workflow
from ampaudit.audit.checks import ALL_CHECKS, Check, CheckContext, Finding
from ampaudit.audit.checks.causes import DOMAIN_CAUSES, OVERFLOW_CAUSES
from ampaudit.core.instruments import instruments, measuring
from ampaudit.core.source_config import SourceConfig
from ampaudit.findings.pages import Example, Page, all_pages
from ampaudit.findings.pages.page import LINTED
from ampaudit.report.model import Report
from ampaudit.report.training import TrainingReport
from ampaudit.source.open import open_source
from ampaudit.training.config import TrainConfig
from ampaudit.training.train import train
from tests.support.paths import ROOT

# the pages of lint have tests of their own: tests/linter/test_rules.py
PAGES = {code: page for code, page in all_pages().items() if not code.startswith(LINTED)}


def _crash(context: CheckContext) -> Iterator[Finding]:
    raise ValueError("on purpose\nand more")
    yield


def trained(path: Path, options: dict[str, str]) -> TrainingReport:
    """The training runs that a page's example asks for."""
    steps = int(options.pop("steps"))
    given = options.pop("loss_scale", None)
    scale = given if given is None or given[0].isalpha() else float(given)
    source = open_source(str(path), SourceConfig(batches=steps, train=True))
    settings = TrainConfig(steps=steps, policies=(options.pop("policy"),), loss_scale=scale)
    return train(source, config=settings)


def scanned(example: Example, place: Path, monkeypatch: pytest.MonkeyPatch) -> Report | TrainingReport:
    """The scan, or the training, that a page's example asks for."""
    path = place / "model.py"
    path.write_text(example.code, encoding="utf-8")
    options = dict(example.options)
    if options.pop("train", None):
        return trained(path, options)
    if options.pop("crash", None):
        monkeypatch.setattr(audit_instruments, "ALL_CHECKS", (Check("AMP101", _crash), *ALL_CHECKS))
    sizes = {"length": 64} if "sweep" in options else None
    against = options.pop("against", "").replace("model.py", str(path)) or None
    requested = {each.name: True for each in instruments() if options.pop(each.name, "") == "true"}
    return workflow.scan(
        open_source(str(path), SourceConfig(input_sizes=sizes, train=options.pop("mode", "") == "train")),
        policy=options.pop("policy", "half"),
        dtype=options.pop("dtype", "float16"),
        ranges=options.pop("ranges", "") == "true",
        contract=options.pop("contract", ""),
        steps=int(given) if (given := options.pop("steps", "")) else None,
        sweep=options.pop("sweep", ""),
        loss_scale=float(given) if (given := options.pop("loss_scale", "")) else None,
        against=against,
        **requested,
        **options,  # an unknown one is refused
    )


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.code)
def test_a_check_fires_on_its_bad_example(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = scanned(page.bad, tmp_path, monkeypatch)
    found = [f for f in report.findings if f.code == page.code]
    said = [(f.code, f.site, f.cause) for f in report.findings]
    assert found, (
        f"{page.code} must fire on the bad example of findings/pages/{page.code}.md; what fires: {said}"
    )
    assert found[0].severity == page.severity, found[0]
    assert found[0].kind == page.kind
    training = {f"AMP{n}" for n in range(711, 716)}  # one loop can have several of these at once
    others = [f for f in report.findings if f.severity == "error" and f.code != page.code]
    others = [f for f in others if {f.code, page.code} - training]
    assert not others or page.severity != "error", others


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.code)
def test_a_check_is_silent_on_its_good_example(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = scanned(page.good, tmp_path, monkeypatch)
    fired = [(f.site, f.cause) for f in report.findings if f.code == page.code]
    assert not fired, f"{page.code} fires on the good example of its page: {fired}"
    graver = [f for f in report.findings if f.severity != "note" and f.suppressed is None]
    assert not graver, f"narrow the check, or change the example: {[(f.code, f.cause) for f in graver]}"


def test_every_check_and_every_cause_has_a_page_and_no_page_is_left_over() -> None:
    of_instruments = (check for each in instruments() for check in measuring(each).checks)
    checks = [check.code for check in (*ALL_CHECKS, *of_instruments)]
    assert len(checks) == len(set(checks)), "two checks have the same code"
    causes = {cause.code for cause in (*OVERFLOW_CAUSES, *DOMAIN_CAUSES)}
    beside = {"AMP103", "AMP120", "AMP403", "AMP990", "AMP991"} | {f"AMP{n}" for n in range(711, 716)}
    codes = set(checks) | causes | beside
    without_page, without_check = sorted(codes - set(PAGES)), sorted(set(PAGES) - codes)
    assert not without_page, f"write a page in findings/pages/ for each of {without_page}"
    assert not without_check, f"add a Check to CHECKS in audit/checks/, or remove the page: {without_check}"


def test_a_check_that_raises_is_reported_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = PAGES["AMP106"].bad
    example = Example(bad.code, {**bad.options, "crash": "yes"})
    report = scanned(example, tmp_path, monkeypatch)
    codes = [f.code for f in report.findings]
    assert "AMP106" in codes
    assert "AMP990" in codes
    assert report.exit_code == 3
    crash = next(f for f in report.findings if f.code == "AMP990")
    assert "ValueError: on purpose" in crash.cause
    assert "and more" not in crash.cause


def test_files_have_the_names_of_their_codes() -> None:
    assert [code for code, page in all_pages().items() if page.code != code] == []


def test_the_readme_counts_them() -> None:
    counts = re.findall(r"(\d+) codes", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert counts == [str(len(all_pages()))], "write the number of pages in README.md"


def test_explain_prints_a_page_and_the_list(cli: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    page = cli("explain", "amp204")
    assert page.returncode == 0
    assert "log of a sigmoid" in page.stdout
    assert "F.logsigmoid" in page.stdout
    listed = cli("explain")
    assert all(code in listed.stdout for code in all_pages())
    wrong = cli("explain", "AMP205x")
    assert wrong.returncode == 2
    assert "did you mean 'AMP205'" in wrong.stderr
