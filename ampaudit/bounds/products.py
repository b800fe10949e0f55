"""Transfer functions of matrix products, convolutions and attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ampaudit.bounds.elementwise import product as times
from ampaudit.bounds.interval import Interval, finite, symmetric, unbounded
from ampaudit.bounds.stored import UNIT_ROUNDOFF, rounding
from ampaudit.bounds.transfers import (
    ELEMENTARY,
    MAX_ROOT,
    VANISHING,
    KnownTensor,
    OpCall,
    output_interval,
    summation_error,
    transfer,
)
from ampaudit.core.formats import FLOAT32

CENTRED = ("layer_norm", "group_norm", "var", "std", "var_mean", "std_mean")
PLAIN = ("rms_norm", "linalg_vector_norm", "norm", "cosine_similarity")
LOOSE = 2.0**-7  # relative error of a float32 variance, unless its row is almost constant
INNER = 1 + 2.0**-8 + ELEMENTARY  # a normalized value may be rounded to 16 bits before it is scaled


@transfer("linear")
def linear(call: OpCall) -> Interval:
    """Bound by |w.x + b| <= |w| |x| + |b| (Cauchy and Schwarz), or by W c + b +- |W| r.

    Here c is the centre and r the radius of the interval of x. The norm of a row is at most |W|_F |x| + |b|.
    The second bound is computed only if no norm of x is known, or if the first does not suffice.
    """
    x, weight, bias = call.interval("input"), call.weight("weight"), call.weight("bias", 0.0)
    if weight is None or bias is None or weight.tensor.ndim != 2 or not x.shape:
        return unbounded(call.shape)
    return _affine_rows(call, x, weight, bias)


@transfer("addmm")
def addmm(call: OpCall) -> Interval:
    """Bound like ``linear``, with the weight transposed."""
    x, weight, bias = call.interval("mat1"), call.weight("mat2"), call.weight("self")
    plain = call.number("beta") == 1 and call.number("alpha") == 1
    if weight is None or bias is None or bias.tensor.ndim != 1 or not plain:
        return unbounded(call.shape)
    return _affine_rows(call, x, replace(weight, tensor=weight.tensor.t()), bias)


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
    # the bound by ends is sharper if norms are only known from the ends
    known_norm = x.norms.get(len(x.shape) - 1)
    if known_norm is None or (
        result.peak > call.limit and bool((Interval(x.shape, x.low, x.high).norm(-1) <= known_norm).all())
    ):
        result = result.within(_by_ends(call, x, weight, shift, edge))
    repeated = 1.0 if bias.tensor.numel() == len(rows) else math.sqrt(len(rows))
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
    """Bound rows times columns by their norms, or by a row's sum of magnitudes times a column's peak.

    The second bound makes attention provable: probabilities add up to 1, so the result is no larger than V,
    and the norm of a row no larger than that of V's longest row.
    """
    a, b = call.interval("self"), call.interval("mat2" if "mat2" in call.arguments else "other")
    if len(a.shape) < 2 or len(b.shape) < 2 or not (a.bounded and b.bounded):
        return unbounded(call.shape)
    shape, inner, last = call.shape, a.shape[-1], len(b.shape) - 1
    by_norm = times(a.norm(-1), b.norm(-2))
    by_sum = times(a.sum(-1), b.magnitude.amax(-2, keepdim=True))
    reach = torch.minimum(by_norm, by_sum) * (1 + summation_error(inner))
    result = symmetric(shape, reach)
    if last in b.norms or (len(a.shape) - 1) in a.sums:
        longest = b.norm(-1).amax(-2, keepdim=True)
        row = times(a.sum(-1), longest) * (1 + summation_error(inner))
        if shape[-1] == b.shape[-1]:
            return replace(result, norms={len(shape) - 1: row[(None,) * (len(shape) - row.ndim)]})
    return result


@transfer("scaled_dot_product_attention")
def attention(call: OpCall) -> Interval:
    """Bound a weighted mean of V's rows: within V's ends, and no longer than its longest row."""
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
    # a completely masked row may give zeros
    return Interval(call.shape, (low - off).clamp(max=0.0), (high + off).clamp(min=0.0), {rank - 1: longest})


def _has_finite_scores(call: OpCall) -> bool:
    """Return whether the scaled and masked scores stay finite in float32; -inf of a mask does not count."""
    query, key = call.interval("query"), call.interval("key")
    scale = call.number("scale") if call.has("scale") else None
    largest = float(query.norm(-1).amax()) * float(key.norm(-1).amax()) * max(scale or 1.0, 1.0)
    mask = call.interval("attn_mask") if call.has("attn_mask") else None
    highest = max(float(mask.high.amax()), 0.0) if mask is not None else 0.0
    return largest + highest < FLOAT32.max / 4


@transfer("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def convolution(call: OpCall) -> Interval:
    """Bound each output channel by the sum over input channels of W+ high + W- low; padding adds zeros."""
    call.ignore("stride", "padding", "dilation")
    x, weight, bias = call.interval("input"), call.weight("weight"), call.weight("bias", 0.0)
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
    """Bound a row of the table: within the ends of each column, and no longer than the longest row."""
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


@transfer("layer_norm")
def layer_norm(call: OpCall) -> Interval:
    """Bound by |y_i| <= |y| <= sqrt(n) before the affine part.

    Samuelson (1968) gives sqrt(n - 1) around the exact mean. An error d of the mean adds d^2 to the variance,
    so that by Cauchy and Schwarz the bound grows to sqrt(n) at most. ``x * scale - mean * scale`` adds
    two roundings of the mean, which matter if a row is almost constant and eps is 1e-12.
    """
    call.ignore("cudnn_enable")
    normalized, eps = call.arg("normalized_shape"), call.number("eps")
    size, axes = math.prod(normalized), len(normalized)
    x = call.interval("input")
    if eps is None or eps < FLOAT32.min_normal or not size or x.peak * math.sqrt(size) >= MAX_ROOT:
        return unbounded(call.shape)
    mean = x.row_mean if axes == 1 else x.peak
    length = math.sqrt(size) * (1 + LOOSE)
    off = _cancellation_error(mean, eps)
    if axes > 1:
        return _affine(call, length + off, axes)
    core_mean = off + min(1.0, summation_error(size) * mean / math.sqrt(eps))
    return _affine(call, length + off, axes, length + off * math.sqrt(size), core_mean)


@transfer("rms_norm")
def rms_norm(call: OpCall) -> Interval:
    """Bound by |y_i| <= |y| <= sqrt(n) before the scale."""
    normalized, eps = call.arg("normalized_shape"), call.number("eps")
    size, axes = math.prod(normalized), len(normalized)
    # a row of zeros is NaN without eps, as is one with an infinity
    if (eps is not None and eps < FLOAT32.min_normal) or not size or not call.interval("input").bounded:
        return unbounded(call.shape)
    length = math.sqrt(size) * (1 + ELEMENTARY + summation_error(size + 4))
    return _affine(call, length, axes, length if axes == 1 else None)


@transfer("group_norm")
def group_norm(call: OpCall) -> Interval:
    """Bound like a layer norm over the elements of a group, with an affine part per channel."""
    call.ignore("cudnn_enabled")
    groups, x = call.number("num_groups"), call.interval("input")
    eps = min(call.numbers("eps"), default=0.0)
    if not groups or eps < FLOAT32.min_normal or not math.prod(call.shape[1:]):
        return unbounded(call.shape)
    size = math.prod(call.shape[1:]) // int(groups)
    if x.peak * math.sqrt(size) >= MAX_ROOT:
        return unbounded(call.shape)
    # computed as x * scale + (bias - mean * scale): each term, and each factor, is rounded by itself
    core = math.sqrt(size) * (1 + LOOSE) + _cancellation_error(x.peak, eps, 5)
    if not call.arg("input").meta["val"].is_contiguous():
        # a kernel for channels last subtracts the square of the mean from the mean of squares, which cancel
        core *= math.sqrt(1 + 2 * summation_error(size + 4) * x.peak * x.peak / eps)
    return _per_channel(call, core)


def _cancellation_error(mean: float, eps: float, roundings: int = 2) -> float:
    return roundings * UNIT_ROUNDOFF * mean / math.sqrt(eps)


def _affine(
    call: OpCall, core: float, axes: int, length: float | None = None, core_mean: float | None = None
) -> Interval:
    """Bound ``core * weight + bias`` over the last axes, if both are known.

    A normalized row has an L2 norm of at most ``length``, and a mean of at most ``core_mean``.
    """
    weight, bias = call.weight("weight", 1.0), call.weight("bias", 0.0)
    if weight is None or bias is None:
        return unbounded(call.shape)
    rank = len(call.shape)
    scale, shift = (
        k.tensor.double()[(None,) * (rank - axes if k.tensor.ndim else 0)] for k in (weight, bias)
    )
    widest, reach, edge = _scaled(core, scale, shift, weight, bias)
    low, high = shift - reach - edge, shift + reach + edge
    result = output_interval(call, low, high)
    if length is None:
        return result
    repeated = 1.0 if bias.tensor.ndim else math.sqrt(call.shape[-1])
    total = float(widest.amax()) * length * INNER + float((shift.abs() + edge).norm()) * repeated
    norm = torch.full((1,) * rank, total, dtype=torch.float64)
    if core_mean is None:
        return replace(result, norms={rank - 1: norm})
    # the core sums to 0, so only deviations of the scale count
    size = max(scale.numel(), 1)
    uneven = float((scale - scale.mean()).square().sum().sqrt()) / size
    rounded = 2.0**-6 * float(widest.amax()) * length / math.sqrt(size)
    steady = float(widest.amax()) * core_mean
    mean = uneven * length + rounded + steady + float(shift.mean().abs()) + float(edge.amax())
    return replace(result, norms={rank - 1: norm}, mean=mean)


def _scaled(
    core: float, scale: torch.Tensor, shift: torch.Tensor, weight: KnownTensor, bias: KnownTensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest scale that the graph may hold, the scaled core, and the error of the shift."""
    widest = scale.abs() * (1 + weight.relative) + weight.absolute
    edge = shift.abs() * (bias.relative + ELEMENTARY) + bias.absolute + 2.0**-24
    return widest, core * widest * INNER, edge


