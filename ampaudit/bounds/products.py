"""Transfer functions of matrix products, convolutions and attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ampaudit.bounds.elementwise import product as times
from ampaudit.bounds.interval import Interval, finite, symmetric, unbounded
from ampaudit.bounds.stored import rounding
from ampaudit.bounds.transfers import VANISHING, KnownTensor, OpCall, summation_error, transfer
from ampaudit.core.formats import FLOAT32

__all__: list[str] = []


@transfer("linear")
def linear(call: OpCall) -> Interval:
    """|w.x + b| <= |w| |x| + |b| by Cauchy and Schwarz; or, end by end, W c +- |W| r.

    The row's norm is at most |W|_F |x| + |b|. Of the two bounds the second is sought where the first is not
    known from a norm, or does not suffice.
    """
    x, weight, bias = call.interval("input"), call.weight("weight"), _bias(call, "bias")
    if weight is None or bias is None or weight.tensor.ndim != 2 or not x.shape:
        return unbounded(call.shape)
    return _affine_rows(call, x, weight, bias)


@transfer("addmm")
def addmm(call: OpCall) -> Interval:
    """Like linear, with the weight transposed."""
    x, weight, bias = call.interval("mat1"), call.weight("mat2"), call.weight("self")
    plain = call.number("beta") == 1 and call.number("alpha") == 1
    if weight is None or bias is None or bias.tensor.ndim != 1 or not plain:
        return unbounded(call.shape)
    return _affine_rows(call, x, replace(weight, tensor=weight.tensor.t()), bias)


_NO_BIAS = KnownTensor(torch.zeros(()))


def _bias(call: OpCall, name: str) -> KnownTensor | None:
    return call.weight(name) if call.has(name) else _NO_BIAS


def _affine_rows(call: OpCall, x: Interval, weight: KnownTensor, bias: KnownTensor) -> Interval:
    rows_of, size = weight.tensor, weight.tensor.shape[1]
    rows = torch.linalg.vector_norm(rows_of, dim=1).double()
    rows = rows * (1 + summation_error(size) + weight.relative) + (weight.absolute + VANISHING) * math.sqrt(
        size
    )
    shift = bias.tensor.double()
    edge = shift.abs() * bias.relative + bias.absolute
    norm = x.norm(-1)
    reach = times(rows, norm)
    result = Interval(call.shape, *_around(shift, reach * (1 + summation_error(size + 1)) + edge))
    # end by end is sharper where nothing is known of norms but what the ends say themselves
    known_norm = x.norms.get(len(x.shape) - 1)
    if known_norm is None or (result.peak > call.limit and bool((x.only().norm(-1) <= known_norm).all())):
        result = result.within(_by_ends(call, x, weight, shift, edge))
    repeated = 1.0 if bias is _NO_BIAS or bias.tensor.numel() == len(rows) else math.sqrt(len(rows))
    length = times(rows.square().sum().sqrt(), norm) + (shift.abs() + edge).square().sum().sqrt() * repeated
    length = length * (1 + summation_error(size + 1))
    mean = float((times(_average(weight, rows), norm) + shift.mean().abs() + edge.mean()).amax())
    mean += float(length.amax()) * summation_error(size + 1) + weight.absolute * float(x.sum(-1).amax())
    return Interval(call.shape, result.low, result.high, {len(call.shape) - 1: length}, mean=mean)


def _average(weight: KnownTensor, rows: torch.Tensor) -> torch.Tensor:
    """Bound the norm of the mean of a weight's rows, including the errors of rounding."""
    tensor, count = weight.tensor, len(rows)
    length = (tensor.t() @ tensor.new_ones(count)).double().norm() / count
    length = length + summation_error(count) * rows.square().sum().sqrt() / math.sqrt(count)
    total: torch.Tensor = length + weight.relative * rows.mean()
    return total


