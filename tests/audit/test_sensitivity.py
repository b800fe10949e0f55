"""``scan --sensitivity``: the ranking adds up to the error, and asking for it changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from ampaudit.core.errors import CouldNotAudit, UsageError
from ampaudit.render.render import as_file
from tests.support.paths import ROOT
from tests.support.wrap import Wrap

ENCODER = ROOT / "examples" / "attention_scores.py"


@pytest.mark.parametrize(
    ("policy", "dtype"), [("ampaudit", "float16"), ("torch-cuda", "bfloat16"), ("half", "bfloat16")]
)
def test_the_rows_add_up_to_the_measured_error(policy: str, dtype: str) -> None:
    report = ampaudit.scan(ENCODER, policy=policy, dtype=dtype, sensitivity=True)
    found = report.sections["sensitivity"]
    assert found is not None
    assert found.predicted_db is not None
    assert found.measured_db == pytest.approx(report.outputs[0].sqnr_db, abs=1e-3)
    assert found.predicted_db == pytest.approx(found.measured_db, abs=1.0)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0, abs=1e-3)


def test_asking_for_it_changes_no_number() -> None:
    plain, ranked = (
        ampaudit.scan(ENCODER, policy="torch-cuda", sensitivity=asked) for asked in (False, True)
    )
    assert plain.sections == {}
    assert plain.outputs == ranked.outputs
    assert [(s.site, s.forward) for s in plain.sites] == [(s.site, s.forward) for s in ranked.sites]


class Cancels(nn.Module):
    """Subtracts two large values that are nearly alike: the rounding of their sums is all of the error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.first(x) + 500.0
        return self.last(large - 500.0)


def test_the_op_that_loses_the_digits_comes_first() -> None:
    report = ampaudit.scan(Cancels().eval(), torch.randn(64, 32), policy="half", sensitivity=True)
    worst = report.sections["sensitivity"].rows[0]
    assert (worst.kind, worst.name) == ("op", "(top)/add")
    assert worst.share > 0.9


def test_options_without_a_run_in_16_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="sensitivity"):
        ampaudit.scan(ENCODER, sensitivity=True, ranges=True)


def test_a_run_that_would_not_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least memory that its values need: FP32's, and their errors."""
    memory = type("Memory", (), {"total": 64 * 32 * 4 * 3})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    model, x = Cancels().eval(), torch.randn(64, 32)
    assert ampaudit.scan(model, x, policy="half").outputs
    with pytest.raises(CouldNotAudit, match="gradients of a whole run need"):
        ampaudit.scan(model, x, policy="half", sensitivity=True)


def test_several_policies_show_a_ranking_each() -> None:
    both = ampaudit.scan(ENCODER, policy=["half", "torch-cuda"], sensitivity=True)
    text = as_file(both, "text")
    for policy in ("half", "torch-cuda"):
        assert f"{policy}: Sources of error in the outputs" in text


@pytest.mark.parametrize(
    "step",
    [
        lambda y: torch.heaviside(y, torch.zeros(())),
        lambda y: torch.floor_divide(y, 0.25),
        lambda y: (y * 1.0).floor_divide_(0.25),
    ],
)
def test_whole_numbers_pass_no_error_on(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The inputs are so far from every step that no rounding crosses one: their derivative is 0."""
    x = torch.randint(-6, 6, (64, 8)) * 0.25 + 0.125
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    model = Wrap(lambda m, x: m.last(step(m.first(x)) + 0.1), first=first, last=last).eval()
    with torch.no_grad():
        first.weight.copy_(torch.eye(8) * 1.0001)
        first.bias.zero_()
    rows = ampaudit.scan(model, x, policy="half", sensitivity=True).sections["sensitivity"].rows
    names = [row.name for row in rows if row.share > 0]
    assert names
    assert set(names) <= {"(top)/add", "last/linear", "last.weight", "last.bias"}


def test_ignored_classes_beside_weights_of_classes() -> None:
    """Torch's own decomposition reads the weight of the class -100."""
    classes, weight = torch.tensor([1, 2, -100, 0]), torch.arange(1.0, 9)

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m.a(x), classes, weight=weight.to(x.dtype), label_smoothing=0.1)

    model = Wrap(forward, a=nn.Linear(8, 8)).eval()
    report = ampaudit.scan(model, torch.randn(4, 8), policy="half", sensitivity=True)
    assert report.exit_code == 0
