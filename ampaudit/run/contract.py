"""Emulates other execution contracts: 16-bit accumulation, saturation, flushing, decomposed norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.run.backends import Emulated, rounded
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.program import Step
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CONTRACTS", "Contract", "ContractBackend", "parse_contract"]

CONTRACTS = {
    "lower-accumulate": "sums and products add up in the 16-bit format",
    "saturate": "overflow gives the largest finite number, as Ascend may",
    "flush-to-zero": "subnormal results are zero",
    "decomposed": "norms and softmax are taken apart into 16-bit ops, as in many exports",
}
TERMS = 16  # terms that one matrix instruction adds up before it rounds
STEPS = 1024  # longer sums are split into longer pieces, to bound the time

Arguments = dict[str, Any]
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contract:
    """A set of words of ``CONTRACTS``; empty for the default contract."""

    words: frozenset[str] = frozenset()

    @property
    def fused(self) -> bool:
        """Whether norms are one kernel with float32 inside."""
        return "decomposed" not in self.words

    @property
    def text(self) -> str:
        """Description of the contract for reports."""
        usual = {
            "lower-accumulate": "accumulation in float32",
            "decomposed": "norms and softmax fused, float32 inside",
            "saturate": "overflow to infinity (IEEE)",
            "flush-to-zero": "subnormals kept",
        }
        return "; ".join(CONTRACTS[w] if w in self.words else text for w, text in usual.items())


def parse_contract(text: str) -> Contract:
    """Parse a contract such as ``saturate,decomposed``.

    Raises:
        UsageError: a word is not one of ``CONTRACTS``.
    """
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    for word in sorted(words - set(CONTRACTS)):
        hint = did_you_mean(word, CONTRACTS) + f"one or more of: {', '.join(CONTRACTS)}"
        raise UsageError(f"--contract {word}: no such word", hint=hint)
    return Contract(words)


class ContractBackend(Emulated):
    """The emulated backend under another contract."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.name = f"emulated: {', '.join(sorted(contract.words))}"

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a rounded carrier, saturated and flushed as the contract says."""
        return self._limit(super().represent(tensor, dtype), dtype)

    def call(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], measure: BlockMeasure | None = None
    ) -> Any:
        """Call the op under the contract; without block measurements, as the range is limited afterwards."""
        del measure
        stepwise = self._in_rounding_steps(step, args, kwargs)
        result = stepwise if stepwise is not None else super().call(step, args, kwargs)
        if not step.low_precision or not step.makes_values:
            return result
        if isinstance(result, torch.Tensor):
            changed = self._limit(result, step.dtypes[0])
            return result.copy_(changed) if step.mutates else changed
        return type(result)(self._limit(r, d) for r, d in zip(result, step.dtypes, strict=True))

    def _limit(self, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype not in LOW_PRECISION_DTYPES or not isinstance(value, torch.Tensor):
            return value
        limits = torch.finfo(dtype)
        if "flush-to-zero" in self.contract.words:
            value = torch.where(value.abs() < limits.tiny, torch.zeros_like(value), value)
        return value.clamp(-limits.max, limits.max) if "saturate" in self.contract.words else value

    def _in_rounding_steps(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Compute the op in rounding steps, if the contract decomposes it."""
        dtype = step.dtypes[0]
        if not isinstance(step.target, OpOverload) or dtype not in LOW_PRECISION_DTYPES or step.mutates:
            return None
        name = base_name(step.target)
        table: dict[str, Callable[[Arguments, Rounding], torch.Tensor | None]] = {}
        if "lower-accumulate" in self.contract.words:
            table |= _ACCUMULATED
        if not self.contract.fused:
            table |= _DECOMPOSED
        if name not in table:
            return None
        arguments = named_arguments(step.target, args, kwargs)
        return table[name](arguments, lambda value: self._limit(rounded(value, dtype), dtype))


def _products(a: torch.Tensor, b: torch.Tensor, r: Rounding) -> torch.Tensor:
    """Compute ``a @ b`` with the inner axis in pieces of 16, rounding after each."""
    total: torch.Tensor | None = None
    for start in range(0, a.shape[-1], TERMS):
        part = r(a[..., start : start + TERMS] @ b[..., start : start + TERMS, :])
        total = part if total is None else r(total + part)
    return total if total is not None else r(a @ b)


def _linear(arguments: Arguments, r: Rounding) -> torch.Tensor:
    total = _products(arguments["input"], arguments["weight"].t(), r)
    return total if arguments.get("bias") is None else r(total + arguments["bias"])


