"""Ops that are not one float32 call and one rounding in 16 bits, against torch's own kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
import yaml

from ampaudit.core.ops import having
from ampaudit.run.program import compile_program
from tests.support.native import Function, cast, emulated, native, ulps, verdict
from tests.support.planted import scan_under_autocast as scan

N = 3_000
ONES = torch.ones(N)
FIRST = torch.zeros(N, dtype=torch.long)
Case = tuple[Function, tuple[torch.Tensor, ...]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# each: the function, its inputs, and what float16 gives on every device
OVERFLOWING: dict[str, tuple[Function, tuple[torch.Tensor, ...], str]] = {
    "logsumexp": (lambda x: x.logsumexp(0), (torch.zeros(100_000),), "inf"),
    "soft_margin_loss": (F.soft_margin_loss, (ONES * 20, -ONES), "inf"),
    "mse_loss": (F.mse_loss, (ONES * 300, ONES * 0), "inf"),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=1e4), (ONES * 500, ONES * 0), "inf"),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=1e4), (ONES * 1500, ONES * 0), "inf"),
    "cross": (
        lambda x, y: torch.linalg.cross(x, y),
        (torch.tensor([300.0, 300, 300]), torch.tensor([300.0, 300, 301])),
        "nan",
    ),
    "matrix_exp": (torch.linalg.matrix_exp, (torch.eye(3) * 9,), "nan"),
    "cdist": (torch.cdist, (numbers(30, 4) * 100, numbers(30, 4) * 100), "inf"),
    "bilinear": (
        F.bilinear,
        (ONES.view(1, N) * 300, ONES.view(1, N)[:, :1] * 300, ONES.view(1, N, 1)),
        "inf",
    ),
    "einsum": (
        lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
        (torch.ones(2, 99) * 300, torch.ones(99, 9) * 300, torch.ones(9, 2) * 1e-4),
        "inf",
    ),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_an_overflow_inside_an_op_is_seen(name: str) -> None:
    """In FP32 all are finite; kernels hold what is between two inner ops in 16 bits."""
    function, args, expected = OVERFLOWING[name]
    low = cast(args, torch.float16)
    assert verdict(native(function, args)[0]) == "finite"
    assert verdict(native(function, low)[0]) == expected
    assert verdict(emulated(function, low).values[0]) == expected


ACCUMULATING: dict[str, Case] = {
    "addbmm": (lambda z, a: z.addbmm(a.view(-1, 1, 1), a.view(-1, 1, 1)), (torch.zeros(1, 1), ONES)),
    "index_add": (lambda z, o: z.index_add(0, FIRST, o), (torch.zeros(1), ONES)),
    "index_add_": (lambda z, o: (z * 1).index_add_(0, FIRST, o), (torch.zeros(1), ONES)),
    "index_put": (lambda z, o: z.index_put((FIRST,), o, accumulate=True), (torch.zeros(1), ONES)),
    "put_": (lambda z, o: (z * 1).put_(FIRST, o, accumulate=True), (torch.zeros(1), ONES)),
    "segment_reduce": (lambda o: torch.segment_reduce(o, "sum", lengths=torch.tensor([N])), (ONES,)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACCUMULATING)
def test_a_sum_stalls_where_each_addition_rounds(name: str, dtype: torch.dtype) -> None:
    function, args = ACCUMULATING[name]
    low = cast(args, dtype)
    expected = native(function, low)[0]
    assert expected.item() == (2048 if dtype is torch.float16 else 256)
    assert emulated(function, low, dtype=dtype).values[0].item() == expected.item()


SCATTERING: dict[str, Function] = {
    "scatter_add": lambda z, i, s: z.scatter_add(1, i, s),
    "scatter_add_": lambda z, i, s: (z * 1).scatter_add_(1, i, s),
    "scatter add": lambda z, i, s: z.scatter(1, i, s, reduce="add"),
    "scatter_reduce sum": lambda z, i, s: z.scatter_reduce(1, i, s, "sum"),
    "scatter_reduce mean": lambda z, i, s: z.scatter_reduce(1, i, s, "mean"),
    "scatter_reduce mean of others": lambda z, i, s: z.scatter_reduce(1, i, s, "mean", include_self=False),
}


@pytest.mark.parametrize("name", SCATTERING)
def test_scattered_additions_round_like_atomic_ones(name: str) -> None:
    """Against additions by hand, in order, in the tensor's own type, as atomic additions are."""
    into, source = numbers(3, 4).half(), numbers(3, 500).half() * 3
    index = torch.randint(0, 4, (3, 480), generator=torch.Generator().manual_seed(1))
    total, count = into.clone(), torch.ones_like(into)
    if "others" in name:
        total, count = torch.zeros_like(into), torch.zeros_like(into)
    for row in range(3):
        for place in range(480):
            at = int(index[row, place])
            total[row, at] += source[row, place]
            count[row, at] += 1
    expected = total / count if "mean" in name else total
    found = emulated(SCATTERING[name], (into, index, source)).values[0]
    assert torch.equal(found, expected.float())
    exact = SCATTERING[name](into.double(), index, source.double())
    assert not torch.equal(found.double(), exact)