def _per_channel(call: OpCall, core: float) -> Interval:
    weight, bias = call.weight("weight", 1.0), call.weight("bias", 0.0)
    if weight is None or bias is None:
        return unbounded(call.shape)
    shape = (1, -1) + (1,) * (len(call.shape) - 2)
    scale, shift = (k.tensor.double().reshape(shape) for k in (weight, bias))
    _, reach, edge = _scaled(core, scale, shift, weight, bias)
    return output_interval(call, shift - reach - edge, shift + reach + edge)


@transfer("batch_norm")
def batch_norm(call: OpCall) -> Interval:
    """Bound a scale and shift per channel by stored statistics; in training, a norm over the batch."""
    call.ignore("cudnn_enabled", "momentum")
    shape, eps, training = call.shape, call.number("eps"), call.arg("training")
    if eps is None or eps < FLOAT32.min_normal or len(shape) < 2:
        return unbounded(shape)
    x = call.interval("input")
    if not training:
        return _stored_statistics(call, x, eps)
    call.ignore("running_mean", "running_var")  # training writes them without reading them
    size = math.prod(shape) // max(shape[1], 1)
    # some kernels keep 1/sqrt(variance + eps) in the dtype of the input
    if x.peak * math.sqrt(size) >= MAX_ROOT or 1 / math.sqrt(eps) >= call.limit:
        return unbounded(shape)
    return _per_channel(call, math.sqrt(size) * (1 + LOOSE) + _cancellation_error(x.peak, eps, 5))