def _matmul(arguments: Arguments, r: Rounding) -> torch.Tensor | None:
    first, second = arguments["self"], arguments["other"] if "other" in arguments else arguments["mat2"]
    return _products(first, second, r) if first.ndim > 1 and second.ndim > 1 else None


def _conv2d(arguments: Arguments, r: Rounding) -> torch.Tensor | None:
    x, weight = arguments["input"], arguments["weight"]
    if arguments.get("groups", 1) != 1 or x.ndim != 4:
        return None
    step = max(TERMS // (weight.shape[2] * weight.shape[3]), 1)
    options = {k: arguments[k] for k in ("stride", "padding", "dilation") if k in arguments}
    total: torch.Tensor | None = None
    for start in range(0, x.shape[1], step):
        channels = slice(start, start + step)
        part = r(torch.conv2d(x[:, channels], weight[:, channels], None, **options))
        total = part if total is None else r(total + part)
    if total is None or arguments.get("bias") is None:
        return total
    return r(total + arguments["bias"][:, None, None])


def _total(arguments: Arguments, r: Rounding) -> torch.Tensor:
    """Compute a sum in pieces, one after the other."""
    x, axes, keep = arguments["self"], arguments.get("dim"), bool(arguments.get("keepdim", False))
    axes = axes if isinstance(axes, list | tuple) else [] if axes is None else [axes]
    reduced = [a % max(x.ndim, 1) for a in axes] or list(range(x.ndim))
    others = [a for a in range(x.ndim) if a not in reduced]
    shape = [1 if a in reduced else n for a, n in enumerate(x.shape)]
    flat = x.permute(*others, *reduced).reshape(*[x.shape[a] for a in others], -1)
    piece = max(TERMS, -(-flat.shape[-1] // STEPS))
    total: torch.Tensor = flat.new_zeros(flat.shape[:-1])
    for start in range(0, flat.shape[-1], piece):
        total = r(total + r(flat[..., start : start + piece].sum(-1)))
    return total.reshape(shape) if keep else total


def _mean(arguments: Arguments, r: Rounding) -> torch.Tensor:
    total = _total(arguments, r)
    return r(total * (total.numel() / max(arguments["self"].numel(), 1)))


def _normalized(
    x: torch.Tensor, axes: tuple[int, ...], eps: float, r: Rounding, *, centred: bool
) -> torch.Tensor:
    centre = r(x - r(x.mean(axes, keepdim=True))) if centred else x
    variance = r(r(centre * centre).mean(axes, keepdim=True))
    return r(centre * r(torch.rsqrt(r(variance + eps))))


def _scaled(value: torch.Tensor, weight: Any, bias: Any, r: Rounding) -> torch.Tensor:
    value = value if weight is None else r(value * weight)
    return value if bias is None else r(value + bias)


def _layer_norm(arguments: Arguments, r: Rounding) -> torch.Tensor:
    axes = tuple(range(-len(arguments["normalized_shape"]), 0))
    value = _normalized(arguments["input"], axes, float(arguments.get("eps", 1e-5)), r, centred=True)
    return _scaled(value, arguments.get("weight"), arguments.get("bias"), r)


def _rms_norm(arguments: Arguments, r: Rounding) -> torch.Tensor:
    axes = tuple(range(-len(arguments["normalized_shape"]), 0))
    eps = arguments.get("eps")
    value = _normalized(arguments["input"], axes, 1.2e-7 if eps is None else float(eps), r, centred=False)
    return _scaled(value, arguments.get("weight"), None, r)


def _group_norm(arguments: Arguments, r: Rounding) -> torch.Tensor:
    x = arguments["input"]
    grouped = x.reshape(x.shape[0], int(arguments["num_groups"]), -1)
    value = _normalized(grouped, (-1,), float(arguments.get("eps", 1e-5)), r, centred=True).reshape(x.shape)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    weight, bias = (
        None if arguments.get(k) is None else arguments[k].reshape(shape) for k in ("weight", "bias")
    )
    return _scaled(value, weight, bias, r)


def _softmax(arguments: Arguments, r: Rounding) -> torch.Tensor:
    x, axis = arguments["self"], int(arguments["dim"])
    exponentials = r(torch.exp(r(x - x.amax(axis, keepdim=True))))
    return r(exponentials / r(exponentials.sum(axis, keepdim=True)))


_ACCUMULATED: dict[str, Callable[[Arguments, Rounding], torch.Tensor | None]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "conv2d": _conv2d,
    "sum": _total,
    "mean": _mean,
}
_DECOMPOSED: dict[str, Callable[[Arguments, Rounding], torch.Tensor | None]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
}
