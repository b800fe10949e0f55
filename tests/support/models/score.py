"""Scans every case and its twin under every combination, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampaudit import scan
from ampaudit.audit.checks import Finding
from ampaudit.report.model import Report
from tests.support.models.case import CASES, COMBINATIONS, Case


@dataclass(slots=True)
class Score:
    """One combination: cases that break under it, those found, and alarms about healthy twins."""

    combination: str
    expected: int = 0
    found: int = 0
    scans: int = 0
    false_alarms: int = 0
    missed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


def audit(case: Case, bad: bool, combination: str) -> Report:
    """The scan of a case or of its twin."""
    policy, dtype = COMBINATIONS[combination]
    torch.manual_seed(11)
    model, inputs = case.build(bad)
    return scan(model.eval(), inputs, policy=policy, dtype=dtype)


def graver(report: Report) -> list[Finding]:
    """Errors and warnings."""
    return [f for f in report.findings if f.severity != "note"]


def found_by(case: Case, report: Report, combination: str) -> bool:
    """Whether the right layer is named with the right cause, and no other layer as an error.

    Where all is finite and the output is wrong, the layer is that in which the error enters.
    """
    if combination in case.wrong:
        return {f.code for f in report.findings if f.severity == "error"} == {"AMP207"}
    named = [f for f in report.findings if f.code in case.codes and f.layer == case.layer]
    return bool(named) and not any(f.severity == "error" and f.layer != case.layer for f in report.findings)


def score(verbose: bool = False) -> list[Score]:
    """All cases under all combinations."""
    scores = [Score(name) for name in COMBINATIONS]
    for case in CASES.values():
        for tally in scores:
            breaks = tally.combination in (*case.breaks, *case.wrong)
            report = audit(case, True, tally.combination)
            _count(tally, case, breaks, report)
            healthy = audit(case, False, tally.combination)
            tally.scans += 1
            alarms = graver(healthy)
            tally.false_alarms += bool(alarms)
            tally.alarms += [f"{case.name} (healthy): {f.code} {f.site}" for f in alarms]
            if verbose:
                for line in (*tally.missed, *tally.alarms):
                    print(tally.combination, line)
                tally.missed.clear()
                tally.alarms.clear()
    return scores


def _count(tally: Score, case: Case, breaks: bool, report: Report) -> None:
    if breaks:
        tally.expected += 1
        hit = found_by(case, report, tally.combination)
        tally.found += hit
        if not hit:
            seen = ", ".join(f"{f.code} {f.severity} {f.site}" for f in report.findings) or "nothing"
            tally.missed.append(f"{case.name}: wanted {case.codes} at {case.layer!r}, saw {seen}")
        return
    tally.scans += 1
    errors = [f for f in report.findings if f.severity == "error"]
    tally.false_alarms += bool(errors)
    tally.alarms += [f"{case.name} (does not break here): {f.code} {f.site}" for f in errors]


def table(scores: list[Score]) -> str:
    """The result for people."""
    lines = [f"{len(CASES)} failures", f"{'combination':12} {'recall':>10} {'false alarms':>16}"]
    for s in scores:
        share = f"{s.found}/{s.expected}"
        lines.append(f"{s.combination:12} {share:>10} {s.false_alarms:>8} of {s.scans:>3}")
    return "\n".join(lines)
