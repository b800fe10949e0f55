"""``--prove`` and ``--static`` as a user meets them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

from ampaudit import scan
from ampaudit.bounds import Interval
from ampaudit.bounds.interval import between
from ampaudit.bounds.transfers import TRANSFERS, OpCall, RegisteredTransfer
from ampaudit.cli.program import main
from ampaudit.core.errors import ProofBroken, UsageError
from ampaudit.render.render import for_terminal
from ampaudit.report.model import Report


class Wide(nn.Module):
    """Proved for inputs up to 10, not for those up to 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.inner.weight, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def shown(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120, highlight=False).print(for_terminal(report), crop=False)
    return stream.getvalue()


@pytest.mark.parametrize("way", ["prove", "static"])
@pytest.mark.parametrize(("reach", "proved"), [(10, True), (80, True), (83, False), (1000, False)])
def test_the_stated_range_decides(way: str, reach: int, proved: bool) -> None:
    """8 terms of 100 * 80 are 64,000; of 100 * 83, 66,400."""
    report = scan(Wide(), torch.ones(1, 8), policy="half", assume=[f"input={-reach}:{reach}"], **{way: True})  # type: ignore[arg-type]
    site = next(s for s in report.sites if s.site == "inner/linear")
    assert (site.verdict == "proved") is proved
    assert report.proofs is not None
    assert report.proofs.assumed[0].source == "stated"
    assert f"{report.proofs.proved} of {report.proofs.sites} sites" in shown(report)
    assert (site.forward is None) is (way == "static")


def test_an_overflow_is_no_proof_and_the_bound_stands_beside_the_peak() -> None:
    report = scan(Wide(), torch.full((1, 8), 100.0), policy="half", prove=True)
    site = next(s for s in report.sites if s.site == "inner/linear")
    assert site.verdict == "overflows"
    healthy = scan(Wide(), torch.full((1, 8), 10.0), policy="half", prove=True)
    assert "proved bound" in shown(healthy)
    (inner,) = [s for s in healthy.sites if s.site == "inner/linear"]
    assert inner.forward is not None
    assert inner.bound is not None
    assert inner.forward.peak == 8000.0 <= inner.bound < 8100.0


def test_static_finds_what_needs_no_run() -> None:
    model = Wide()
    with torch.no_grad():
        model.inner.weight[0, 0] = 1e6
    report = scan(model, torch.ones(1, 8), policy="half", static=True)
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP401"]
    noted = scan(Wide(), torch.ones(1, 8), policy="ampaudit", static=True)
    assert any("nothing was run" in note for note in noted.notes)


def test_the_command(model_file: Callable[[str], Path]) -> None:
    path = model_file(
        "class Model(nn.Module):\n    def forward(self, x):\n        return x * 100\n"
        "def example_inputs():\n    return torch.ones(2, 4)\n"
    )
    result = CliRunner().invoke(
        main, ["scan", str(path), "--policy", "half", "--static", "--assume", "input=-9:9"]
    )
    assert result.exit_code == 0, result.output
    assert "1 of 1 sites are proved safe" in result.output
    wrong = CliRunner().invoke(main, ["scan", str(path), "--assume", "y=0:1"])
    assert isinstance(wrong.exception, UsageError)
    both = CliRunner().invoke(main, ["scan", str(path), "--ranges", "--prove"])
    assert isinstance(both.exception, UsageError)


@pytest.fixture
def wrong_transfer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float, float], None]:
    """Make a transfer function claim a range, whatever its op is given."""

    def claim(op: str, low: float, high: float) -> None:
        name, _, overload = op.partition(".")
        target = getattr(getattr(torch.ops.aten, name), overload or "default")

        def claimed(call: OpCall) -> Interval:
            call.ignore(*call.arguments)
            return between(call.shape, low, high)

        monkeypatch.setitem(TRANSFERS, target, RegisteredTransfer(claimed))

    return claim


SOURCE = (
    "class Model(nn.Module):\n    def forward(self, x):\n        return torch.exp(x) - 1\n"
    "def example_inputs():\n    return torch.full((2, 4), 3.0)\n"
)


