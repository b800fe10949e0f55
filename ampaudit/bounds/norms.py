"""Transfers of norms and softmax: closed forms that do not depend on how large their input is."""

from __future__ import annotations

import math

import torch

from ampaudit.bounds.span import Span, symmetric
from ampaudit.bounds.transfers import ELEMENTARY, FLOAT32_ULP, OpCall, accumulated, transfer

__all__ = ["CENTRED", "PLAIN"]

CENTRED = ("layer_norm", "group_norm", "var", "std", "var_mean", "std_mean")
PLAIN = ("rms_norm", "linalg_vector_norm", "norm", "cosine_similarity")
LOOSE = 2.0**-7  # of a float32 variance, where its row is not all but constant


@transfer("layer_norm")
def layer_norm(call: OpCall) -> Span:
    """|y_i| <= sqrt(n - 1) and |y| <= sqrt(n) before the affine part (Samuelson, 1968).

    A row whose elements are all but equal is rounding error divided by sqrt(eps): ``x * scale - mean *
    scale`` is off by up to two roundings of the mean, which matters where eps is 1e-12.
    """
    size = math.prod(call.given["normalized_shape"])
    axes = len(call.given["normalized_shape"])
    x = call.span("input")
    off = _mean_error(x.row_mean if axes == 1 else x.peak, float(call.given.get("eps", 1e-5)))
    core = math.sqrt(max(size - 1, 0)) * (1 + LOOSE) + off
    length = math.sqrt(size) * (1 + LOOSE) + off * math.sqrt(size)
    return _affine(call, core, length if axes == 1 else None, (1,) * (len(call.shape) - axes), off)


@transfer("rms_norm")
def rms_norm(call: OpCall) -> Span:
    """|y_i| <= |y| <= sqrt(n) before the scale."""
    size = math.prod(call.given["normalized_shape"])
    length = math.sqrt(size) * (1 + ELEMENTARY + accumulated(size))
    axes = len(call.given["normalized_shape"])
    return _affine(call, length, length if axes == 1 else None, (1,) * (len(call.shape) - axes), None)


@transfer("group_norm")
def group_norm(call: OpCall) -> Span:
    """As a layer norm over the elements of a group; the affine part is per channel."""
    shape = call.shape
    size = math.prod(shape[1:]) // int(call.given["num_groups"])
    off = _mean_error(call.span("input").peak, float(call.given.get("eps", 1e-5)))
    return _per_channel(call, math.sqrt(max(size - 1, 0)) * (1 + LOOSE) + off)


def _mean_error(mean: float, eps: float) -> float:
    return 2 * FLOAT32_ULP * mean / math.sqrt(eps) if eps > 0 else math.inf


def _affine(
    call: OpCall, core: float, length: float | None, leading: tuple[int, ...], off: float | None = None
) -> Span:
    """``core * weight + bias`` over the last axes, both known; a core with mean 0 where ``off`` is given."""
    weight, bias = _known(call, "weight"), _known(call, "bias")
    if weight is None or bias is None:
        return symmetric(call.shape, math.inf)
    scale, shift = (
        t.double().reshape(leading + tuple(t.shape)) if t.ndim else t.double() for t in (weight, bias)
    )
    # the affine part is rounded with the weights, to 8 bits at worst
    reach = core * scale.abs() * (1 + 2.0**-7)
    edge = shift.abs() * 2.0**-7 + 2.0**-24
    low, high = shift - reach - edge, shift + reach + edge
    rank = len(call.shape)
    low, high = (ends.reshape((1,) * (rank - ends.ndim) + tuple(ends.shape)) for ends in (low, high))
    norms = {}
    if length is not None:
        spread = 1.0 if bias.ndim else math.sqrt(call.shape[-1])
        total = float(scale.abs().amax()) * length + float(shift.square().sum().sqrt()) * spread
        norms[rank - 1] = torch.tensor(total * (1 + 2.0**-7) + 2.0**-24 * call.shape[-1], dtype=torch.float64)
        norms[rank - 1] = norms[rank - 1].reshape((1,) * rank)
    mean = None if length is None or off is None else _mean(scale, shift, length, off)
    return Span(call.shape, low, high, norms, mean=mean)


