"""Models that the general trace refuses are audited along the path that their inputs take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import ampaudit
from ampaudit.findings.finding import Finding
from ampaudit.report.model import Report
from tests.paths.cases import AUDITED, PLANTED, TWO_PATHS, batches_of, load, marked_lines
from tests.paths.flips import DECISIONS
from tests.paths.oracle import Line, follow
from tests.support.backward import Kept, audit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the models' own code
FLIPPED = "AMP214"
FAILS_IN_HALF = {("fastspeech_hifigan", "half")}  # an embedding of FP32 meets a convolution in 16 bits


def errors(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "error"]


def overflows(report: Report) -> list[Finding]:
    """Errors about values too large for the format, AMP301 where they are made of weights alone."""
    return [f for f in errors(report) if f.origin and (f.code.startswith("AMP1") or f.code == "AMP301")]


def line_of(finding: Finding) -> Line | None:
    return None if finding.source is None else (finding.source.file, finding.source.line)


@pytest.mark.parametrize(("name", "policy"), AUDITED)
def test_a_healthy_model_is_quiet_and_its_reference_is_its_own(name: str, policy: str) -> None:
    module = load(name)
    if (name, policy) in FAILS_IN_HALF:
        with pytest.raises(RuntimeError, match="should be the same"):
            follow(module.get_model().half(), batches_of(module)[0])
        with pytest.raises(ampaudit.AuditError, match="should be the same"):
            ampaudit.scan(module.get_model(), batches=batches_of(module), policy=policy)
        return
    kept: dict[int, list[Any]] = {}
    report = ampaudit.scan(
        module.get_model(),
        batches=batches_of(module),
        policy=policy,
        session=ampaudit.Session(
            keep_outputs=lambda number, found: kept.__setitem__(number, [pair[0] for pair in found.values()])
        ),
    )
    assert [(f.code, f.site, f.cause) for f in errors(report)] == []
    for found, batch in zip((kept[number] for number in sorted(kept)), batches_of(module), strict=True):
        output = follow(module.get_model(), batch).output
        expected = [value for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]
        assert len(found) == len(expected)
        for reference, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(reference, whole, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", PLANTED)
def test_an_overflow_is_found_at_its_line(name: str) -> None:
    module = load(name)
    trails = [follow(module.planted(), batch, torch.float16) for batch in batches_of(module)]
    expected = set[Line]().union(*(trail.overflows for trail in trails))
    assert expected
    assert marked_lines(module) in (set(), expected)  # none are marked in a library's code
    report = ampaudit.scan(module.planted(), batches=batches_of(module), policy="half")
    assert {line_of(finding) for finding in overflows(report)} == expected


@pytest.mark.parametrize("name", TWO_PATHS)
def test_each_path_has_its_own_findings(name: str) -> None:
    module = load(name)
    for batch in batches_of(module):
        expected = follow(module.planted(), batch, torch.float16).overflows
        report = ampaudit.scan(module.planted(), batches=[batch], policy="half")
        assert {line_of(finding) for finding in overflows(report)} == expected


def squared(output: Any) -> torch.Tensor:
    return sum((v.float().square().mean() for v in pytree.tree_leaves(output)), torch.zeros(()))


@pytest.mark.parametrize("name", ["routed_experts", "mask_writes", "token_pruning", "recursion"])
def test_gradients_along_a_path_are_autograds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, model, inputs = Kept(monkeypatch), load(name).get_model(), batches_of(load(name))[0]
    audit(model, inputs if isinstance(inputs, tuple) else (inputs,), loss=squared)
    squared(model(*(inputs if isinstance(inputs, tuple) else (inputs,)))).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert expected
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, gradient in expected.items():
        ours = kept.pairs[parameter][0] / 65536.0
        torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_that_flips_is_a_finding(name: str) -> None:
    decision = DECISIONS[name]
    inputs = decision.inputs(decision.flips)
    whole, low = (
        follow(decision.model(), inputs, dtype, line_by_line=True) for dtype in (None, torch.float16)
    )
    assert not whole.agrees(low)
    report = ampaudit.scan(decision.model(), inputs, policy="half")
    assert [line_of(f) for f in report.findings if f.code == FLIPPED] == [decision.line]


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_with_room_to_spare_is_none(name: str) -> None:
    decision = DECISIONS[name]
    inputs = decision.inputs(decision.holds)
    whole, low = (
        follow(decision.model(), inputs, dtype, line_by_line=True) for dtype in (None, torch.float16)
    )
    assert whole.agrees(low)
    report = ampaudit.scan(decision.model(), inputs, policy="half")
    assert [f for f in report.findings if f.code == FLIPPED or f.severity == "error"] == []
