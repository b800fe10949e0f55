"""Transfer functions of norms and softmax: closed forms, independent of the size of the input."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ampaudit.bounds.interval import Interval, unbounded
from ampaudit.bounds.stored import UNIT_ROUNDOFF
from ampaudit.bounds.transfers import (
    ELEMENTARY,
    MAX_ROOT,
    KnownTensor,
    OpCall,
    output_interval,
    summation_error,
    transfer,
)
from ampaudit.core.formats import FLOAT32

__all__ = ["CENTRED", "PLAIN"]

CENTRED = ("layer_norm", "group_norm", "var", "std", "var_mean", "std_mean")
PLAIN = ("rms_norm", "linalg_vector_norm", "norm", "cosine_similarity")
LOOSE = 2.0**-7  # of a float32 variance, where its row is not all but constant
INNER = 1 + 2.0**-8 + ELEMENTARY  # a normalized value may be rounded to 16 bits before it is scaled


@transfer("layer_norm")
def layer_norm(call: OpCall) -> Interval:
    """|y_i| <= |y| <= sqrt(n) before the affine part.

    Samuelson (1968) gives sqrt(n - 1) around the exact mean. A mean off by d adds d^2 to the variance, and
    so, by Cauchy and Schwarz, no more than the one that is missing. Besides, ``x * scale - mean * scale`` is
    off by two roundings of the mean, which matters where a row is all but constant and eps is 1e-12.
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
        return _affine(call, length + off, None, axes)
    row = _Row(length + off * math.sqrt(size), off + min(1.0, summation_error(size) * mean / math.sqrt(eps)))
    return _affine(call, length + off, row, axes)


@transfer("rms_norm")
def rms_norm(call: OpCall) -> Interval:
    """|y_i| <= |y| <= sqrt(n) before the scale."""
    call.ignore("input")
    normalized, eps = call.arg("normalized_shape"), call.number("eps")
    size, axes = math.prod(normalized), len(normalized)
    if (eps is not None and eps < FLOAT32.min_normal) or not size:  # a row of zeros is NaN
        return unbounded(call.shape)
    length = math.sqrt(size) * (1 + ELEMENTARY + summation_error(size + 4))
    return _affine(call, length, _Row(length) if axes == 1 else None, axes)


@transfer("group_norm")
def group_norm(call: OpCall) -> Interval:
    """Like a layer norm over the elements of a group, with an affine part per channel."""
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
        # a kernel for channels last takes the mean of squares less the square of the mean, which cancel
        core *= math.sqrt(1 + 2 * summation_error(size + 4) * x.peak * x.peak / eps)
    return _per_channel(call, core)


def _cancellation_error(mean: float, eps: float, roundings: int = 2) -> float:
    return roundings * UNIT_ROUNDOFF * mean / math.sqrt(eps)


@dataclass(frozen=True, slots=True)
class _Row:
    """The bounds of a normalized row: its L2 norm, and the magnitude of its mean."""

    length: float
    mean: float | None = None


def _affine(call: OpCall, core: float, row: _Row | None, axes: int) -> Interval:
    """Bound ``core * weight + bias`` over the last axes, both known."""
    weight, bias = _known(call, "weight", 1.0), _known(call, "bias", 0.0)
    if weight is None or bias is None:
        return unbounded(call.shape)
    rank = len(call.shape)
    leading = (1,) * (rank - axes)
    scale, shift = (
        k.tensor.double().reshape(leading + tuple(k.tensor.shape)) if k.tensor.ndim else k.tensor.double()
        for k in (weight, bias)
    )
    widest, reach, edge = _scaled(core, scale, shift, weight, bias)
    low, high = shift - reach - edge, shift + reach + edge
    result = output_interval(call, low, high)
    if row is None:
        return result
    repeated = 1.0 if bias.tensor.ndim else math.sqrt(call.shape[-1])
    total = float(widest.amax()) * row.length * INNER + float((shift.abs() + edge).norm()) * repeated
    norm = torch.full((1,) * rank, total, dtype=torch.float64)
    mean = None if row.mean is None else _mean(widest, scale, shift, row) + float(edge.amax())
    return replace(result, norms={rank - 1: norm}, mean=mean)