def test_index_add_of_slices_rounds_like_atomic_additions() -> None:
    into, source = numbers(4, 3, 2).half(), numbers(4, 300, 2).half()
    index = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(1))
    expected = into.clone()
    for place in range(300):
        expected[:, index[place]] += source[:, place] * 3
    found = emulated(lambda z, s: z.index_add(1, index, s, alpha=3), (into, source)).values[0]
    assert torch.equal(found, expected.float())


def test_a_stalled_histogram_of_edges_is_named() -> None:
    """Degrees of a graph: 5,000 edges that end in one node are 2048 in float16."""

    class Degrees(torch.nn.Module):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            nodes = torch.zeros(5000, dtype=torch.long)
            return torch.zeros(4, dtype=weights.dtype).index_add(0, nodes, weights)

    report = scan(Degrees(), torch.ones(5000), policy="half")
    site = next(s for s in report.sites if s.op == "aten.index_add.default")
    assert site.forward is not None
    assert site.forward.peak == 5000
    assert site.forward.sqnr_db == pytest.approx(4.6, abs=0.1)  # 20 log10(5000 / (5000 - 2048))


@pytest.mark.parametrize("reduce", ["sum", "prod"])
def test_products_that_are_rounded_once_are_counted_as_not_covered(reduce: str) -> None:
    class Reduces(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(x[:2]).scatter_reduce(0, torch.zeros(8, dtype=torch.long), x, reduce)

    report = scan(Reduces(), torch.ones(8), policy="half")
    assert [f.code for f in report.findings] == (["AMP901"] if reduce == "prod" else [])


LIMITS: dict[str, Case] = {
    "nan_to_num": (torch.nan_to_num, (torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]),)),
    "nan_to_num_": (lambda x: torch.nan_to_num_(x * 1), (torch.tensor([torch.inf, -torch.inf, torch.nan]),)),
    "nextafter": (torch.nextafter, (torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]))),
    "div trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (ONES * 2047, ONES * 0.2)),
    "floor_divide": (torch.floor_divide, (ONES * 2047, ONES * 0.2)),
    "addr": (torch.addr, (torch.ones(3, 3), ONES[:3] * 300, ONES[:3] * 300)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LIMITS)
def test_what_depends_on_the_format_is_done_in_it(name: str, dtype: torch.dtype) -> None:
    function, args = LIMITS[name]
    low = cast(args, dtype)
    expected = native(function, low)[0].float()
    assert torch.equal(emulated(function, low, dtype=dtype).values[0], expected)


COMPOSITE: dict[str, Case] = {
    "logsumexp": (lambda x: x.logsumexp(-1), (numbers(5, 40) * 10,)),
    "soft_margin_loss": (F.soft_margin_loss, (numbers(99), numbers(99).sign())),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        (numbers(99) * 4, numbers(99).sigmoid()),
    ),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 3), (numbers(99).abs() + 4,)),
    "dist": (torch.dist, (numbers(99), numbers(99).flip(0))),
    "affine_grid": (lambda x: F.affine_grid(x, [2, 1, 5, 7], align_corners=False), (numbers(2, 2, 3),)),
    "ldexp": (torch.ldexp, (numbers(9), torch.arange(9))),
    "addbmm": (torch.addbmm, (numbers(4, 5), numbers(9, 4, 6), numbers(9, 6, 5))),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, (numbers(2, 3), numbers(2, 4), numbers(4, 3), numbers(4, 4))),
    "gru_cell": (torch.gru_cell, (numbers(2, 3), numbers(2, 4), numbers(12, 3), numbers(12, 4))),
    "lstm_cell": (
        lambda x, h, c, *weights: torch.lstm_cell(x, (h, c), *weights),
        (*(numbers(2, 3), numbers(2, 4), numbers(2, 4)), *(numbers(16, 3), numbers(16, 4))),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPOSITE)
