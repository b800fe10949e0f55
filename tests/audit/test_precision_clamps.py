"""Code that reads the precision and hides an overflow: the op that overflowed is named first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.views.verdict import verdict_words

Hide = Callable[[torch.Tensor], torch.Tensor]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 30


def clamped(h: torch.Tensor) -> torch.Tensor:
    if h.dtype == torch.float16:
        h = torch.clamp(h, min=-64504, max=64504)
    return h


def clamped_by_finfo(h: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(h.dtype).max - 1000 if h.dtype == torch.float16 else torch.finfo(h.dtype).max
    return h.clamp(-limit, limit)


def clamped_if_infinite(h: torch.Tensor) -> torch.Tensor:
    """As T5 of Transformers does."""
    if h.dtype == torch.float16:
        most = torch.finfo(h.dtype).max
        limit = torch.where(torch.isinf(h).any(), most - 1000, most)
        h = torch.clamp(h, min=-limit, max=limit)
    return h


def made_finite(h: torch.Tensor) -> torch.Tensor:
    return h.nan_to_num() if h.dtype is torch.float16 else h


def replaced(h: torch.Tensor) -> torch.Tensor:
    return torch.where(h.isinf(), torch.full_like(h, 6e4), h) if h.dtype == torch.half else h


def limited_twice(h: torch.Tensor) -> torch.Tensor:
    if h.dtype != torch.float32:
        h = h.clip(max=65504.0)
        h = h.clip(min=-65504.0)
    return h


class Stream(nn.Module):
    """A product that overflows, and code that hides it in float16."""

    def __init__(self, gain: float, hide: Hide) -> None:
        super().__init__()
        self.linear, self.gain, self.hide = nn.Linear(8, 8), gain, hide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hide(self.linear(x) * self.gain)


HIDE = (clamped, clamped_by_finfo, clamped_if_infinite, made_finite, replaced, limited_twice)


@pytest.mark.parametrize("hide", HIDE)
def test_the_op_that_overflowed_is_named_before_the_line_that_hides_it(hide: Hide) -> None:
    torch.manual_seed(0)
    model = Stream(3e4, hide).eval()
    with torch.no_grad():
        assert model.half()(X.half()).isfinite().all()
    report = scan(model.float(), X, policy="half", dtype="float16")
    first, *others = report.findings
    assert (first.code, first.site, first.severity) == ("AMP101", "(top)/mul", "error")
    assert {f.code for f in others} & {"AMP111", "AMP212"}
    word, sentence = verdict_words(report)
    assert word == "FAIL"
    assert sentence.startswith("1 place breaks in float16")


@pytest.mark.parametrize("hide", HIDE)
def test_within_the_range_it_is_no_error(hide: Hide) -> None:
    torch.manual_seed(0)
    report = scan(Stream(30.0, hide).eval(), X, policy="half", dtype="float16")
    assert report.verdict == "pass", report.findings
    assert not [f for f in report.findings if f.origin]


def test_an_accuracy_with_repairs_is_not_called_wrong() -> None:
    torch.manual_seed(0)
    model = Stream(3e4, lambda h: clamped(h - h.mean())).eval()  # NaN, which a clamp hands on
    _, sentence = verdict_words(scan(model, X, policy="half", dtype="float16"))
    assert "finite but wrong" not in sentence
    assert "even with FP32's values there, output has " in sentence
