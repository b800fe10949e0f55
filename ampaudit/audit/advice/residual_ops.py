"""States how each op's result scales when its operands are multiplied by powers of two.

A value has degree d if it becomes 2^(-k d) times as large when the stream does 2^-k times, bit for bit: ops
on scaled operands round alike, since a power of two changes no bit of a significand. ``None`` is the degree
of zeros, which scale with anything. Ops without a rule take values of degree 0 only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampaudit.audit.advice.residual_call import Degree, Needed, ScaledCall
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import argument_names, base_name, is_view, mutated_arguments

__all__ = ["ADDITIVE", "LINEAR", "NORMALIZING", "PRODUCTS", "degree_of"]

_NEAR_LIMIT = 0.9  # of the format's largest number, where a clamp only stands for its limit

# f(c x) = c f(x) for a power of two c; other operands choose, or are not read
LINEAR = frozenset(
    """
    neg relu leaky_relu abs sum mean cumsum roll flip repeat repeat_interleave tile index_select gather index
    amax amin dropout feature_dropout avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle
    pixel_unshuffle masked_select take_along_dim tril triu clone contiguous to _to_copy type_as
    constant_pad_nd lift_fresh_copy channel_shuffle embedding scaled_dot_product_attention std
    """.split()
)
_LIKE = frozenset("type_as view_as expand_as reshape_as to".split())  # another operand gives type or shape
_LINEAR_IN = {"embedding": "weight", "scaled_dot_product_attention": "value"}
# f(c x, c y) = c f(x, y); by name of the operands
_BOTH = ("self", "other", "tensors", "value", "source", "src", "values", "end")
ADDITIVE = frozenset(
    """
    add sub rsub cat concat stack hstack vstack maximum minimum where masked_fill index_put scatter copy
    slice_scatter select_scatter masked_scatter lerp
    """.split()
)
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mul", "matmul", "mm", "bmm", "mv", "_grouped_mm"), ("self", "other", "mat2", "vec")),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear", "convolution"), ("input", "weight")),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("input", "weight")),
    **dict.fromkeys(("addmm", "baddbmm"), ("mat1", "mat2", "batch1", "batch2")),
    "einsum": ("tensors",),
    "div": ("self",),
}
NORMALIZING = frozenset(
    """
    layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm instance_norm batch_norm
    """.split()
)
_INVARIANT = frozenset("sign argmax argmin argsort isnan isinf isfinite isposinf isneginf".split())
_COMPARING = frozenset("eq ne lt le gt ge".split())
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0}
_EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
_ORDERED = frozenset("topk sort max min median kthvalue".split())
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_FILLS = frozenset("full full_like scalar_tensor new_full".split())
_SHAPES = frozenset("ones_like empty_like rand_like randn_like new_ones new_empty".split())


def degree_of(call: ScaledCall) -> Degree:
    """Return the degree of an op's result.

    Raises:
        Needed: An operand has a degree that the op does not accept.
    """
    inputs = [call.degrees[node] for node in call.node.all_input_nodes]
    base = call.base
    filled = next(call.operands("fill_value", "s"), ("", 1))[1]
    if base in _ZEROS or (base in _FILLS and filled == 0):
        return None
    if not any(d is None or d for d in inputs) or base in _FILLS | _SHAPES:
        return 0
    if call.node.target is operator.getitem:
        source, place = call.node.args
        source_degree = call.degrees[source]  # type: ignore[index]
        return source_degree[place] if isinstance(source_degree, tuple) else source_degree  # type: ignore[index]
    rule = _RULES.get(base)
    op = overload_of(call.node.target)
    if rule is None and op is not None and is_view(op):
        rule = _linear
    if rule is None or op is None:
        call.only_zero()
        return 0
    degree = rule(call)
    for position in mutated_arguments(op):
        target = call.arguments.get(argument_names(op)[position])
        if isinstance(target, fx.Node) and call.degrees[target] != degree:
            raise Needed(target, 0, f"{call.name} writes other values into the stream")
    return degree


def _linear(call: ScaledCall) -> Degree:
    name = _LINEAR_IN.get(call.base) or next(iter(call.arguments))
    if call.base not in _LIKE:
        call.only_zero(name)
    if call.arguments.get("value") and call.base == "constant_pad_nd":
        raise Needed(call.node.all_input_nodes[0], 0, f"{call.name} pads the stream with a number")
    degree = call.of(name)
    result = call.node.meta.get("val")
    floats = not isinstance(result, torch.Tensor) or result.is_floating_point() or result.is_complex()
    if degree and (call.node.target is torch.ops.aten.view.dtype or not floats):
        if isinstance(result, torch.Tensor) and result.dtype is torch.bool:
            return 0  # what is zero stays zero
        raise Needed(call.node.all_input_nodes[0], 0, f"{call.name} makes integers, or bits, of the stream")
    return degree


def _additive(call: ScaledCall) -> Degree:
    names = [name for name in _BOTH if name in call.arguments]
    call.only_zero(*names)
    return call.equal(*names)


def _product(call: ScaledCall) -> Degree:
    names = PRODUCTS[call.base]
    extra = [name for name in ("bias", "self") if name not in names and call.arguments.get(name) is not None]
    divisor = ["other"] if call.base == "div" else []
    call.only_zero(*names, *extra, *divisor)
    factors = [call.plain(item) for _, item in call.operands(*names)]
    degree = None if None in factors else sum(d for d in factors if d is not None)
    if divisor and degree is not None:
        degree -= call.of("other") or 0
        if call.arguments.get("rounding_mode") is not None and degree:
            raise Needed(call.node.all_input_nodes[0], 0, f"{call.name} rounds the stream")
    for _, added in call.operands(*extra):
        bias_degree = call.plain(added)
        if bias_degree not in (None, degree):
            if degree is None or not isinstance(added, fx.Node):
                return bias_degree
            raise Needed(added, degree, f"{call.name} adds a bias that does not scale")
    return degree


def _norm(call: ScaledCall) -> Degree:
    """Cancel the scale: statistics scale with the input, and only weight and bias scale the result."""
    statistics = ("running_mean", "running_var")
    call.only_zero("input", "weight", "bias", *statistics)
    degree = call.of("input") or 0
    running = [call.arguments.get(name) for name in statistics]
    if degree and running[0] is not None:
        if call.arguments.get("training") or call.arguments.get("use_input_stats"):
            raise Needed(call.arguments["input"], 0, f"{call.name} keeps statistics of the stream")
        for value, needed in zip(running, (degree, 2 * degree), strict=True):
            if isinstance(value, fx.Node) and call.degrees[value] != needed:
                raise Needed(value, needed, f"{call.name} divides the stream by statistics that do not scale")
    if degree:
        call.numbers["eps"] = 2 * degree
    result = call.of("weight") or 0
    bias = call.arguments.get("bias")
    if isinstance(bias, fx.Node) and call.degrees[bias] not in (None, result):
        raise Needed(bias, result, f"{call.name} adds a bias that does not scale")
    if call.base == "native_layer_norm":
        return result, degree, -degree
    return (result, -degree) if call.base == "_fused_rms_norm" else result


def _power(call: ScaledCall) -> Degree:
    exponent = call.arguments.get("exponent", _POWERS.get(call.base))
    call.only_zero("self")
    degree = call.of("self")
    if degree is None:
        call.only_zero()
        return None if isinstance(exponent, int | float) and exponent > 0 else 0
    power = degree * exponent if isinstance(exponent, int | float) and exponent in _EXACT_POWERS else 0.5
    if power != int(power):
        raise Needed(call.arguments["self"], 0, f"{call.name} takes a power of the stream")
    return int(power)


def _invariant(call: ScaledCall) -> Degree:
    call.only_zero(next(iter(call.arguments)))
    return 0


def _comparison(call: ScaledCall) -> Degree:
    call.only_zero("self", "other")
    call.equal("self", "other")
    return 0


def _ordered(call: ScaledCall) -> Degree:
    if "other" in call.arguments:
        return _additive(call)
    call.only_zero("self")
    degree = call.of("self")
    several = isinstance(call.node.meta.get("val"), list | tuple)
    return (degree, 0) if several else degree


def _clamp(call: ScaledCall) -> Degree:
    """Ignore a limit at the format's range, which the values stay below, and scale any other limit."""
    degree, bounds = call.of("self"), ("min", "max")
    if not degree:
        call.only_zero()
        return 0
    for name, bound in call.operands(*bounds):
        least = _lower_bound(bound)
        if least is not None and least >= _NEAR_LIMIT * call.limit:
            call.clamps = True
        elif not isinstance(bound, fx.Node):
            if bound:
                call.numbers[name] = degree
        elif call.degrees[bound] not in (None, degree):
            raise Needed(call.arguments["self"], 0, f"{call.name} limits the stream")
    return degree


