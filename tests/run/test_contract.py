"""Other ways to compute: each against arithmetic written out, or against torch's own 16-bit ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampaudit import scan
from ampaudit.audit.checks import Finding
from ampaudit.core.errors import UsageError
from ampaudit.report.model import Report
from ampaudit.run import backends as contracts
from ampaudit.run.backends import CONTRACTS, ContractBackend, parse_contract
from tests.support.planted import WIDTH, TwoBranches

HALF = torch.float16


def rounding(value: torch.Tensor) -> torch.Tensor:
    return value.to(HALF).float()


def held(*shape: int, gain: float = 1.0) -> torch.Tensor:
    return rounding(torch.randn(*shape) * gain)


def graver(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity != "note"]


@pytest.mark.parametrize("inner", [1, 15, 16, 40, 100])
def test_products_add_up_in_16_bits(inner: int) -> None:
    a, b = held(3, inner), held(inner, 4)
    expected = torch.zeros(3, 4)
    for row in range(3):
        for column in range(4):
            total = torch.tensor(0.0)
            for start in range(0, inner, 16):
                part = rounding((a[row, start : start + 16] * b[start : start + 16, column]).sum())
                total = rounding(total + part)
            expected[row, column] = total
    torch.testing.assert_close(contracts._products(a, b, rounding), expected, rtol=2e-3, atol=2e-3)


def test_a_sum_stalls_as_it_does_in_16_bits() -> None:
    """2,048 + 1 is 2,048: a sum of ones in pieces of 16 ends at 32,768, where 16 is half a step."""
    ones = torch.ones(1, 100_000)
    assert contracts._total({"self": ones[:, :8000], "dim": [1]}, rounding).item() == 8000.0
    plain = torch.zeros(())
    for _ in range(65_536 // 16):
        plain = rounding(plain + 16)
    piece = contracts._total({"self": torch.ones(1, 16_384), "dim": [-1], "keepdim": True}, rounding)
    assert piece.item() == 16_384.0
    assert plain.item() == 32_768.0


@pytest.mark.parametrize("shift", [0.0, 30.0, 400.0])
def test_a_norm_in_parts_is_what_torch_computes_op_by_op_in_half(shift: float) -> None:
    x, weight, bias = held(4, 32) + shift, held(32), held(32)
    x = rounding(x)
    half = x.half()
    # means add up in float32; torch's CPU kernel rounds the sum before it divides
    centre = half - half.float().mean(-1, keepdim=True).half()
    variance = (centre * centre).float().mean(-1, keepdim=True).half()
    # and its rsqrt rounds the root before it inverts it
    inverse = torch.rsqrt((variance + 1e-5).float()).half()
    expected = centre * inverse * weight.half() + bias.half()
    named = {"input": x, "normalized_shape": [32], "weight": weight, "bias": bias}
    torch.testing.assert_close(contracts._norm(named, rounding), expected.float(), rtol=0, atol=0)


def test_softmax_in_parts_is_what_torch_computes_op_by_op_in_half() -> None:
    x = held(4, 32, gain=5.0)
    half = x.half()
    raised = torch.exp(half - half.amax(-1, keepdim=True))
    expected = raised / raised.sum(-1, keepdim=True)
    found = contracts._softmax({"self": x, "dim": -1}, rounding)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_in_pieces_is_near_the_whole(groups: int) -> None:
    x, weight, bias = held(2, 32, 6, 6), held(8, 32 // groups, 3, 3), held(8)
    named = {"input": x, "weight": weight, "bias": bias, "padding": [1, 1], "groups": groups}
    found = contracts._conv2d(named, rounding)
    if groups > 1:
        assert found is None
        return
    assert found is not None
    torch.testing.assert_close(found, F.conv2d(x, weight, bias, padding=1), rtol=1e-2, atol=0.2)


def test_the_ends_of_the_range() -> None:
    value = torch.tensor([1e6, -1e6, 1e-6, 6e-5, 1.0, torch.nan])
    saturating = ContractBackend(parse_contract("saturate")).represent(value, HALF)
    assert saturating[:2].tolist() == [65504.0, -65504.0]
    assert saturating[2] != 0
    assert saturating[5].isnan()
    flushing = ContractBackend(parse_contract("flush-to-zero")).represent(value, HALF)
    assert flushing[:2].isinf().all()
    assert flushing[2:5].tolist() == [0.0, 0.0, 1.0]
    usual = ContractBackend(parse_contract("")).represent(value, HALF)
    assert torch.equal(usual.isfinite(), value.half().isfinite())


def test_a_healthy_model_is_healthy_under_every_contract_with_wide_margins() -> None:
    model, x = TwoBranches().eval(), torch.randn(8, WIDTH)
    for word in CONTRACTS:
        report = scan(model, x, policy="half", contract=word)
        assert graver(report) == [], word
        assert report.changed == ()
        assert CONTRACTS[word] in report.run.contract


def test_only_the_contract_that_takes_norms_apart_breaks_this_norm() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x * 1000)

    x = torch.randn(4, WIDTH)
    assert graver(scan(Norm(), x, policy="half")) == []
    report = scan(Norm(), x, policy="half", contract="decomposed")
    assert ("norm/layer_norm", "no finding", "error AMP112") in [
        (c.site, c.usual, c.here) for c in report.changed
    ]
    assert report.verdict == "fail"


def test_an_overflow_is_judged_under_both() -> None:
    report = scan(TwoBranches(left=6e4).eval(), torch.randn(8, WIDTH) * 3, policy="half", contract="saturate")
    changes = {c.site: (c.usual, c.here) for c in report.changed}
    assert changes["left.up/linear"] == ("error AMP101", "error AMP116")
    assert report.codes_by_site["left.up/linear"] == ["AMP116"], "and no little headroom as well"


def test_a_long_sum_breaks_when_it_is_added_up_in_16_bits() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(-1)

    x = torch.rand(2, 8192) + 20.0
    assert graver(scan(Mean(), x, policy="half")) == []
    assert graver(scan(Mean(), x, policy="half", contract="lower-accumulate")) != []


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="saturated"):
        parse_contract("saturated")
