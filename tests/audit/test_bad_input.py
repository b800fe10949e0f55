"""Odd and hostile models: correct, complete and safe output for every kind of scan."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import ampaudit
from ampaudit import scan
from ampaudit.ci.judge import measured_in
from ampaudit.core.errors import ReferenceBroken
from ampaudit.render.json import to_json
from ampaudit.render.render import for_terminal
from ampaudit.report.model import Report

WAYS: list[dict[str, Any]] = [
    {},
    {"prove": True},
    {"static": True},
    {"ranges": True},
    {"contract": "decomposed,saturate,flush-to-zero,lower-accumulate"},
    {"advise": True},
    {"stress": 6},
]


def text_of(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120, highlight=False).print(for_terminal(report, 1), crop=False)
    return stream.getvalue()


def every_way(model: nn.Module, inputs: Any, tmp_path: Any, **options: Any) -> list[Report]:
    """Each kind of scan, under both policies; every report can be printed and is JSON without NaN."""
    reports = []
    for way in WAYS:
        for policy in ("half", "torch-cuda", "ampaudit"):
            report = scan(model, inputs, policy=policy, stress_dir=str(tmp_path), **{**way, **options})
            json.loads(to_json(report), parse_constant=pytest.fail)
            assert text_of(report)
            assert report.exit_code in (0, 1), [f.cause for f in report.findings if f.code == "AMP990"]
            reports.append(report)
    return reports


class Integers(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * 2 + 1


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_model_without_floating_point(tmp_path: Any) -> None:
    for report in every_way(Integers(), torch.arange(6), tmp_path):
        assert report.verdict == "pass"
        assert report.coverage.sites == 0


def test_an_empty_model(tmp_path: Any) -> None:
    assert all(r.verdict == "pass" for r in every_way(Nothing(), torch.randn(2, 3), tmp_path))
    assert all(r.verdict == "pass" for r in every_way(nn.Sequential(), torch.randn(2, 3), tmp_path))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_tensors_without_elements(shape: tuple[int, ...], tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Softmax(-1)).eval()
    assert all(r.verdict == "pass" for r in every_way(model, torch.zeros(shape), tmp_path))


def test_a_model_whose_parameters_have_no_elements() -> None:
    assert scan(nn.Embedding(0, 4), torch.zeros(0, dtype=torch.long), policy="half").verdict == "pass"


def test_a_parameter_without_elements(tmp_path: Any) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 4))
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.inner(x), self.none])

    assert all(r.verdict == "pass" for r in every_way(Empty().eval(), torch.randn(2, 4), tmp_path))


def test_nan_in_a_weight_is_said_once_with_its_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(ReferenceBroken, match=r"1/"):
        scan(model, torch.randn(2, 4), policy="half")


def test_nan_in_a_weight_that_no_output_shows_does_not_stop_the_audit(tmp_path: Any) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(4, 4), nn.Linear(4, 4)
            with torch.no_grad():
                self.bad.weight.fill_(torch.nan)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.good(x) + torch.nan_to_num(self.bad(x))

    every_way(Unused().eval(), torch.randn(2, 4), tmp_path)


def test_complex_numbers_and_parameters_are_covered(tmp_path: Any) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x.float()) * self.phase, n=8).to(x.dtype)

    for report in every_way(Spectral().eval(), torch.randn(2, 8), tmp_path):
        assert report.coverage.uncovered_ops == ()


def test_a_layer_that_is_called_twice_has_two_sites(tmp_path: Any) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.same = self.layer
            nn.init.constant_(self.layer.weight, 60.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(self.layer(x))

    model = Shared().eval()
    report = scan(model, torch.ones(2, 8) * 3, policy="half")
    sites = [s.site for s in report.sites if "linear" in s.site]
    assert sites == ["layer/linear", "layer/linear#2"] or sites == ["layer/linear", "same/linear"]
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert found.site == sites[1]
    every_way(model, torch.ones(2, 8) * 3, tmp_path)


def test_nested_modules_with_tied_weights(tmp_path: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.body = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(ids)))

    for report in every_way(Tied().eval(), torch.randint(0, 16, (2, 4)), tmp_path):
        assert not [f for f in report.findings if f.code == "AMP404"]


NAMES = [
    "with space",
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "[bold]rich[/bold]",
    "naïve\u202eevil",
    "a\nb",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_and_never_obeyed(name: str, tmp_path: Any) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 8))
            nn.init.constant_(getattr(self, name).weight, 6e4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, name)(x)

    for report in every_way(Named().eval(), torch.ones(2, 8), tmp_path):
        shown = text_of(report)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        if (
            report.run.level == "scan"
            and report.run.policy == "half"
            and not report.run.contract.count("largest")
        ):
            assert [f.layer for f in report.findings if f.severity == "error"] == [name]
        if "rich" in name:
            assert "[bold]rich[/bold]" in shown


class Selects(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [torch.relu, lambda x: torch.cat([x, x]), lambda x: nn.functional.max_pool1d(x, 2), lambda x: x.T],
)
def test_an_infinite_input_that_ops_only_pass_on_breaks_the_output(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, x = Selects(function).eval(), torch.linspace(1e4, 1e5, 64).reshape(8, 8)
    assert model(x.half()).isinf().any()
    report = ampaudit.scan(model, x, policy="half")
    assert report.verdict == "fail"
    assert report.accuracy == "broken"
    assert measured_in(report).broken == ("output",)
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert "values of an input that float16 cannot hold" in finding.cause
    assert finding.advice == "scale the input down before the model reads it"
    assert "FAIL  output is infinite or NaN in float16 (1 error)" in str(report)
    with pytest.raises(ampaudit.UnsafeModel, match="min-sqnr at output"):
        ampaudit.assert_safe(model, x, policy="half", allow=finding.code, min_sqnr=20)