def test_composite_ops_round_inside_like_native_ones(name: str, dtype: torch.dtype) -> None:
    """To half an ulp of the peak: the order of a float32 sum may differ; one rounding left out would show."""
    function, args = COMPOSITE[name]
    low = cast(args, dtype)
    found, expected = emulated(function, low, dtype=dtype).values[0], native(function, low)[0]
    assert ulps(found, expected, dtype) <= 0.5
    assert torch.equal(found, found.to(dtype).float())


def test_a_gate_that_overflows_inside_a_cell_is_found() -> None:
    """The product of the hidden state is 16-bit on every device, and zero times infinity is NaN."""
    args = (numbers(2, 3), numbers(2, 4) * 100, numbers(12, 3), numbers(12, 4) * 4e3)
    low = cast(args, torch.float16)
    assert all(tensor.isfinite().all() for tensor in low)
    expected = native(torch.gru_cell, low)[0]
    assert expected.isnan().any()
    found = emulated(torch.gru_cell, low, dtype=torch.float16).values[0]
    assert torch.equal(found.isnan(), expected.isnan())


def test_shared_kernels_are_those_that_torch_shares() -> None:
    """Torch's own table has one function for the CPU and CUDA: what rounds on one rounds on the other."""
    folder = os.path.dirname(torchgen.__file__)
    with open(os.path.join(folder, "packaged/ATen/native/native_functions.yaml"), encoding="utf-8") as file:
        functions: list[dict[str, Any]] = yaml.safe_load(file)
    kernels: dict[str, set[str]] = {}
    for function in functions:
        for keys, kernel in (function.get("dispatch") or {}).items():
            if {"CPU", "CUDA"} <= {key.strip() for key in keys.split(",")}:
                kernels.setdefault(function["func"].partition("(")[0].partition(".")[0], set()).add(kernel)
    assert {name.rstrip("_") for name in having("shared_function")} <= set(kernels)
    assert "logsumexp" not in kernels  # composite: any device


def test_one_rounding_is_left_as_it_was() -> None:
    """Composite names that end in one kernel keep the fast way."""
    for function in (
        torch.relu,
        F.gelu,
        torch.exp,
        lambda x: x.sum(-1),
        lambda x: x.repeat(2, 1),
        lambda x: x + 1,
    ):
        traced = emulated(function, (numbers(3, 4).half(),)).traced
        steps = compile_program(traced, torch.device("cpu")).steps
        assert not any(step.rounds_inside for step in steps), function


SCALARS: dict[str, Case] = {
    "x % 8": (lambda x: x % 8, (numbers(64) * 5,)),
    "x % 0.75": (lambda x: x % 0.75, (numbers(64) * 5,)),
    "8 % x": (lambda x: torch.remainder(8, x), (numbers(64) * 5,)),
    "fmod": (lambda x: torch.fmod(x, 8.0), (numbers(64) * 5,)),
    "x // 3": (lambda x: x // 3, (numbers(64) * 5,)),
    "3 - x": (lambda x: 3 - x, (numbers(64) * 5,)),
    "2 ** x": (lambda x: 2**x, (numbers(64) * 5,)),
    "x ** 3": (lambda x: x**3, (numbers(64) * 5,)),
    "where": (lambda x: torch.where(x > 0, x, 0.25), (numbers(64) * 5,)),
    "xlogy": (lambda x: torch.xlogy(x.abs(), 2.0), (numbers(64) * 5,)),
    "clamp": (lambda x: x.clamp(-1.25, 2.75), (numbers(64) * 5,)),
    "a single number": (lambda x: x.sum() % 8, (numbers(64) * 5,)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALARS)
def test_python_numbers_among_the_arguments(name: str, dtype: torch.dtype) -> None:
    """Kernels hand them on as tensors; one ulp of the peak, as products and powers go through other code."""
    function, args = SCALARS[name]
    low = cast(args, dtype)
    assert ulps(emulated(function, low, dtype=dtype).values[0], native(function, low)[0], dtype) <= 1.0
