"""Unusual calls: an audit's two runs give what the eager FP32 and ``.half()`` models give."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import ampaudit
from ampaudit.trace.op_calls import functional_overload
from tests.support.eager import (
    EVERY_WAY,
    Outputs,
    agrees_with_eager,
    audited,
    model_of,
    numbers,
    whole_numbers,
)
from tests.support.wrap import Wrap


def _named(options: object) -> str:
    """Without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(options))


SIZES: dict[str, Callable[..., Any]] = {
    "rows of a mask, before": lambda m, x: m.a(x[x.sum(-1) > 0]),
    "rows of a mask, after": lambda m, x: (lambda y: y[y.sum(-1) > 0])(m.a(x)),
    "nonzero": lambda m, x: m.a(x)[(x.sum(-1) > 0).nonzero()[:, 0]],
    "masked_select": lambda m, x: m.a(x).masked_select(x > 0).abs().mean(),
    "unique": lambda m, x: torch.unique(m.a(x), return_inverse=True, return_counts=True),
    "repeats in a tensor": lambda m, x: m.a(x).repeat_interleave(x[:, 0].long().abs(), dim=0) * 2,
    "norm and softmax": lambda m, x: F.layer_norm(m.a(x)[x[:, 0] > -3], (8,)).softmax(-1),
    "products": lambda m, x: (lambda r: (r @ r.T).mean() + (r.T @ r).std())(m.a(x[x[:, 0] > -3]) / 8),
    "stored": lambda m, x: m.a(x).index_put((x[:, 0] > -3,), x.new_zeros(())),
}


def with_item(model: Any, x: torch.Tensor) -> torch.Tensor:
    count = (x[:, 0] > -3).sum().item()
    torch._check(count >= 0)
    torch._check(count <= 6)
    return model.a(x).sum() + torch.ones(count).sum() / (count + 1)


SIZES["a number out of a tensor"] = with_item


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_depend_on_data(name: str) -> None:
    report = agrees_with_eager(model_of(SIZES[name]), numbers(6, 8))
    assert report.coverage.uncovered_ops == ()
    assert name == "stored" or any(-1 in site.shape for site in report.sites) or "item" in str(report.sites)


@pytest.mark.parametrize("name", ["rows of a mask, before", "products", "a number out of a tensor"])
def test_every_kind_of_audit_takes_sizes_that_depend_on_data(name: str) -> None:
    for options in EVERY_WAY:
        report = ampaudit.scan(model_of(SIZES[name]), numbers(6, 8), **options)
        assert report.exit_code == 0, report.findings
        assert not [f for f in report.findings if f.code == "AMP990"]


class OfRows(nn.Module):
    """Takes the rows above 1; 1 + 2^-13 is 1 in float16, so that FP32 has two rows more."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        nn.init.eye_(self.a.weight)
        nn.init.ones_(self.b.weight)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        rows = y[y[:, 0] > 1.0]
        found = (y[:, 0] > 1.0).nonzero()[:, 0]
        probabilities = (self.b(rows) * self.factor * self.factor).softmax(-1)
        return (
            probabilities,
            probabilities.mean(0) * torch.ones(rows.shape[0], 8).mean(),
            y.index_select(0, found).cumsum(0),
            torch.cat([rows, rows]) @ rows.T,
        )


def uneven() -> torch.Tensor:
    x = torch.zeros(6, 8)
    x[:, 0] = torch.tensor([1 + 2**-13, 2, 3, 0.5, 1 + 2**-13, 0.1])
    return x


@pytest.mark.parametrize("factor", [1.0, 300.0], ids=["healthy", "overflows"])
def test_the_two_runs_may_make_different_sizes(factor: float) -> None:
    report, kept = audited(OfRows(factor).eval(), uneven())
    first = kept["output[0]"]
    assert (first[0].shape, first[1].shape) == ((4, 8), (2, 8))
    assert "aten.softmax.int" in report.coverage.uncovered_ops
    assert "aten.mul.Tensor" in report.coverage.uncovered_ops
    # what overflows cannot be compared; what it does to the first value that can is an error; where nothing
    # overflows, the rounding in front of the comparison is, since outputs have other shapes
    expected = "(top)/mean" if factor > 1 else "a/linear"
    assert [f.site for f in report.findings if f.severity == "error"] == [expected]


@pytest.mark.parametrize("options", EVERY_WAY, ids=_named)
def test_different_sizes_go_through_every_kind_of_audit(options: dict[str, Any]) -> None:
    report = ampaudit.scan(OfRows().eval(), uneven(), **options)
    assert not [f for f in report.findings if f.code == "AMP990"]
    if options.get("backward"):
        assert report.backward is not None
        assert any("its size depends on values" in note for note in report.backward.notes)


class Generates(nn.Module):
    """Noise from generators: one made here, one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = whole_numbers()
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor, given: torch.Generator | None = None) -> torch.Tensor:
        here = torch.Generator().manual_seed(3)
        noise = torch.rand(4, 8, generator=here) + torch.randn(4, 8, generator=self.own)
        if given is not None:
            noise = noise + torch.rand(4, 8, generator=given)
        return self.a(x) + noise + torch.randint(0, 3, (4, 8), generator=here)