def _around(middle: torch.Tensor, reach: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    extra = summation_error(1) * middle.abs()
    return middle - reach - extra, middle + reach + extra


def _by_ends(
    call: OpCall, x: Interval, weight: KnownTensor, shift: torch.Tensor, edge: torch.Tensor
) -> Interval:
    if not x.bounded:
        return unbounded(call.shape)
    size = weight.tensor.shape[1]
    low, high = (ends.expand(*ends.shape[:-1], size) for ends in (x.low, x.high))
    magnitude = weight.tensor.abs()
    dtype = weight.tensor.dtype
    centre, radius = ((low + high) / 2).to(dtype), ((high - low) / 2).to(dtype)
    middle = (centre @ weight.tensor.t()).double()
    reach = (radius @ magnitude.t()).double()
    total = (torch.maximum(low.abs(), high.abs()).to(dtype) @ magnitude.t()).double()
    # float32 products here and in the model, and the rounding of the weights
    off = total * (3 * summation_error(size + 2) + weight.relative) + weight.absolute * x.sum(-1)
    off = torch.where(total < FLOAT32.max / 2, off, torch.inf)
    low_end, high_end = _around(middle + shift, reach + off + edge)
    return Interval(call.shape, finite(low_end, -1), finite(high_end, 1))


@transfer("matmul", "bmm", "mm")
def product(call: OpCall) -> Interval:
    """Rows times columns: norms multiply; or the sum of magnitudes of a row times the peak of a column.

    The second makes attention provable: probabilities add up to 1, so the result is no larger than V, and a
    row's norm no larger than the largest of V's rows.
    """
    a, b = call.interval("self"), call.interval("mat2" if "mat2" in call.arguments else "other")
    if len(a.shape) < 2 or len(b.shape) < 2:
        return unbounded(call.shape)
    return _product_of(call.shape, a, b)


def _product_of(shape: tuple[int, ...], a: Interval, b: Interval) -> Interval:
    """Return the interval of ``a @ b`` for operands of two or more dimensions."""
    inner, last = a.shape[-1], len(b.shape) - 1
    by_norm = times(a.norm(-1), b.norm(-2))
    by_sum = times(a.sum(-1), b.magnitude.amax(-2, keepdim=True))
    reach = torch.minimum(by_norm, by_sum) * (1 + summation_error(inner))
    result = symmetric(shape, reach)
    norms = {}
    if last in b.norms or (len(a.shape) - 1) in a.sums:
        longest = b.norm(-1).amax(-2, keepdim=True)
        row = times(a.sum(-1), longest) * (1 + summation_error(inner))
        if shape[-1] == b.shape[-1]:
            norms[len(shape) - 1] = row.reshape((1,) * (len(shape) - row.ndim) + tuple(row.shape))
    return Interval(shape, result.low, result.high, norms)


@transfer("scaled_dot_product_attention")
def attention(call: OpCall) -> Interval:
    """A weighted mean of the rows of V: within V's ends, and no longer than its longest row."""
    call.ignore("is_causal", "enable_gqa")
    value = call.interval("value")
    rank = len(call.shape)
    usual = call.number("dropout_p") == 0 and not (call.has("scale") and (call.number("scale") or 0) <= 0)
    if rank < 2 or len(value.shape) != rank or not usual or not _has_finite_scores(call):
        return unbounded(call.shape)
    rows = value.over(-2)
    slack = 1 + summation_error(value.shape[-2] + 8)
    longest = value.norm(-1).amax(-2, keepdim=True) * slack
    low, high = rows.low, rows.high
    if rank > 2 and value.shape[:-2] != call.shape[:-2]:  # grouped queries: a head of V serves several of Q
        others = tuple(range(rank - 2))
        low, high = low.amin(others, keepdim=True), high.amax(others, keepdim=True)
        longest = longest.amax(others, keepdim=True)
    rounded = 2 * rounding(call.dtype)[0]  # of probabilities, which some kernels hold in 16 bits
    off = torch.maximum(low.abs(), high.abs()) * (slack - 1 + rounded)
    longest = longest * (1 + rounded)
    # a row that is masked completely may come out as zeros
    return Interval(call.shape, (low - off).clamp(max=0.0), (high + off).clamp(min=0.0), {rank - 1: longest})


def _has_finite_scores(call: OpCall) -> bool:
    """Return whether the scaled, masked scores stay finite in float32; -inf is only a mask."""
    query, key = call.interval("query"), call.interval("key")
    scale = call.number("scale") if call.has("scale") else None
    largest = float(query.norm(-1).amax()) * float(key.norm(-1).amax()) * max(scale or 1.0, 1.0)
    mask = call.interval("attn_mask") if call.has("attn_mask") else None
    highest = max(float(mask.high.amax()), 0.0) if mask is not None else 0.0
    return largest + highest < FLOAT32.max / 4


@transfer("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def convolution(call: OpCall) -> Interval:
    """Per output channel: the sum over input channels of W+ high + W- low, where padding adds zeros."""
    call.ignore("stride", "padding", "dilation")
    x, weight, bias = call.interval("input"), call.weight("weight"), _bias(call, "bias")
    groups = call.arg("groups")
    if weight is None or bias is None or len(x.shape) != weight.tensor.ndim or not x.bounded:
        return unbounded(call.shape)
    kernel = tuple(range(2, weight.tensor.ndim))
    positive = weight.tensor.clamp(min=0).sum(kernel).double()
    negative = weight.tensor.clamp(max=0).sum(kernel).double()
    low, high = _channels(x)
    out = weight.tensor.shape[0]
    low, high = (ends.reshape(groups, -1).repeat_interleave(out // groups, 0) for ends in (low, high))
    top = (positive * high + negative * low).sum(1)
    bottom = (positive * low + negative * high).sum(1)
    terms = math.prod(weight.tensor.shape[1:])
    largest = torch.maximum(low.abs(), high.abs())
    total = ((positive - negative) * largest).sum(1)
    relative = 3 * summation_error(terms + 2) + weight.relative
    off = total * relative + weight.absolute * largest.sum(1) * math.prod(weight.tensor.shape[2:])
    off = torch.where(total < FLOAT32.max / 2, off, torch.inf)
    shift = bias.tensor.double().expand(out)
    off = off + shift.abs() * (summation_error(2) + bias.relative) + bias.absolute
    shape = (1, out) + (1,) * (len(call.shape) - 2)
    return Interval(call.shape, (bottom + shift - off).reshape(shape), (top + shift + off).reshape(shape))


def _channels(x: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one pair of ends per channel, over batch and positions, including the padding's zeros."""
    others = [axis for axis in range(len(x.shape)) if axis != 1]
    low, high = x.low.clamp(max=0.0).amin(others), x.high.clamp(min=0.0).amax(others)
    return low.expand(x.shape[1]), high.expand(x.shape[1])


@transfer("embedding")
def embedding(call: OpCall) -> Interval:
    """A row of the table: within the ends of each column, and no longer than the longest row."""
    call.ignore("indices", "padding_idx", "scale_grad_by_freq", "sparse")
    table = call.weight("weight")
    if table is None or table.tensor.ndim != 2 or not table.tensor.numel():
        return unbounded(call.shape)
    low, high = torch.aminmax(table.tensor, dim=0)
    longest = torch.linalg.vector_norm(table.tensor, dim=1).amax().double()
    length = table.tensor.shape[1]
    longest = longest * (1 + summation_error(length)) + VANISHING * math.sqrt(length)
    axis = len(call.shape) - 1
    ends = (1,) * axis + (table.tensor.shape[1],)
    norm = {axis: longest.reshape((1,) * (axis + 1))}
    interval = Interval(call.shape, low.double().reshape(ends), high.double().reshape(ends), norm)
    return interval.widened(table.relative, table.absolute)
