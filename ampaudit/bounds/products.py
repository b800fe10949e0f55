"""Transfers of matrix products, convolutions and attention."""

from __future__ import annotations

import math

import torch

from ampaudit.bounds.span import Span, finite, symmetric
from ampaudit.bounds.transfers import OpCall, accumulated, transfer

__all__: list[str] = []


@transfer("linear")
def linear(call: OpCall) -> Span:
    """|w.x + b| <= |w| |x| + |b| by Cauchy and Schwarz; or, end by end, W c +- |W| r.

    The row's norm is at most |W|_F |x| + |b|. Of the two bounds the second is sought where the first is not
    known from a norm, or does not suffice.
    """
    x, weight = call.span("input"), call.tensor("weight")
    if weight is None or weight.ndim != 2 or not x.shape:
        return symmetric(call.shape, math.inf)
    bias = call.tensor("bias") if call.has("bias") else None
    if call.has("bias") and bias is None:
        return symmetric(call.shape, math.inf)
    return _affine_rows(call, x, weight, bias, "weight")


@transfer("addmm")
def addmm(call: OpCall) -> Span:
    """Linear with the weight transposed."""
    x, weight, bias = call.span("mat1"), call.tensor("mat2"), call.tensor("self")
    plain = call.given.get("beta", 1) == 1 and call.given.get("alpha", 1) == 1
    if weight is None or bias is None or bias.ndim != 1 or not plain:
        return symmetric(call.shape, math.inf)
    return _affine_rows(call, x, weight.t(), bias, "mat2")