def test_generators_draw_what_they_draw_in_the_model_and_stay_as_they_are() -> None:
    model = Generates().eval()
    before = model.own.get_state()
    agrees_before = copy.deepcopy(model)
    audited(model, numbers(4, 8))
    assert torch.equal(model.own.get_state(), before)
    agrees_with_eager(agrees_before, numbers(4, 8))
    kept: Outputs = {}
    given = torch.Generator().manual_seed(9)
    ampaudit.scan(
        model,
        {"x": numbers(4, 8), "given": given},
        session=ampaudit.Session(keep_outputs=lambda _, found: kept.update(found)),
    )
    with torch.no_grad():
        assert torch.equal(kept["output"][0], model(numbers(4, 8), given=given))


@pytest.mark.parametrize("options", EVERY_WAY, ids=_named)
def test_every_kind_of_audit_takes_generators(options: dict[str, Any]) -> None:
    report = ampaudit.scan(Generates().eval(), numbers(4, 8), **options)
    assert report.exit_code == 0
    assert not [f for f in report.findings if f.code == "AMP990"]


def test_attention_with_a_float_mask_and_grouped_heads() -> None:
    def attend(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], attn_mask=mask, enable_gqa=True)

    agrees_with_eager(model_of(attend), torch.randn(2, 4, 5, 8), torch.zeros(5, 5).fill_diagonal_(-2.0))
    for options in EVERY_WAY[:5]:
        given = (torch.randn(2, 4, 5, 8), torch.zeros(5, 5))
        assert ampaudit.scan(model_of(attend), given, **options).exit_code == 0


def into(op: Callable[..., Any], *shape: int) -> Callable[..., Any]:
    """An op that writes into memory that has nothing in it yet."""

    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.a(x)
        out = y.new_empty(shape)
        op(y, out)
        return out + 1

    return call