def test_a_bound_that_the_run_exceeds_is_an_internal_error(
    model_file: Callable[[str], Path], wrong_transfer: Callable[[str, float, float], None]
) -> None:
    wrong_transfer("exp", 0.0, 1.0)
    result = CliRunner().invoke(main, ["scan", str(model_file(SOURCE)), "--policy", "half", "--prove"])
    assert isinstance(result.exception, ProofBroken)
    assert result.exception.exit_code == 3
    text = str(result.exception)
    assert "internal error: (top)/exp is proved not to exceed 1" in text
    assert "the run computed a value of 20.09" in text
    assert "please report" in text
    assert "aten.exp.default" in text
    assert torch.__version__ in text


def test_inf_at_a_proved_site_is_an_internal_error(
    model_file: Callable[[str], Path], wrong_transfer: Callable[[str, float, float], None]
) -> None:
    wrong_transfer("exp", 0.0, 1e4)
    path = model_file(SOURCE.replace("3.0", "20.0"))
    result = CliRunner().invoke(main, ["scan", str(path), "--policy", "half", "--prove"])
    assert isinstance(result.exception, ProofBroken)
    assert "the run computed 8 values that are inf or NaN" in str(result.exception)


def test_an_overflow_that_nobody_proved_away_is_a_finding_as_before(
    model_file: Callable[[str], Path], wrong_transfer: Callable[[str, float, float], None]
) -> None:
    """Behind it, a proof says nothing: the 1 that follows inf may be any value."""
    wrong_transfer("sub.Tensor", 0.0, 1.0)
    path = model_file(SOURCE.replace("3.0", "20.0"))
    result = CliRunner().invoke(main, ["scan", str(path), "--policy", "half", "--prove"])
    assert result.exit_code == 1
    assert "AMP1" in result.output


def test_batches_beyond_the_stated_range_break_no_proof(
    wrong_transfer: Callable[[str, float, float], None],
) -> None:
    wrong_transfer("exp", 0.0, 1.1)
    model, batch = Exponential(), torch.full((2, 4), 3.0)
    scan(model, batch, policy="half", prove=True, assume=["input=-1:0"])
    with pytest.raises(ProofBroken):
        scan(model, batch, policy="half", prove=True, assume=["input=-1:3"])


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 100).sum(-1)


def test_a_weight_that_overflows_contradicts_no_proof() -> None:
    """The run repairs it, so that what reads it computes as in FP32."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    torch.nn.init.constant_(model[1].running_var, 1e6)
    report = scan(model, torch.randn(2, 3, 8, 8), policy="half", prove=True)
    assert [finding.code for finding in report.active] == ["AMP403"]


def test_a_site_is_proved_for_the_shapes_of_all_batches() -> None:
    """300 times 100 * 2 is 60,000; 400 times is 80,000, although the values themselves are the same."""
    short, long = torch.full((1, 300), 2.0), torch.full((1, 400), 1.0)
    for batches, proved in (([short], True), ([short, long], False), ([long, short], False)):
        report = scan(Total(), batches=batches, policy="half", prove=True, assume=["input=0:2"])
        (site,) = [s for s in report.sites if s.site.endswith("/sum")]
        assert (site.verdict == "proved") is proved
        assert report.verdict == "pass"
        static = scan(Total(), batches=batches, policy="half", static=True, assume=["input=0:2"])
        (site,) = [s for s in static.sites if s.site.endswith("/sum")]
        assert (site.verdict == "proved") is proved


LABELLED = """
import torch
from torch import nn


def get_model():
    return nn.Linear(8, 8)


def batches():
    yield torch.ones(1, 8), torch.zeros(1, 8)


def model_inputs(batch):
    return batch[0]


def loss(output, batch):
    return (output - batch[1]).square().mean()
"""


def test_inputs_have_the_same_names_with_gradients(model_file: Callable[[str], Path]) -> None:
    """What a loss reads besides the model's inputs is an input as well, with a name of its own."""
    path = model_file(LABELLED)
    stated = ["input[0]=-2:2"]
    reports = [
        scan(path, policy="half", prove=True, assume=stated, backward=backward) for backward in (False, True)
    ]
    names = [[each.name for each in report.proofs.assumed] for report in reports if report.proofs]
    assert names == [["input[0]"], ["input[0]", "batch of the loss[1]"]]
    assert len({next(s.bound for s in r.sites if s.site == "(top)/linear") for r in reports}) == 1
