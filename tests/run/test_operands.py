"""Python numbers and 0-dimensional tensors beside 16-bit tensors are what the kernel makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from ampaudit.run.low_precision import call_in_low_precision
from tests.support.native import emulated
from tests.support.wrap import Wrap

aten = torch.ops.aten
DTYPES = [torch.float16, torch.bfloat16]
NUMBERS = [0.9999, 0.7, 0.3001, 1.0005, 2.7013, -0.1, 1e-10, 7]
Function = Callable[..., Any]

# whose kernels for CPUs convert the number as those for CUDA do
NATIVE: dict[str, Function] = {
    **{
        f"{name} of a tensor and a number": getattr(torch, name)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "pow", "remainder", "fmod", "copysign", "xlogy")
    },
    "a number in front": lambda x, c: c < x,
    "pow of a number": lambda x, c: torch.pow(abs(c), x),
    "remainder of a number": lambda x, c: torch.remainder(c, x),
    "hardshrink": lambda x, c: F.hardshrink(x, abs(c)),
    "isin": torch.isin,
    "where": lambda x, c: torch.where(x >= c, x, c),
    "masked_fill": lambda x, c: x.masked_fill(x > c, c),
    "clamp": lambda x, c: x.clamp(min=c),
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "full_like": lambda x, c: torch.full_like(x, c) > x,
    "a tensor without dimensions": lambda x, c: x >= torch.tensor(c),
    "leaky_relu": lambda x, c: F.leaky_relu(x, c),
    "elu": lambda x, c: F.elu(x - 1, abs(c)),
    "lerp": lambda x, c: torch.lerp(x, x + 1, c),
    "addcmul": lambda x, c: torch.addcmul(x, x, x, value=c),
    "softplus": lambda x, c: F.softplus(x, beta=abs(c)),
}


def audited(function: Function, x: torch.Tensor, dtype: torch.dtype, policy: str = "half") -> Any:
    """What a model that calls a function gives in the 16-bit half of an audit, one value or several."""
    values = emulated(function, (x,), dtype=dtype, policy=policy).values
    return values[0] if len(values) == 1 else values


def with_each_number(
    function: Function, x: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[float, torch.Tensor]]:
    """Each number, and what a model that calls a function with it gives; all in one trace."""
    values = audited(lambda t: tuple(function(t, number) for number in NUMBERS), x.float(), dtype)
    return zip(NUMBERS, values, strict=True)


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """The numbers as the dtype holds them, their neighbors, and others."""
    bits = torch.tensor(NUMBERS).to(dtype).view(torch.int16)
    around = [(bits + step).view(dtype).nan_to_num(0) for step in (-1, 0, 1)]
    return torch.cat([*around, torch.linspace(0.01, 3, 40).to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_a_number_is_what_the_native_kernel_makes_of_it(name: str, dtype: torch.dtype) -> None:
    x, function = values_of(dtype), NATIVE[name]
    for number, value in with_each_number(function, x, dtype):
        expected = function(x, number)
        if expected.dtype is torch.bool:
            assert torch.equal(value, expected), number
        else:
            assert_near(value, expected, dtype)


def assert_near(value: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(value, expected.float(), rtol=tolerance, atol=0, equal_nan=True)


# whose kernels for CUDA convert the number, and those for CPUs do not: the number that the format holds
CUDA: dict[str, Function] = {
    "softshrink": lambda x, c: F.softshrink(x, abs(c)),
    "threshold": lambda x, c: F.threshold(x, c, 5.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CUDA)
def test_a_number_is_what_the_format_holds(name: str, dtype: torch.dtype) -> None:
    x, function = values_of(dtype), CUDA[name]
    for number, value in with_each_number(function, x, dtype):
        held = float(torch.tensor(float(number)).to(dtype))
        assert_near(value, function(x.float(), held).to(dtype), dtype)


def test_the_eps_of_group_norm_is_zero_where_the_format_has_none() -> None:
    x = torch.full((1, 4, 3), 2.0)
    assert audited(lambda t: F.group_norm(t, 2, eps=1e-8), x, torch.float16).isnan().all()  # 0 * inf
    assert audited(lambda t: F.layer_norm(t, (3,), eps=1e-8), x, torch.float16).eq(0).all()


@pytest.mark.parametrize("function", [torch.mul, torch.add, torch.div, torch.maximum, torch.sub])
def test_a_tensor_without_dimensions_gives_way(function: Function) -> None:
    """As on CUDA, where it lies in the GPU's memory."""
    x, scale = torch.tensor([0.5, 1e-4]), torch.tensor(1e5)
    found = audited(lambda t: function(t.half(), scale), x, torch.float16, "as-is")
    assert torch.equal(found, function(x.half(), scale.half()).float())


def test_what_a_kernel_calls_is_treated_alike() -> None:
    x = torch.tensor([1.0]).half()
    assert not call_in_low_precision(aten.gt.Scalar, (x, 0.9999), {}).any()
    assert call_in_low_precision(aten.gt.Scalar, (x.float(), 0.9999), {}).all()


WITH_INTEGERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "divided": lambda x, n: n / x,
    "sub": lambda x, n: n - x,
    "maximum": torch.maximum,
    "where": lambda x, n: torch.where(x > 0, n, x),
    "lt": lambda x, n: (x * 5000 < n) * x,
    "atan2": lambda x, n: torch.atan2(n, x),
    "clamp": lambda x, n: torch.clamp(x * 5000, max=n),
    "in place": lambda x, n: x.clone().mul_(n),
    "inside": lambda x, n: torch.isclose(x * 5001, n * x) * x,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_integers_are_converted(name: str, dtype: torch.dtype) -> None:
    """A float16 kernel reads 5,001 as 5,000, and 70,000 as infinity."""
    function = WITH_INTEGERS[name]
    x = torch.linspace(-2, 3, 40).reshape(8, 5).to(dtype)
    for numbers in (torch.tensor([5001, 2049, 3, -4097, 259]), torch.tensor([70000, 1, 2, 3, 4])):
        value, expected = audited(lambda y, n=numbers: function(y, n), x, dtype), function(x, numbers)
        torch.testing.assert_close(value.to(dtype), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_an_integer_that_becomes_infinite_is_an_overflow() -> None:
    counts = torch.tensor([70000, 1, 2, 3])
    report = ampaudit.scan(
        Wrap(lambda m, x: x * counts, a=nn.Identity()), torch.rand(2, 4), policy="half", prove=True
    )
    assert [finding.op for finding in report.findings if finding.severity == "error"] == ["aten.mul.Tensor"]
