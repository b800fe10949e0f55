"""Which sites are named, and which are not: origins, poison, masks, repaired values."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ampaudit.audit.checks import Finding
from ampaudit.core.errors import ReferenceBroken
from ampaudit.render.terminal import to_text
from ampaudit.report.model import Report
from tests.support.planted import WIDTH, AdditiveMask, Branch, MaskedAttention, ResidualStream, TwoBranches
from tests.support.planted import scan_under_autocast as scan
from tests.support.wrap import Wrap

X = (8, WIDTH)


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == "error"]


def test_two_planted_overflows_are_both_found_in_one_pass() -> None:
    report = scan(TwoBranches(left=6e4, right=5e4).eval(), torch.randn(X) * 3)
    found = errors(report)
    assert [f.layer for f in found] == ["left.up", "right.up"]
    assert all(f.origin and f.code == "AMP101" and f.evidence.inf for f in found)
    assert all(f.source is not None and f.source.file.endswith("planted.py") for f in found)
    assert all(f.source is not None and "self.up(" in f.source.code for f in found)
    assert "left.settle/layer_norm" in found[0].poisons
    assert not any(site.startswith("right") for site in found[0].poisons)
    assert "head/linear" in found[0].poisons
    assert report.exit_code == 1


@pytest.mark.parametrize("gains", [(6e4, 1.0), (1.0, 6e4)])
def test_one_planted_overflow_blames_its_branch_only(gains: tuple[float, float]) -> None:
    found = errors(scan(TwoBranches(*gains).eval(), torch.randn(X) * 3))
    assert [f.layer for f in found] == ["left.up" if gains[0] > 1 else "right.up"]


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_healthy_twin_is_clean(policy: str, dtype: str) -> None:
    report = scan(TwoBranches().eval(), torch.randn(X), policy=policy, dtype=dtype)
    assert report.findings == ()
    assert report.exit_code == 0


def test_bfloat16_cures_the_overflow() -> None:
    assert not errors(scan(TwoBranches(left=6e4).eval(), torch.randn(X) * 3, dtype="bfloat16"))


def test_an_overflowing_residual_stream_is_blamed_on_its_first_block_only() -> None:
    model = ResidualStream().eval()
    report = scan(model, torch.randn(X), policy="half")
    found = errors(report)
    assert [f.site for f in found] == ["blocks.1/mul"]
    assert {"(top)/add#2", "(top)/add#3", "(top)/add#4"} <= set(found[0].poisons)


def test_two_origins_on_one_path_are_both_found() -> None:
    model = nn.Sequential(Branch(6e4), Branch(1.0), Branch(5e4)).eval()
    found = errors(scan(model, torch.randn(X) * 3))
    assert [f.layer for f in found] == ["0.up", "2.up"]


def test_an_independent_fault_in_an_add_is_found_beside_an_inherited_one() -> None:
    """Elements that overflow although neither operand did are the add's own fault."""

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                self.inner.weight.copy_(torch.eye(2))
            self.register_buffer("first", torch.tensor([2.0, 1.0]))
            self.register_buffer("second", torch.tensor([0.0, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) * self.first
            return y + y * self.second

    one = errors(scan(Add().eval(), torch.tensor([[40000.0, 1.0]]), policy="half"))
    assert [f.site for f in one] == ["(top)/mul"]
    both = errors(scan(Add().eval(), torch.tensor([[40000.0, 40000.0]]), policy="half"))
    assert [f.site for f in both] == ["(top)/mul", "(top)/add"]


def test_marks_follow_their_elements_through_views_relu_and_cat() -> None:
    """The second column is wrong by inheritance, the third by itself, also after being moved around."""

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            with torch.no_grad():
                self.inner.weight.copy_(torch.eye(4))
            self.register_buffer("first", torch.tensor([1.0, 4.0, 1.0, 1.0]))
            # in the flipped order: the third column is doubled
            self.register_buffer("second", torch.tensor([1.0, 2.0, 1.0, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) * self.first
            moved = torch.cat([torch.relu(y).flip(-1), y[:, :0]], dim=-1).clone()
            return moved * self.second

    inherited = errors(scan(Moved().eval(), torch.tensor([[1.0, 30000.0, 2.0, 1.0]]), policy="half"))
    assert [f.site for f in inherited] == ["(top)/mul"]
    both = errors(scan(Moved().eval(), torch.tensor([[1.0, 30000.0, 40000.0, 1.0]]), policy="half"))
    assert [f.site for f in both] == ["(top)/mul", "(top)/mul#2"]


def test_a_saturated_mask_is_a_note() -> None:
    report = scan(MaskedAttention().eval(), torch.randn(2, 8, WIDTH), policy="half")
    assert errors(report) == []
    assert {f.code for f in report.findings} <= {"AMP104", "AMP401"}


def test_a_mask_that_saturates_in_an_op_is_a_note_too() -> None:
    keep = torch.ones(4, 8)
    keep[:, 5:] = 0
    report = scan(AdditiveMask().eval(), (torch.randn(4, WIDTH), keep), policy="half")
    assert errors(report) == []
    assert any(f.code == "AMP104" for f in report.findings)


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_a_mask_merged_with_a_learned_bias_is_no_error(policy: str) -> None:
    """T5 writes its mask into the learned position bias, in FP32's range, before it is cast."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)
            self.bias = nn.Embedding(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(8)
            bias = torch.where(
                places[:, None] >= places, self.bias(places), torch.finfo(self.bias.weight.dtype).min
            )
            q = self.q(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias[None, None])

    report = scan(Biased().eval(), torch.randn(2, 8, WIDTH), policy=policy)
    assert [f for f in report.findings if f.severity != "note"] == []


def test_a_completely_masked_row_is_an_error() -> None:
    keep = torch.ones(4, 8)
    keep[2] = 0
    found = errors(scan(AdditiveMask().eval(), (torch.randn(4, WIDTH), keep), policy="half"))
    assert [f.site for f in found] == ["(top)/mul"]
    assert "(top)/softmax" in found[0].poisons
    assert found[0].code == "AMP113"


@pytest.mark.parametrize("inner", [nn.Identity(), nn.PReLU()])
def test_a_row_that_a_rounded_number_masks_is_cured_by_comparing_in_float32(inner: nn.Module) -> None:
    """Another fill would give a uniform row instead of NaN, which nobody notices."""
    model = Wrap(
        lambda m, x: torch.where(m.inner(x) > 0.9999, m.inner(x), -torch.inf).softmax(-1), inner=inner
    )
    (found,) = errors(scan(model, (torch.tensor([0.1, 0.2, 0.99999, 0.3]),), policy="half"))
    assert found.code == "AMP113"
    assert found.cause.startswith("0.9999 at (top)/gt is 1 in float16; -inf masks a whole row")
    assert found.advice.startswith("compute what (top)/gt compares in float32")


def test_an_op_behind_an_overflow_is_no_finding_of_its_own() -> None:
    """The reciprocal of 70,000 is 0 in float16, where 70,000 is infinite: the sum is to blame."""
    model = Wrap(lambda m, x: m.inner(x[:8]).sum() + 5e4 / x.sum(), inner=nn.Linear(8, 8))
    report = scan(model, (torch.ones(70_000),), policy="half")
    assert [f.code for f in report.findings if f.severity != "note"] == ["AMP105"]


def test_infinity_that_a_norm_hides_is_an_error() -> None:
    """x*x overflows, rsqrt(inf) is 0, and the output is finite zeros: wrong, and nobody notices."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    report = scan(Hidden().eval(), torch.randn(X) * 3000, policy="half")
    assert [f.site for f in errors(report)] == ["(top)/mul"]


def test_log_of_a_flushed_probability_is_a_domain_error() -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(torch.softmax(self.inner(x), dim=-1))

    report = scan(Logs().eval(), torch.randn(X) * 40, policy="half")
    found = errors(report)
    assert [f.code for f in found] == ["AMP203"]
    assert found[0].site == "(top)/log"
    assert found[0].kind == "underflow"


def test_a_weight_beyond_the_format_is_named() -> None:
    model = TwoBranches().eval()
    with torch.no_grad():
        model.left.down.weight[0, 0] = 1e5
    for policy in ("torch-cuda", "half"):
        found = errors(scan(model, torch.randn(X), policy=policy))
        assert [f.code for f in found] == ["AMP401"]
        assert f"1 of {model.left.down.weight.numel()} elements became inf" in found[0].cause
        assert "left.down.weight" in found[0].cause
        assert found[0].evidence.peak == pytest.approx(1e5)


def test_little_headroom_is_a_warning() -> None:
    model = TwoBranches().eval()
    with torch.no_grad():
        model.left.up.weight.zero_()
        model.left.up.weight[0, 0] = 20000.0
    x = torch.randn(X)
    assert [f.code for f in scan(model, x).findings] == ["AMP102"]
    assert scan(model, x, fail_on="warning").exit_code == 1
    assert scan(model, x, fail_on="error").exit_code == 0
    assert scan(model, x, min_headroom=0.0).findings == ()


def test_a_constant_out_of_range_that_reaches_values() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("shift", torch.full((WIDTH,), 1e6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) + self.shift) - self.shift

    found = errors(scan(Shifted().eval(), torch.randn(X), policy="half"))
    assert any(f.code == "AMP401" and "shift" in f.cause for f in found)


def test_forbidden_op_is_reported_and_the_rest_is_audited() -> None:
    class Probabilities(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            p = torch.sigmoid(self.inner(x))
            return nn.functional.binary_cross_entropy(p, torch.zeros_like(p))

    found = errors(scan(Probabilities().eval(), torch.randn(X)))
    assert [f.code for f in found] == ["AMP601"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_fp32_model_is_refused_with_its_first_site(value: float) -> None:
    model = TwoBranches().eval()
    with torch.no_grad():
        model.right.up.weight[0, 0] = value
    with pytest.raises(ReferenceBroken, match=r"right\.up/cast\(weight\).*planted\.py:\d+"):
        scan(model, torch.randn(X))


def test_ranges_names_what_would_leave_each_format() -> None:
    report = scan(TwoBranches(left=6e4).eval(), torch.randn(X) * 3, ranges=True)
    assert {f.site for f in report.findings} == {"left.up/linear"}
    site = next(s for s in report.sites if s.site == "left.up/linear")
    assert site.what_if is not None
    assert {n: w.overflows for n, w in site.what_if.items()} == {
        "float16": True,
        "bfloat16": False,
        "float8_e4m3fn": True,
        "float8_e5m2": True,
    }
    assert report.run.backend == "float32"


def test_ranges_leaves_masks_alone() -> None:
    report = scan(MaskedAttention().eval(), torch.randn(2, 8, WIDTH), ranges=True)
    assert report.findings == ()
    masks = [s for s in report.sites if s.what_if is not None and s.what_if["float16"].overflows]
    assert masks
    text = to_text(report)
    assert re.search(r"^float16 +0 +0 ", text, re.MULTILINE), text
    assert not any(site.site in text for site in masks)


def test_ranges_counts_what_would_vanish() -> None:
    values = torch.tensor([2.0**-26, 2.0**-25.5, 2.0**-24, 2.0**-20, 1.0, 0.0, 2.0**-12, 3.0])
    report = scan(
        nn.Sequential(nn.Identity(), nn.Tanh()).eval(), torch.atanh(values.clamp(max=0.9)), ranges=True
    )
    site = next(s for s in report.sites if s.site == "1/tanh")
    assert site.what_if is not None
    # of seven non-zero values, two are below half of float16's smallest number, 2^-25
    assert site.what_if["float16"].vanish == pytest.approx(2 / 7)
    assert site.what_if["bfloat16"].vanish == 0
    # e4m3: below 2^-10 (five of them); e5m2: below 2^-17 (four)
    assert site.what_if["float8_e4m3fn"].vanish == pytest.approx(5 / 7)
    assert site.what_if["float8_e5m2"].vanish == pytest.approx(4 / 7)


def test_batches_of_different_shapes_are_merged_by_site() -> None:
    model = TwoBranches(left=6e4).eval()
    quiet, loud = torch.randn(2, WIDTH) * 0, torch.randn(5, WIDTH) * 3
    report = scan(model, batches=[quiet, loud])
    assert report.run.batches == 2
    assert [f.site for f in errors(report)] == ["left.up/linear"]
    site = next(s for s in report.sites if s.site == "left.up/linear")
    assert site.forward is not None
    assert site.forward.elements == 7 * WIDTH
