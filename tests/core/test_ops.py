"""The catalogue of ops agrees with torch: with its schemas and tags, and with what its ops compute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ampaudit.core import ops
from ampaudit.core.ops import having

POINTWISE = (
    *("compares", "exponential", "infinite_at_zero", "logarithm", "saturates", "sum_of_two", "wave"),
    *("whole_number", "extremum_of_two"),
)
UNTAGGED = ("floor_divide", "hardswish", "polar")  # although they are
WITH_NUMBERS = ("add", "sub", "rsub", "masked_fill", "where")
SAMPLES = 6  # of each op
SIGNS = torch.tensor([-1.0, 0.0, 1.0])
Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@cache
def aten() -> dict[str, list[Any]]:
    """Return the overloads of every op by base name."""
    found: dict[str, list[Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten":
            found.setdefault(base, []).append((base, overload or "default"))
    return found


def samples(trait: str) -> Iterator[Call]:
    """Yield calls of the ops of a trait on torch's own sample inputs."""
    for info in op_db:
        if info.aten_name in having(trait) and torch.float32 in info.dtypes:
            inputs = info.sample_inputs("cpu", torch.float32, requires_grad=False)
            for sample in islice(inputs, SAMPLES):
                yield info.aten_name, info.op, (sample.input, *sample.args), sample.kwargs
            if isinstance(inputs, Generator):
                inputs.close()  # or its collection, perhaps in a trace of a later test, fails