def _mean(scale: torch.Tensor, shift: torch.Tensor, length: float, off: float) -> float:
    """|mean(scale * core + shift)|: as core sums to 0, only what the scale differs from its mean counts."""
    size = max(scale.numel(), 1)
    uneven = float((scale - scale.mean()).square().sum().sqrt()) / size
    rounded = 2.0**-7 * float(scale.abs().amax()) * length / math.sqrt(size) + 2.0**-24
    steady = float(scale.abs().amax()) * off
    return uneven * length + rounded + steady + float(shift.mean().abs()) * (1 + 2.0**-7)


def _known(call: OpCall, name: str) -> torch.Tensor | None:
    """A weight's value; 1 or 0 where there is none."""
    if not call.has(name):
        return torch.tensor(1.0 if name == "weight" else 0.0)
    return call.tensor(name)


def _per_channel(call: OpCall, core: float) -> Span:
    weight, bias = _known(call, "weight"), _known(call, "bias")
    if weight is None or bias is None:
        return symmetric(call.shape, math.inf)
    shape = (1, -1) + (1,) * (len(call.shape) - 2)
    scale, shift = (t.double().reshape(shape) for t in (weight, bias))
    reach = core * scale.abs() * (1 + 2.0**-7) + shift.abs() * 2.0**-7 + 2.0**-24
    return Span(call.shape, shift - reach, shift + reach)


@transfer("batch_norm")
def batch_norm(call: OpCall) -> Span:
    """With stored statistics, a scale and a shift per channel; in training, a norm over the batch."""
    shape = call.shape
    if call.given.get("training"):
        size = math.prod(shape) // shape[1]
        off = _mean_error(call.span("input").peak, float(call.given.get("eps", 1e-5)))
        return _per_channel(call, math.sqrt(max(size - 1, 0)) * (1 + LOOSE) + off)
    known = [_known(call, name) for name in ("weight", "bias", "running_mean", "running_var")]
    if any(tensor is None for tensor in known):
        return symmetric(shape, math.inf)
    ends = (1, -1) + (1,) * (len(shape) - 2)
    weight, bias, mean, variance = (t.double().reshape(ends) for t in known if t is not None)
    eps = float(call.given.get("eps", 1e-5))
    # stored in 16 bits, a variance may be off by half an ulp, or flushed to zero
    low_variance = (variance * (1 - 2.0**-8) - 2.0**-24).clamp(min=0.0)
    scale = weight.abs() / (low_variance + eps).sqrt()
    x = call.span("input")
    shifted = torch.maximum((x.low - mean).abs(), (x.high - mean).abs())
    distance = shifted + mean.abs() * 2.0**-7
    reach = distance * scale * (1 + 2.0**-6) + bias.abs() * 2.0**-7 + 2.0**-24
    return Span(shape, bias - reach, bias + reach)


@transfer("softmax")
def softmax(call: OpCall) -> Span:
    """Between 0 and 1, with a sum of 1 along its axis: computed with n roundings."""
    shape = call.shape
    axis = int(call.given["dim"]) % len(shape) if shape else 0
    one = torch.ones((1,) * len(shape), dtype=torch.float64)
    slack = 1 + accumulated(shape[axis] + 16 if shape else 1) + ELEMENTARY
    sums = {axis: one * slack} if shape else {}
    return Span(shape, one * 0, one * (1 + ELEMENTARY), sums=sums)


@transfer("log_softmax")
def log_softmax(call: OpCall) -> Span:
    """Never positive; at least the spread of the input and log n below."""
    x = call.span("self")
    axis = int(call.given["dim"])
    rows = x.over(axis)
    spread = rows.high - rows.low + math.log(max(x.shape[axis], 1)) if x.shape else rows.high * 0
    low = -(spread * (1 + ELEMENTARY) + 1e-3)
    return Span(call.shape, low.nan_to_num(-math.inf, math.inf, -math.inf), spread * 0 + 1e-6)
