"""Suppression comments, used and unused."""

from __future__ import annotations

from tests.linter.examples import BAD, GOOD, codes, lint


def test_a_comment_hides_a_finding_and_says_why() -> None:
    text = BAD["AMP803"].replace(
        "optimizer.step()", "optimizer.step()  # ampaudit: ignore[AMP803] a hook unscales"
    )
    (finding,) = lint(text).findings
    assert finding.suppressed == "comment: a hook unscales"
    assert lint(text, fix=True).after == text
    everything = text.replace("[AMP803]", "[]")
    assert codes(everything) == []


def test_a_comment_that_hides_nothing_is_reported() -> None:
    text = GOOD["AMP803"].replace("scaler.update()", "scaler.update()  # ampaudit: ignore[AMP803]")
    assert codes(text) == ["AMP991"]
    of_a_scan = text.replace("AMP803", "AMP102")
    assert codes(of_a_scan) == []