def floats(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def checked(trait: str, holds: Callable[[Call], bool], least: int) -> None:
    """Assert that something holds for all samples, of at least so many ops."""
    seen = set()
    for call in samples(trait):
        assert holds(call), f"{call[0]} on {call[2]}, {call[3]}"
        seen.add(call[0])
    assert len(seen) >= least, seen


def test_every_name_is_an_op_of_torch() -> None:
    named = {name for trait in ops._OPS for name in having(trait)}
    assert named - aten().keys() == set()


@pytest.mark.parametrize("trait", POINTWISE)
def test_ops_on_elements_have_the_tag(trait: str) -> None:
    for name in having(trait):
        overloads = [getattr(getattr(torch.ops.aten, name), overload) for _, overload in aten()[name]]
        kinds = [torch.Tag.pointwise in overload.tags for overload in overloads]
        assert any(kinds) or all(map(_is_composite, overloads)) or name in UNTAGGED, name


def _is_composite(overload: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def test_what_selects_returns_elements_of_its_inputs() -> None:
    def holds(call: Call) -> bool:
        _, op, args, kwargs = call
        given = torch.cat([torch.zeros(1), *(x.flatten() for x in floats((args, kwargs)))])
        return all(bool(torch.isin(x, given).all()) for x in floats(op(*args, **kwargs)))

    checked("selects", holds, 25)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_what_is_linear_scales_with_its_first_operand() -> None:
    def holds(call: Call) -> bool:
        name, op, args, kwargs = call
        if name in ("embedding", "scaled_dot_product_attention"):
            return True  # linear in another operand
        if name == "constant_pad_nd" and len(args) > 2:
            args = args[:2]  # without a number to pad with
        torch.manual_seed(0)
        results = floats(op(*args, **kwargs))
        torch.manual_seed(0)
        scaled = floats(op(_scaled(args[0]), *args[1:], **kwargs))
        pairs = zip(results, scaled, strict=True)
        return all(torch.equal(4 * x, y) or torch.allclose(4 * x, y, equal_nan=True) for x, y in pairs)

    checked("linear", holds, 30)


def test_what_is_additive_scales_with_all_operands() -> None:
    def holds(call: Call) -> bool:
        name, op, args, kwargs = call
        scalars = any(isinstance(x, int | float | complex) for x in args)
        if (
            name == "lerp"
            or "reduce" in kwargs
            or (scalars and name in ("add", "sub", "rsub", "masked_fill", "where"))
        ):
            return True  # a number or a weight that is not scaled, or a product
        results, scaled = (floats(op(*items, **kwargs)) for items in (args, _scaled(args)))
        return all(torch.equal(4 * x, y) for x, y in zip(results, scaled, strict=True))

    checked("additive", holds, 14)


def test_the_identity_returns_its_input() -> None:
    checked("identity", lambda call: torch.equal(call[1](*call[2], **call[3]), call[2][0]), 2)


@pytest.mark.parametrize("name", sorted(having("clamps", "saturates") - {"clamp", "clip"}))
def test_what_clamps_maps_large_values_to_one(name: str) -> None:
    op = getattr(torch.nn.functional, name, None) or getattr(torch, name)
    limits = {"clamp_max": (1.0,), "clamp_min": (1.0,)}.get(name, ())
    large = torch.tensor([1e30, 1e31] if name != "nan_to_num" else [torch.inf, torch.finfo().max])
    results = [op(sign * large, *limits) for sign in (1, -1)]
    assert any(torch.allclose(result[0], result[1]) for result in results)


def _scaled(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x * 4 if x.is_floating_point() else x, value)


@pytest.mark.parametrize(
    ("trait", "holds"),
    [
        ("compares", lambda x: x.dtype is torch.bool),
        ("whole_number", lambda x: bool((x == x.trunc())[x.isfinite()].all())),
        ("kind_of_number", lambda x: x.dtype is torch.bool or bool(torch.isin(x, SIGNS).all())),
    ],
)
def test_results(trait: str, holds: Callable[[torch.Tensor], bool]) -> None:
    for _, op, args, kwargs in samples(trait):
        if "decimals" in kwargs:  # another overload of round
            continue
        results = [x for x in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        assert all(map(holds, results))


@pytest.mark.parametrize("name", sorted(having("infinite_at_zero")))
def test_infinite_at_zero(name: str) -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    op = getattr(torch, name)
    binary = ("div", "floor_divide", "fmod", "remainder")
    result = op(one, zero) if name in binary else op(zero, -1.0) if name == "pow" else op(zero)
    assert not result.isfinite().any()


@pytest.mark.parametrize("name", sorted(having("extreme", "orders", "index_of_extreme")))
def test_the_order_decides_the_result(name: str) -> None:
    """A monotone function of the elements changes no index."""
    x = torch.randperm(24).reshape(4, 6).float()
    numbers = (3,) if name in ("kthvalue", "topk") else ()
    along = {} if name == "topk" else {"dim": 1}
    results = [getattr(torch, name)(y, *numbers, **along) for y in (x, x.exp() / 7)]
    first, second = ([r] if isinstance(r, torch.Tensor) else list(r) for r in results)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) if not one.is_floating_point() else torch.equal(one.exp() / 7, other)


@pytest.mark.parametrize("name", sorted(having("factors", "sum")))
def test_totals_overflow_although_no_term_does(name: str) -> None:
    terms = torch.full((1, 64), 60000.0, dtype=torch.float16)
    op = getattr(torch, name)
    total = op(terms, dim=1)
    assert bool(total.isinf().any()) == (name != "mean")


def test_no_kernel_is_missing_unnoticed() -> None:
    """Ops that torch's own tests run in no 16-bit format, on no device; the rest raise in the trace."""
    low = {torch.float16, torch.bfloat16}
    infos = [info for info in op_db if torch.float32 in info.dtypes]
    wide = {i.name for i in infos if not low & {*i.dtypes, *i.dtypesIfCUDA}} - {
        i.name for i in infos if low & {*i.dtypes, *i.dtypesIfCUDA}
    }
    names = {name.removeprefix("nn.functional.").replace(".", "_") for name in wide} & aten().keys()
    others = {name for name in names if not name.startswith(("linalg_", "fft_"))}
    assert others - having("no_16_bit_kernel") == {
        *("histogram", "histogramdd", "lu_unpack", "nanquantile", "quantile"),
        *("sparse_sampled_addmm", "stft"),
    }