def _affine_rows(call: OpCall, x: Span, weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> Span:
    relative, absolute = call.loose(name)
    size = weight.shape[1]
    rows = torch.linalg.vector_norm(weight, dim=1).double() * (1 + accumulated(size) + relative)
    rows = rows + absolute * math.sqrt(size)
    shift = bias.double() if bias is not None else torch.zeros((), dtype=torch.float64)
    norm = x.norm(-1)
    reach = _times(rows, norm)
    edge = _edge(call, shift, bias)
    result = Span(call.shape, *_around(shift, reach * (1 + accumulated(size + 1)) + edge))
    # end by end is sharper where nothing is known of norms but what the ends say themselves
    known = x.norms.get(len(x.shape) - 1)
    if known is None or (result.peak > call.limit and bool((x.only().norm(-1) <= known).all())):
        result = result.within(_by_ends(call, x, weight, (shift, edge), (relative, absolute)))
    mean = float((_times(_average(weight, rows, relative), norm) + shift.mean().abs() + edge.mean()).amax())
    length = _times(rows.square().sum().sqrt(), norm) + (shift.abs() + edge).square().sum().sqrt() * _spread(
        bias, weight
    )
    length = length * (1 + accumulated(size + 1))
    mean += float(length.amax()) * accumulated(size + 1) + absolute * float(x.sum(-1).amax())
    return Span(call.shape, result.low, result.high, {len(call.shape) - 1: length}, mean=mean)


def _average(weight: torch.Tensor, rows: torch.Tensor, relative: float) -> torch.Tensor:
    """The norm of the mean of a weight's rows, with the errors of float32 and of rounding the weight."""
    count = weight.shape[0]
    found = (weight.t() @ weight.new_ones(count)).double().norm() / count
    found = found + accumulated(count) * rows.square().sum().sqrt() / math.sqrt(count)
    total: torch.Tensor = found + relative * rows.mean()
    return total


def _edge(call: OpCall, shift: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """How far the bias that the graph adds may be from the known one."""
    if bias is None:
        return torch.zeros((), dtype=torch.float64)
    name = "bias" if "bias" in call.given else "self"
    relative, absolute = call.loose(name)
    return shift.abs() * relative + absolute


def _spread(bias: torch.Tensor | None, weight: torch.Tensor) -> float:
    """A bias with one element per row is counted once; a scalar one as often as there are rows."""
    return 1.0 if bias is None or bias.numel() == weight.shape[0] else math.sqrt(weight.shape[0])


def _around(middle: torch.Tensor, reach: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    extra = accumulated(1) * middle.abs()
    return middle - reach - extra, middle + reach + extra


def _by_ends(
    call: OpCall,
    x: Span,
    weight: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor],
    loose: tuple[float, float],
) -> Span:
    if not x.bounded:
        return symmetric(call.shape, math.inf)
    size = weight.shape[1]
    low, high = (ends.expand(*ends.shape[:-1], size) for ends in (x.low, x.high))
    centre, radius = ((low + high) / 2).float(), ((high - low) / 2).float()
    magnitude = weight.abs()
    middle = (centre @ weight.t()).double()
    reach = (radius @ magnitude.t()).double()
    total = (torch.maximum(low.abs(), high.abs()).float() @ magnitude.t()).double()
    # float32 products here and in the model, and the rounding of the weights
    off = total * (3 * accumulated(size + 2) + loose[0]) + loose[1] * x.sum(-1)
    low_end, high_end = _around(middle + bias[0], reach + off + bias[1])
    return Span(call.shape, finite(low_end, -1), finite(high_end, 1))


@transfer("matmul", "bmm", "mm")
def product(call: OpCall) -> Span:
    """Rows times columns: norms multiply; or the sum of magnitudes of a row times the peak of a column.

    The second makes attention provable: probabilities add up to 1, so the result is no larger than V, and a
    row's norm no larger than the largest of V's rows.
    """
    a = call.span("self")
    b = call.span("other" if call.has("other") else "mat2")
    if len(a.shape) < 2 or len(b.shape) < 2:
        return symmetric(call.shape, math.inf)
    return product_of(call.shape, a, b)


def product_of(shape: tuple[int, ...], a: Span, b: Span) -> Span:
    """The span of ``a @ b`` for operands of two or more dimensions."""
    inner, last = a.shape[-1], len(b.shape) - 1
    by_norm = _times(a.norm(-1), b.norm(-2))
    by_sum = _times(a.sum(-1), b.magnitude.amax(-2, keepdim=True))
    reach = torch.minimum(by_norm, by_sum) * (1 + accumulated(inner))
    result = symmetric(shape, reach)
    norms = {}
    if last in b.norms or (len(a.shape) - 1) in a.sums:
        longest = b.norm(-1).amax(-2, keepdim=True)
        row = _times(a.sum(-1), longest) * (1 + accumulated(inner))
        norms[len(shape) - 1] = row.reshape((1,) * (len(shape) - row.ndim) + tuple(row.shape))
    return Span(shape, result.low, result.high, norms)


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An infinite bound times zero is zero: the value is finite."""
    return torch.where((x == 0) | (y == 0), torch.zeros((), dtype=torch.float64), x * y)


@transfer("scaled_dot_product_attention")
def attention(call: OpCall) -> Span:
    """A weighted mean of the rows of V: within V's ends, and no longer than its longest row."""
    value = call.span("value")
    dropout = call.given.get("dropout_p", 0.0)
    if len(value.shape) != len(call.shape) or not isinstance(dropout, float | int) or dropout:
        return symmetric(call.shape, math.inf)
    heads = call.shape[-3] // value.shape[-3] if len(call.shape) > 2 and value.shape[-3] else 1
    rows = value.over(-2)
    slack = 1 + accumulated(value.shape[-2] + 8)
    axis = len(call.shape) - 1
    longest = value.norm(-1).amax(-2, keepdim=True) * slack
    low, high = rows.low, rows.high
    if heads > 1:  # grouped queries: each head of V serves several of Q
        low, high, longest = (
            low.amin(-3, keepdim=True),
            high.amax(-3, keepdim=True),
            longest.amax(-3, keepdim=True),
        )
    off = torch.maximum(low.abs(), high.abs()) * (slack - 1)
    # a row that is masked completely may come out as zeros
    return Span(call.shape, (low - off).clamp(max=0.0), (high + off).clamp(min=0.0), {axis: longest})


@transfer("conv1d", "conv2d", "conv3d")
def convolution(call: OpCall) -> Span:
    """Per output channel: the sum over input channels of W+ high + W- low, where padding adds zeros."""
    x, weight = call.span("input"), call.tensor("weight")
    bias = call.tensor("bias") if call.has("bias") else None
    if weight is None or (call.has("bias") and bias is None) or len(x.shape) != weight.ndim or not x.bounded:
        return symmetric(call.shape, math.inf)
    kernel = tuple(range(2, weight.ndim))
    positive = weight.clamp(min=0).sum(kernel).double()
    negative = weight.clamp(max=0).sum(kernel).double()
    low, high = _channels(x)
    groups = int(call.given.get("groups", 1))
    out = weight.shape[0]
    low, high = (ends.reshape(groups, -1).repeat_interleave(out // groups, 0) for ends in (low, high))
    top = (positive * high + negative * low).sum(1)
    bottom = (positive * low + negative * high).sum(1)
    relative, absolute = call.loose("weight")
    terms = math.prod(weight.shape[1:])
    largest = torch.maximum(low.abs(), high.abs())
    total = ((positive - negative) * largest).sum(1)
    off = total * (3 * accumulated(terms + 2) + relative) + absolute * largest.sum(1) * terms
    shift = bias.double() if bias is not None else torch.zeros(out, dtype=torch.float64)
    shape = (1, out) + (1,) * (len(call.shape) - 2)
    off = off + shift.abs() * accumulated(2) + _edge(call, shift, bias)
    return Span(call.shape, (bottom + shift - off).reshape(shape), (top + shift + off).reshape(shape))


def _channels(x: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """One pair of ends per channel, over batch and positions, with the zeros of padding between them."""
    others = [axis for axis in range(len(x.shape)) if axis != 1]
    low, high = x.low.clamp(max=0.0).amin(others), x.high.clamp(min=0.0).amax(others)
    return low.expand(x.shape[1]), high.expand(x.shape[1])


@transfer("embedding")
def embedding(call: OpCall) -> Span:
    """A row of the table: within the ends of each column, and no longer than the longest row."""
    table = call.tensor("weight")
    if table is None or table.ndim != 2:
        return symmetric(call.shape, math.inf)
    low, high = torch.aminmax(table, dim=0)
    relative, absolute = call.loose("weight")
    longest = torch.linalg.vector_norm(table, dim=1).amax().double() * (1 + accumulated(table.shape[1]))
    axis = len(call.shape) - 1
    ends = (1,) * axis + (table.shape[1],)
    norm = {axis: longest.reshape((1,) * (axis + 1))}
    span = Span(call.shape, low.double().reshape(ends), high.double().reshape(ends), norm)
    return span.widened(relative, absolute)