def _nan_to_num(call: ScaledCall) -> Degree:
    """Treat ``nan_to_num`` as the identity, which it is for finite numbers."""
    if any(call.arguments.get(name) not in (None, 0.0) for name in ("nan", "posinf", "neginf")):
        raise Needed(call.arguments["self"], 0, f"{call.name} replaces some of the stream by numbers")
    call.clamps = True
    return call.of("self")


def _lower_bound(bound: Any) -> float | None:
    """Return the smallest magnitude that a limit can have; ``None`` if unknown."""
    if isinstance(bound, int | float):
        return abs(float(bound))
    op = overload_of(bound.target)
    base, arguments = "" if op is None else base_name(op), bound.args
    if base == "where":
        bounds = [_lower_bound(item) for item in arguments[1:]]
        return None if None in bounds else min(least for least in bounds if least is not None)
    if base in ("scalar_tensor", "neg", "to", "_to_copy", "full"):
        return _lower_bound(arguments[1 if base == "full" else 0])
    return None


_RULES: dict[str, Callable[[ScaledCall], Degree]] = {
    **dict.fromkeys(LINEAR, _linear),
    **dict.fromkeys(ADDITIVE, _additive),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(NORMALIZING, _norm),
    **dict.fromkeys((*_POWERS, "pow"), _power),
    **dict.fromkeys(_INVARIANT, _invariant),
    **dict.fromkeys(_COMPARING, _comparison),
    **dict.fromkeys(_ORDERED, _ordered),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "clip"), _clamp),
    "nan_to_num": _nan_to_num,
}
