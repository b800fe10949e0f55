"""Failures that people reported: found at the right layer, with the right cause; their twins are quiet."""

from __future__ import annotations

import pytest

from tests.support.models import CASES, COMBINATIONS, Case
from tests.support.models.score import audit, found_by, graver


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 30
    assert all(case.breaks and case.source for case in CASES.values())


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_reported_failure_is_found_and_its_twin_is_healthy(case: Case, combination: str) -> None:
    report = audit(case, True, combination)
    if combination in (*case.breaks, *case.wrong):
        assert found_by(case, report, combination), [(f.code, f.site) for f in report.findings]
    else:
        assert [f for f in report.findings if f.severity == "error"] == []
    assert graver(audit(case, False, combination)) == []
