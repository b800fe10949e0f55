"""Models that use ``torch.vmap``: the graph holds ops on whole tensors; both runs agree with eager."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import ampaudit
from tests.support.eager import EVERY_WAY, agrees_with_eager, audited, model_of, numbers
from tests.support.wrap import Scale


def _named(options: object) -> str:
    """Without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(options))


class Doubled(torch.autograd.Function):
    """A custom function that knows what to do inside vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def masked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A mask as transformers' ``masking_utils`` makes it: an index function, under three vmaps."""
    own = x[:, :, 0] > -3
    places = torch.arange(x.shape[1])

    def sees(batch: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ((key <= query) & own[batch, key]) | (key == query)

    with TransformGetItemToIndex():
        over = torch.vmap(torch.vmap(torch.vmap(sees, (None, None, 0)), (None, 0, None)), (0, None, None))
        mask = over(torch.arange(x.shape[0]), places, places)
    y = model.a(x) / 8
    return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)


def switched_off(model: Any, row: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (model.a.weight.float() @ row.float()[0]).exp2()


CASES: dict[str, Callable[..., Any]] = {
    "layers": lambda m, x: torch.vmap(lambda row: torch.softmax(m.a(row) / 8, -1).sum(-1))(x),
    "a weight inside and outside": lambda m, x: m.a(torch.vmap(lambda r: F.linear(r, m.a.weight) / 64)(x)),
    "a value from outside": lambda m, x: m.a(torch.vmap(lambda row: row + x.sum())(x) + x.sum()),
    "other dimensions": lambda m, x: torch.vmap(lambda c: m.a(c), in_dims=2, out_dims=1)(x.unsqueeze(2)),
    "two levels": lambda m, x: torch.vmap(torch.vmap(lambda row: m.a(row)))(x),
    "a mask of indices": masked,
    "a custom function": lambda m, x: torch.vmap(lambda row: Doubled.apply(m.a(row)))(x),
    "a custom function outside": lambda m, x: Scale.apply(torch.vmap(m.a)(x)),
    "a gradient": lambda m, x: torch.func.grad(lambda t: (m.a(t) * t).sum())(x),
}


@pytest.mark.parametrize("name", CASES)
def test_both_runs_agree_with_eager_models(name: str) -> None:
    report = agrees_with_eager(model_of(CASES[name]), numbers(2, 4, 8))
    assert report.findings == ()
    assert report.coverage.uncovered_ops == ()


@pytest.mark.parametrize("options", EVERY_WAY, ids=_named)
def test_every_kind_of_audit(options: dict[str, Any]) -> None:
    for name in ("layers", "a mask of indices"):
        report = ampaudit.scan(model_of(CASES[name]), numbers(2, 4, 8), **options)
        assert report.exit_code == 0, report.findings
        assert not [f for f in report.findings if f.code == "AMP990"]


def test_ops_inside_are_decided_by_the_policy() -> None:
    """Under real autocast a product inside vmap is in float16, and exp in float32."""

    def inner(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.exp(row @ model.a.weight / 64))(x)

    report = ampaudit.scan(model_of(inner), numbers(2, 4, 8), policy="torch-cuda")
    precisions = {site.op.split(".")[1]: site.precision for site in report.sites}
    assert next(p for op, p in precisions.items() if op in ("mm", "bmm", "matmul")) == "float16"
    assert precisions["exp"] == "float32"


def test_a_region_without_autocast_inside_is_the_authors() -> None:
    def inner(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: switched_off(model, row))(x / 8)

    report = ampaudit.scan(model_of(inner), numbers(2, 4, 8), policy="torch-cuda")
    assert {s.precision for s in report.sites} == {"float32"}
    assert report.coverage.author_sites > 0


def test_random_numbers_of_each_example() -> None:
    def inner(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: model.a(row) + torch.rand(8), randomness="different")(x)

    _, kept = audited(model_of(inner), numbers(3, 8))
    reference, value = kept["output"]
    noise = reference - nn.functional.linear(numbers(3, 8), *model_of(inner).a.parameters())
    assert noise.unique().numel() == 24
    torch.testing.assert_close(reference, value, rtol=2e-3, atol=1e-3)
