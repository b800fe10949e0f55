"""Decisions are those of the 16-bit run as it is, with its faults, and values that leave torch are FP32's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import TraceFailed
from ampaudit.render.render import as_file

X = torch.linspace(0.5, 1, 32).reshape(4, 8)


class Guarded(nn.Module):
    """Large values that tanh hides, but not before the code has looked at them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = x * 1e5
        if not torch.isfinite(big).all():
            raise ValueError("not finite")
        return torch.tanh(big)


class Leaving(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        array = (x * 2).numpy() * self.factor
        return torch.from_numpy(array).to(x.dtype) + x


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for _ in range(5):
            if x.sum() > 0:
                x = x + 1
            total = total + (x * 9e4) / 9e4
        return total


def test_an_overflow_that_changes_a_decision_is_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Guarded().half()(X.half())
    report = ampaudit.scan(Guarded(), X, policy="half")
    assert report.exit_code == 1
    (flip,) = [finding for finding in report.findings if finding.code == "AMP214"]
    assert flip.severity == "error"
    assert flip.source is not None
    assert "isfinite" in flip.source.code
    assert report.path is not None
    (line,) = report.path.lines
    assert (line.fp32, line.low, line.differing) == ("True", "False", 1)


def test_a_decision_that_only_rounding_flips_is_a_warning_and_a_gap() -> None:
    class Close(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 2048.5 else x / 2

    x = torch.tensor([2048.0, 1.0])
    report = ampaudit.scan(Close(), x, policy="half")
    assert report.exit_code == 0
    assert [gap.kind for gap in report.gaps] == ["other code"]
    assert ampaudit.scan(Close(), x, policy="half", fail_on="gap").exit_code == 1


def test_an_array_has_the_values_of_fp32_and_what_comes_back_has_16_bits() -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    report = ampaudit.scan(
        Leaving(1.5),
        X,
        policy="half",
        session=ampaudit.Session(keep_outputs=lambda _, found: kept.extend(found.values())),
    )
    assert report.exit_code == 0
    torch.testing.assert_close(kept[0][0], Leaving(1.5)(X), rtol=0, atol=0)
    made = [site.precision for site in report.sites if site.role != "select"]  # but for the constant itself
    assert set(made) == {"float16"}


def test_an_overflow_outside_torch_is_found_where_it_comes_back() -> None:
    report = ampaudit.scan(Leaving(1e5), X, policy="half")
    assert report.exit_code == 1
    assert any(f.origin and f.source is not None and "from_numpy" in f.source.code for f in report.findings)


def test_numpy_has_no_bfloat16() -> None:
    with pytest.raises(TypeError):
        Leaving(1.0).bfloat16()(X.bfloat16())
    with pytest.raises(TraceFailed, match="NumPy has no bfloat16"):
        ampaudit.scan(Leaving(1.0), X, policy="half", dtype="bfloat16")


def test_a_line_in_a_loop_is_one_finding() -> None:
    report = ampaudit.scan(Looping(), X, policy="half")
    found = [finding for finding in report.findings if finding.origin]
    assert len({(f.code, f.source and f.source.line) for f in found}) == len(found)
    assert any("more op" in finding.cause for finding in found)


def test_each_answer_of_a_line_is_counted_and_formats_name_the_path() -> None:
    report = ampaudit.scan(Looping(), batches=[X, -X], policy="half")
    assert report.path is not None
    (line,) = report.path.lines
    assert sorted(line.fp32.split(", ")) == ["False 5x", "True 5x"]
    for form in ("markdown", "html", "sarif", "junit", "json"):
        assert "path" in as_file(report, form)