OUT: dict[str, Callable[..., Any]] = {
    "mul": into(lambda y, out: torch.mul(y, 2, out=out), 4, 8),
    "resized": into(lambda y, out: torch.mul(y, 2, out=out), 0),
    "mv": into(lambda y, out: torch.mv(y, y[0], out=out), 4),
    "matmul": into(lambda y, out: torch.matmul(y, y.T, out=out), 4, 4),
    "sum": into(lambda y, out: torch.sum(y, 1, out=out), 4),
    "cat": into(lambda y, out: torch.cat([y, y], out=out), 8, 8),
    "clamp": into(lambda y, out: torch.clamp(y, -1, 1, out=out), 4, 8),
    "norm": into(lambda y, out: torch.linalg.norm(y, dim=-1, out=out), 4),
    "normalize": into(lambda y, out: F.normalize(y, dim=-1, out=out), 4, 8),
    "zeros": into(lambda y, out: torch.zeros(4, 8, out=out), 4, 8),
    "view": into(lambda y, out: torch.add(y[:, :4], 1, out=out[:, :4]) + torch.neg(y, out=out)[:, :4], 4, 8),
    "two results": lambda m, x: torch.sort(
        m.a(x), -1, out=(torch.empty(4, 8, dtype=m.a(x).dtype), torch.empty(4, 8, dtype=torch.long))
    ),
    "into float32": lambda m, x: torch.mul(m.a(x), 3, out=torch.empty(4, 8)),
    "twice": lambda m, x: (lambda y, o: (torch.mul(y, 2, out=o) + torch.add(y, o, out=o), o))(
        m.a(x), torch.zeros(4, 8, dtype=m.a(x).dtype)
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_results_that_are_written_into_given_tensors(name: str) -> None:
    report = agrees_with_eager(model_of(OUT[name]), numbers(4, 8))
    assert report.findings == () or {f.code for f in report.findings} == {"AMP202"}


def test_what_torch_refuses_to_write_into_is_a_finding() -> None:
    def wrong(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mv(model.a(x), x[0], out=torch.empty(4))

    model = model_of(wrong)
    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        copy.deepcopy(model).half()(numbers(4, 8).half())
    (found,) = ampaudit.scan(model, numbers(4, 8), policy="half").findings
    assert found.code == "AMP307"
    assert str(raised.value) in found.cause


torch.library.define("ampaudit_tests::twice_into", "(Tensor x, *, Tensor(a!) out) -> ()")


@torch.library.impl("ampaudit_tests::twice_into", "CompositeExplicitAutograd")
def twice_into(x: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(x * 2 + 0.0001)


def test_a_custom_op_that_writes_into_a_keyword_argument() -> None:
    def call(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.a(x)
        out = torch.zeros_like(y)
        torch.ops.ampaudit_tests.twice_into(y, out=out)
        return out * 1

    agrees_with_eager(model_of(call), numbers(4, 8))


def test_memory_that_nobody_wrote_is_no_finding() -> None:
    """It holds anything, and another thing in each of two runs; torch can be told to fill it with NaN."""

    def call(model: Any, x: torch.Tensor) -> Any:
        y = model.a(x)
        made = [torch.empty_like(y), y.new_empty(4, 8), torch.empty(4, 8), torch.ones(2).resize_(4)]
        return y, *made

    torch.use_deterministic_algorithms(True)
    try:
        report, kept = audited(model_of(call), numbers(4, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.findings == ()
    assert [float(value.sum()) for _, value in list(kept.values())[1:]] == [0, 0, 0, 2]


def test_out_variants_have_another_overload_that_returns() -> None:
    aten = torch.ops.aten
    assert functional_overload(aten.mv.out) is aten.mv.default
    assert functional_overload(aten.add.out) is aten.add.Tensor
    assert functional_overload(aten.std.out) is aten.std.dim
    assert functional_overload(aten.zeros.out) is aten.zeros.default
    assert functional_overload(aten.add_.Tensor) is None
    assert functional_overload(aten.add.Tensor) is None


@pytest.mark.parametrize("kind", [torch.nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_in_training(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(nn.Linear(8, 8)).train()
    before = copy.deepcopy(model.state_dict())
    agrees_with_eager(copy.deepcopy(model), torch.randn(4, 8))
    for options in EVERY_WAY:
        assert ampaudit.scan(model, torch.randn(4, 8), **options).exit_code == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


UNBATCHED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(3, 4, 3, padding=1), (3, 9)),
    "conv2d": (nn.Conv2d(3, 6, 3, stride=2, groups=3), (3, 9, 9)),
    "conv3d": (nn.Conv3d(3, 4, 2, dilation=2), (3, 5, 5, 5)),
    "conv before conv": (nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 3)), (3, 9)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 5)),
    "pooled": (nn.Sequential(nn.Conv2d(3, 3, 1), nn.AvgPool2d(2), nn.MaxPool2d(2)), (3, 8, 8)),
    "linear": (nn.Linear(8, 3), (8,)),
    "weight of one dimension": (Wrap(lambda m, x: F.linear(x, m.a.bias), a=nn.Linear(8, 8)), (4, 8)),
    "one number": (Wrap(lambda m, x: F.linear(x, m.a.bias), a=nn.Linear(8, 8)), (8,)),
    "rnn": (nn.RNN(8, 4), (3, 8)),
    "lstm": (nn.LSTM(8, 4, 2, bidirectional=True), (3, 8)),
    "gru": (nn.GRU(8, 4), (3, 8)),
    "attention": (Wrap(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)), (5, 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16), (5, 8)),
    "scalar": (Wrap(lambda m, x: m.a.bias[0] * x, a=nn.Linear(8, 8)), ()),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_gradients_without_a_batch_dimension(name: str) -> None:
    module, shape = UNBATCHED[name]
    model = copy.deepcopy(module).eval()
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)

    def loss(output: Any) -> torch.Tensor:
        first = pytree.tree_leaves(output)[0]
        return (first.float() * torch.arange(1, first.numel() + 1).view(first.shape)).mean()

    for policy in ("half", "torch-cuda"):
        report = ampaudit.scan(model, x, policy=policy, backward=True, loss=loss, loss_scale=1.0)
        assert report.backward is not None
        found = {row.name: row.gradient for row in report.backward.parameters}
        loss(model(x)).backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None and key in found:
                assert found[key].peak == pytest.approx(float(parameter.grad.abs().max()), rel=0.02, abs=1e-3)
                assert found[key].sqnr_db is None or found[key].sqnr_db > 25 or found[key].cancelled
        assert set(found) == {k for k, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()


def test_a_conjugated_output_is_compared() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(m.a(x).float(), x.float()).conj()

    assert ampaudit.scan(model_of(forward), numbers(4, 8), policy="half").verdict == "pass"