def _stored_statistics(call: OpCall, x: Interval, eps: float) -> Interval:
    shape = call.shape
    names = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    statistics = [k for name, default in names.items() if (k := call.weight(name, default)) is not None]
    if len(statistics) < len(names) or not call.has("running_mean") or not call.has("running_var"):
        return unbounded(shape)
    ends = (1, -1) + (1,) * (len(shape) - 2)
    weight, bias, mean, variance = (k.tensor.double().reshape(ends) for k in statistics)
    if bool((variance < 0).any()):
        return unbounded(shape)
    # a variance stored in 16 bits may be wrong by half an ulp, or flushed to zero
    least = (variance * (1 - statistics[3].relative) - statistics[3].absolute).clamp(min=0.0) + eps
    # computed as x * scale + (bias - mean * scale): each term is rounded by itself
    rounded = (x.magnitude + mean.abs()) * 4 * UNIT_ROUNDOFF
    shifted = torch.maximum((x.low - mean).abs(), (x.high - mean).abs())
    distance = shifted + mean.abs() * statistics[2].relative + statistics[2].absolute + rounded
    _, reach, edge = _scaled(1.0, weight, bias, statistics[0], statistics[1])
    scale = reach / least.sqrt()
    if bool(((x.magnitude + mean.abs()) * scale >= FLOAT32.max / 2).any()):
        return unbounded(shape)
    reach = scale * distance
    return output_interval(call, bias - reach - edge, bias + reach + edge)


@transfer("softmax.int", "_softmax")
def softmax(call: OpCall) -> Interval:
    """Bound a softmax by 0 and 1, and its sum along the axis by 1, up to n roundings."""
    dim, x = call.number("dim"), call.interval("self" if "self" in call.arguments else "input")
    if dim is None or not x.bounded:  # an infinite row gives NaN
        return unbounded(call.shape)
    shape = call.shape
    axis = int(dim) % max(len(shape), 1)
    one = torch.ones((1,) * len(shape), dtype=torch.float64)
    slack = 1 + summation_error(shape[axis] + 16 if shape else 1) + ELEMENTARY
    return Interval(shape, one * 0, one * (1 + ELEMENTARY), sums={axis: one * slack} if shape else {})


@transfer("log_softmax.int")
def log_softmax(call: OpCall) -> Interval:
    """Bound a log softmax by 0, and by minus the spread of the input minus log n."""
    dim, x = call.number("dim"), call.interval("self")
    if dim is None or not x.bounded:
        return unbounded(call.shape)
    rows = x.over(int(dim)) if x.shape else x
    terms = x.shape[int(dim)] if x.shape else 1
    spread = rows.high - rows.low + math.log(max(terms, 1))
    off = x.peak * 4 * UNIT_ROUNDOFF + spread * ELEMENTARY + 1e-3
    return Interval(call.shape, -(spread + off), spread * 0 + 1e-6)
