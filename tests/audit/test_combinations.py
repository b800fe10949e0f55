"""Options that are combined give what each of them gives alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ampaudit import scan


class Norms(nn.Module):
    """Adds up squares, which overflow beyond a size of about 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 100
        return self.last(y.square().sum(-1, keepdim=True).sqrt())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Norms().eval()


X = torch.ones(4, 8) * 4


@pytest.mark.parametrize("contract", ["lower-accumulate", "decomposed"])
def test_roundings_of_a_contract_add_up_to_its_error(contract: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Softmax(-1), nn.Linear(64, 8)).eval()
    report = scan(model, torch.randn(32, 64), policy="half", contract=contract, sensitivity=True)
    ranking = report.sections["sensitivity"]
    assert ranking.measured_db == pytest.approx(report.outputs[0].sqnr_db, abs=1e-3)
    assert ranking.predicted_db == pytest.approx(ranking.measured_db, abs=1.0)


def test_proofs_do_not_depend_on_the_reference(model: nn.Module) -> None:
    proofs = scan(model, X / 10, policy="half", prove=True).proofs
    beside = scan(model, X / 10, policy="half", prove=True, against=copy.deepcopy(model))
    assert beside.proofs == proofs
    assert beside.against is not None


def test_a_contract_changes_the_same_beside_a_reference(model: nn.Module) -> None:
    alone = scan(model, X, policy="half", contract="saturate")
    beside = scan(model, X, policy="half", contract="saturate", against=copy.deepcopy(model))
    assert alone.changed
    assert beside.changed == alone.changed


def test_advice_beside_a_reference_is_judged_by_it(model: nn.Module) -> None:
    (alone,) = scan(model, X, policy="half", advise=True).active
    (beside,) = scan(model, X, policy="half", advise=True, against=copy.deepcopy(model)).active
    assert [trial.change for trial in beside.helpful] == [trial.change for trial in alone.helpful] != []
    other = copy.deepcopy(model)
    nn.init.constant_(other.last.weight, 3.0)
    wrong = scan(model, X, policy="half", advise=True, against=other)
    assert wrong.combined is not None
    assert wrong.combined.outcome == "fix"
    assert wrong.combined.left == ("AMP611 at last/linear",)


def test_a_sweep_advises_on_the_size_that_it_reports(model: nn.Module) -> None:
    def inputs(size: int) -> torch.Tensor:
        return torch.ones(4, 8) * size

    report = scan(model, inputs, policy="half", advise=True, sweep={"size": [1, 4, 8]})
    assert report.sweep is not None
    alone = scan(model, inputs(report.sweep.shown), policy="half", advise=True)
    trials = [[(trial.change, trial.outcome) for trial in r.active[0].tried] for r in (report, alone)]
    assert trials[0] == trials[1] != []
    assert report.combined == alone.combined is not None
