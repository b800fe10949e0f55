"""``tune`` on unusual models: its policy, audited anew, has the accuracy that its search measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.audit.metric import within_drop
from ampaudit.core.errors import AuditError, UsageError
from ampaudit.report.tuning import TuningReport
from ampaudit.tuning.search import Accuracy, Choice
from ampaudit.tuning.trials import Trials

Runs = dict[Choice, Accuracy]


class Model(nn.Module):
    def __init__(self, function: Callable[..., object], size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


def test_each_step_is_announced() -> None:
    seen: list[tuple[str, int, int]] = []
    model = Model(lambda m, x: m.b(m.a(x).relu()))
    ampaudit.tune(
        model,
        torch.randn(4, 16),
        min_sqnr=60.0,
        session=ampaudit.Session(on_progress=lambda *step: seen.append(step)),
    )
    assert ("auditing the policy", 0, 0) in seen
    assert all(isinstance(text, str) and 0 <= done <= total for text, done, total in seen)


def tuned(
    function: Callable[..., object], inputs: torch.Tensor, target: float, runs: pytest.MonkeyPatch
) -> tuple[TuningReport, set[float]]:
    """Tune for an accuracy; return the report, and the accuracies in dB that runs of the search had."""
    found = set[float]()
    run = Trials.accuracy

    def noted(trials: Trials, choice: Choice) -> Accuracy:
        accuracy = run(trials, choice)
        found.add(round(accuracy.db, 2) if accuracy.db is not None else 999.0)
        return accuracy

    runs.setattr(Trials, "accuracy", noted)
    return ampaudit.tune(Model(function, inputs.shape[-1]).eval(), inputs, min_sqnr=target), found


def inverse(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return torch.linalg.inv(y @ y.transpose(1, 2) + torch.eye(6))


def test_an_op_without_a_kernel_takes_what_is_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    report, found = tuned(inverse, torch.randn(4, 6, 6), 75, monkeypatch)
    assert report.measured_db is not None
    assert round(report.measured_db, 2) in found


def test_an_op_without_a_kernel_is_in_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    report, _ = tuned(inverse, torch.randn(4, 6, 6), 75, monkeypatch)
    assert "linalg_inv_ex" in report.policy
    assert "reason: no-kernel" in report.policy
    assert report.reached


def in_place(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    y.add_(1.0)
    y[:, :4].mul_(2.0)
    y.clamp_(-3, 3)
    return m.b(torch.relu_(y))


@pytest.mark.parametrize("target", [72, 75])
def test_an_op_in_place_has_the_precision_of_what_it_writes_to(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    report, found = tuned(in_place, torch.randn(4, 16), target, monkeypatch)
    assert report.reached
    assert (999.0 if report.measured_db is None else round(report.measured_db, 2)) in found
    assert not any(op.site.endswith("_") for op in report.kept)


def written(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return m.b(torch.empty_like(y).copy_(y))


def test_errors_pass_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    report, _ = tuned(written, torch.randn(64, 16), 60, monkeypatch)
    assert "a/linear" in {noise.name for noise in report.noise}
    assert report.low_predicted_db == pytest.approx(report.low_db, abs=0.7)


def test_batch_norm_in_training_is_probed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).train()
    report = ampaudit.tune(model, torch.randn(64, 16), min_sqnr=60)
    assert {"0/linear", "2/linear"} <= {noise.name for noise in report.noise}
    assert report.low_predicted_db == pytest.approx(report.low_db, abs=1.0)
    (audited,) = (tried for tried in report.tried if tried.step == "final")
    assert audited.ops == 0
    assert audited.measured_db == pytest.approx(report.low_db, abs=0.01)


class Fourier(nn.Module):
    """Filters a signal; the transform is another op once its input is in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.filter = nn.Parameter(torch.rand(17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=32))
        return made


def test_an_op_that_appears_with_float32_inputs_is_kept_there() -> None:
    torch.manual_seed(1)
    report = ampaudit.tune(Fourier().eval(), torch.randn(64, 32), min_sqnr=75.0)
    assert report.reached
    assert "_fft_r2c" in report.policy
    assert any("_fft_r2c" in note for note in report.notes)


def test_a_weight_that_python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = tuned(
        lambda m, x: m.a(x) * m.b.bias.abs().max().item(), torch.randn(32, 16), 72.0, monkeypatch
    )
    assert report.reached
    assert report.kept


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(40, 16), kind(16, 24), nn.Linear(24, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(ids))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_takes_16_bits(kind: type[nn.RNNBase]) -> None:
    model, ids = Recurrent(kind).eval(), torch.arange(36).reshape(9, 4)
    report = ampaudit.tune(model, ids, min_sqnr=50.0)
    assert (report.reached, len(report.kept)) == (True, 0)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert report.bytes_after == weights * 2


class Many(nn.Module):
    """Eight outputs, of which each alone must have the accuracy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.body(x)
        return [head(x) for head in self.heads]


def test_each_of_many_outputs_is_predicted_by_itself() -> None:
    report = ampaudit.scan(Many().eval(), torch.randn(64, 16), policy="16-bit", sensitivity=True)
    ranking = report.sections["sensitivity"]
    assert ranking.predicted_db == pytest.approx(ranking.measured_db, abs=1.0)


def test_a_drop_of_exactly_what_is_allowed_is_allowed() -> None:
    assert 0.96 - 0.95 > 0.01
    assert within_drop(0.96, 0.95, 0.01)
    assert not within_drop(0.96, 0.9499, 0.01)
    assert not within_drop(math.nan, 0.95, 0.01)


def test_a_metric_that_is_no_number_in_float32_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "def get_model(): return torch.nn.Linear(4, 4).eval()\n"
        "def example_inputs(): return torch.ones(2, 4)\n"
        "def metric(output, batch): return float('nan')\n"
    )
    with pytest.raises(AuditError, match="NaN or infinite in FP32"):
        ampaudit.tune(path, metric_drop=0.1)


def test_a_goal_in_the_metric_is_reached_by_outputs_that_are_all_error(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "class Cancelling(torch.nn.Module):\n"
        "    def forward(self, x): return (x * 1e-2 + 1000.25) - 1000 - 0.25\n"
        "def get_model(): return Cancelling().eval()\n"
        "def example_inputs(): return torch.linspace(-1, 1, 64)\n"
        "def metric(output, batch): return 1.0\n"
    )
    x = torch.linspace(-1, 1, 64)
    exact, low = ((value * 1e-2 + 1000.25) - 1000 - 0.25 for value in (x, x.half()))
    assert (low - exact).norm() > exact.norm()
    report = ampaudit.tune(path, metric_drop=0.1)
    assert report.reached
    assert not report.kept
    assert report.measured_db is not None
    assert report.measured_db < 0
    assert report.code == ""


@pytest.mark.parametrize("option", [{"min_sqnr": -5.0}, {"metric_drop": -0.1}])
def test_a_goal_below_zero_is_refused_before_the_model_runs(option: dict[str, float]) -> None:
    class Unused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(UsageError, match=next(iter(option))):
        ampaudit.tune(Unused(), torch.ones(1), **option)