def _scaled(
    core: float, scale: torch.Tensor, shift: torch.Tensor, weight: KnownTensor, bias: KnownTensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest scale that the graph may hold, the scaled core, and the error of the shift."""
    widest = scale.abs() * (1 + weight.relative) + weight.absolute
    edge = shift.abs() * (bias.relative + ELEMENTARY) + bias.absolute + 2.0**-24
    return widest, core * widest * INNER, edge


def _mean(widest: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, row: _Row) -> float:
    """Bound |mean(scale * core + shift)|: the core sums to 0, so only deviations of the scale count."""
    size = max(scale.numel(), 1)
    uneven = float((scale - scale.mean()).square().sum().sqrt()) / size
    rounded = 2.0**-6 * float(widest.amax()) * row.length / math.sqrt(size)
    steady = float(widest.amax()) * (row.mean or 0.0)
    return uneven * row.length + rounded + steady + float(shift.mean().abs())


def _known(call: OpCall, name: str, default: float) -> KnownTensor | None:
    """Return a weight's value; 1 or 0 if there is none."""
    if not call.has(name):
        return KnownTensor(torch.tensor(default))
    return call.weight(name)


def _per_channel(call: OpCall, core: float) -> Interval:
    weight, bias = _known(call, "weight", 1.0), _known(call, "bias", 0.0)
    if weight is None or bias is None:
        return unbounded(call.shape)
    shape = (1, -1) + (1,) * (len(call.shape) - 2)
    scale, shift = (k.tensor.double().reshape(shape) for k in (weight, bias))
    _, reach, edge = _scaled(core, scale, shift, weight, bias)
    return output_interval(call, shift - reach - edge, shift + reach + edge)


@transfer("batch_norm")
def batch_norm(call: OpCall) -> Interval:
    """Scale and shift per channel with stored statistics; in training, a norm over the batch."""
    call.ignore("cudnn_enabled", "momentum")
    shape, eps, training = call.shape, call.number("eps"), call.arg("training")
    if eps is None or eps < FLOAT32.min_normal or len(shape) < 2:
        return unbounded(shape)
    x = call.interval("input")
    if not training:
        return _stored_statistics(call, x, eps)
    call.ignore("running_mean", "running_var")  # written, and not read
    size = math.prod(shape) // max(shape[1], 1)
    # some kernels keep 1/sqrt(variance + eps) in the dtype of the input
    if x.peak * math.sqrt(size) >= MAX_ROOT or 1 / math.sqrt(eps) >= call.limit:
        return unbounded(shape)
    return _per_channel(call, math.sqrt(size) * (1 + LOOSE) + _cancellation_error(x.peak, eps, 5))


def _stored_statistics(call: OpCall, x: Interval, eps: float) -> Interval:
    shape = call.shape
    names = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    statistics = [k for name, default in names.items() if (k := _known(call, name, default)) is not None]
    if len(statistics) < len(names) or not call.has("running_mean") or not call.has("running_var"):
        return unbounded(shape)
    ends = (1, -1) + (1,) * (len(shape) - 2)
    weight, bias, mean, variance = (k.tensor.double().reshape(ends) for k in statistics)
    if bool((variance < 0).any()):
        return unbounded(shape)
    # stored in 16 bits, a variance may be off by half an ulp, or flushed to zero
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
    """Between 0 and 1, with a sum of 1 along its axis up to n roundings."""
    dim, x = call.number("dim"), call.interval("self" if "self" in call.arguments else "input")
    if dim is None or not x.bounded:  # of an infinite row it is NaN
        return unbounded(call.shape)
    shape = call.shape
    axis = int(dim) % max(len(shape), 1)
    one = torch.ones((1,) * len(shape), dtype=torch.float64)
    slack = 1 + summation_error(shape[axis] + 16 if shape else 1) + ELEMENTARY
    return Interval(shape, one * 0, one * (1 + ELEMENTARY), sums={axis: one * slack} if shape else {})


@transfer("log_softmax.int")
def log_softmax(call: OpCall) -> Interval:
    """At most 0; at least minus the spread of the input minus log n."""
    dim, x = call.number("dim"), call.interval("self")
    if dim is None or not x.bounded:
        return unbounded(call.shape)
    rows = x.over(int(dim)) if x.shape else x
    terms = x.shape[int(dim)] if x.shape else 1
    spread = rows.high - rows.low + math.log(max(terms, 1))
    off = x.peak * 4 * UNIT_ROUNDOFF + spread * ELEMENTARY + 1e-3
    return Interval(call.shape, -(spread + off), spread * 0 + 1e-6)
