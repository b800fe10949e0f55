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
from ampaudit.run.step import Step
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CONTRACTS", "Contract", "ContractBackend", "parse_contract"]

CONTRACTS = {
    "lower-accumulate": "sums and products add up in the 16-bit format",
    "saturate": "overflow gives the largest finite number, as Ascend may",
    "flush-to-zero": "subnormal results are zero",
    "decomposed": "norms and softmax are taken apart into 16-bit ops, as in many exports",
}
TERMS = 16  # what one matrix instruction adds up before it rounds
STEPS = 1024  # longer sums are added up in longer pieces, to bound the time

Named = dict[str, Any]
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contract:
    """A set of words of ``CONTRACTS``; empty for the default one."""

    words: frozenset[str] = frozenset()

    @property
    def fused(self) -> bool:
        """Whether a norm is one kernel with float32 inside."""
        return "decomposed" not in self.words

    @property
    def text(self) -> str:
        """The contract in words, for reports."""
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
        UsageError: a word is none of ``CONTRACTS``.
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
        """Return a rounded carrier, with the contract's treatment of both ends of the range."""
        return self._ends(super().represent(tensor, dtype), dtype)

    def call(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], measure: BlockMeasure | None = None
    ) -> Any:
        """Call the op under the contract; ``measure`` sees no blocks, as the range is limited afterwards."""
        del measure
        own = self._own_way(step, args, kwargs)
        result = own if own is not None else super().call(step, args, kwargs)
        if not step.low_precision or not step.makes_values:
            return result
        if isinstance(result, torch.Tensor):
            changed = self._ends(result, step.dtypes[0])
            return result.copy_(changed) if step.mutates else changed
        return type(result)(self._ends(r, d) for r, d in zip(result, step.dtypes, strict=True))

    def _ends(self, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype not in LOW_PRECISION_DTYPES or not isinstance(value, torch.Tensor):
            return value
        limits = torch.finfo(dtype)
        if "flush-to-zero" in self.contract.words:
            value = torch.where(value.abs() < limits.tiny, torch.zeros_like(value), value)
        return value.clamp(-limits.max, limits.max) if "saturate" in self.contract.words else value

    def _own_way(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Compute the op in rounding steps, if the contract decomposes it."""
        dtype = step.dtypes[0]
        if not isinstance(step.target, OpOverload) or dtype not in LOW_PRECISION_DTYPES or step.mutates:
            return None
        name = base_name(step.target)
        table: dict[str, Callable[[Named, Rounding], torch.Tensor | None]] = {}
        if "lower-accumulate" in self.contract.words:
            table |= _SUMMED
        if not self.contract.fused:
            table |= _APART
        if name not in table:
            return None
        named = named_arguments(step.target, args, kwargs)
        return table[name](named, lambda value: self._ends(rounded(value, dtype), dtype))


def _products(a: torch.Tensor, b: torch.Tensor, r: Rounding) -> torch.Tensor:
    """Compute ``a @ b`` with the inner axis in pieces of 16, rounding after each."""
    total: torch.Tensor | None = None
    for start in range(0, a.shape[-1], TERMS):
        part = r(a[..., start : start + TERMS] @ b[..., start : start + TERMS, :])
        total = part if total is None else r(total + part)
    return total if total is not None else r(a @ b)


def _linear(named: Named, r: Rounding) -> torch.Tensor:
    found = _products(named["input"], named["weight"].t(), r)
    return found if named.get("bias") is None else r(found + named["bias"])


def _matmul(named: Named, r: Rounding) -> torch.Tensor | None:
    first, second = named["self"], named["other"] if "other" in named else named["mat2"]
    return _products(first, second, r) if first.ndim > 1 and second.ndim > 1 else None


def _conv2d(named: Named, r: Rounding) -> torch.Tensor | None:
    x, weight = named["input"], named["weight"]
    if named.get("groups", 1) != 1 or x.ndim != 4:
        return None
    step = max(TERMS // (weight.shape[2] * weight.shape[3]), 1)
    options = {k: named[k] for k in ("stride", "padding", "dilation") if k in named}
    total: torch.Tensor | None = None
    for start in range(0, x.shape[1], step):
        chosen = slice(start, start + step)
        part = r(torch.conv2d(x[:, chosen], weight[:, chosen], None, **options))
        total = part if total is None else r(total + part)
    if total is None or named.get("bias") is None:
        return total
    return r(total + named["bias"][:, None, None])


def _total(named: Named, r: Rounding) -> torch.Tensor:
    """Compute a sum in pieces, one after the other."""
    x, axes, keep = named["self"], named.get("dim"), bool(named.get("keepdim", False))
    axes = axes if isinstance(axes, list | tuple) else [] if axes is None else [axes]
    chosen = [a % max(x.ndim, 1) for a in axes] or list(range(x.ndim))
    others = [a for a in range(x.ndim) if a not in chosen]
    shape = [1 if a in chosen else n for a, n in enumerate(x.shape)]
    flat = x.permute(*others, *chosen).reshape(*[x.shape[a] for a in others], -1)
    piece = max(TERMS, -(-flat.shape[-1] // STEPS))
    total: torch.Tensor = flat.new_zeros(flat.shape[:-1])
    for start in range(0, flat.shape[-1], piece):
        total = r(total + r(flat[..., start : start + piece].sum(-1)))
    return total.reshape(shape) if keep else total


def _mean(named: Named, r: Rounding) -> torch.Tensor:
    total = _total(named, r)
    return r(total * (total.numel() / max(named["self"].numel(), 1)))


def _normalized(
    x: torch.Tensor, axes: tuple[int, ...], eps: float, r: Rounding, *, centred: bool
) -> torch.Tensor:
    centre = r(x - r(x.mean(axes, keepdim=True))) if centred else x
    variance = r(r(centre * centre).mean(axes, keepdim=True))
    return r(centre * r(torch.rsqrt(r(variance + eps))))


def _scaled(value: torch.Tensor, weight: Any, bias: Any, r: Rounding) -> torch.Tensor:
    value = value if weight is None else r(value * weight)
    return value if bias is None else r(value + bias)


def _layer_norm(named: Named, r: Rounding) -> torch.Tensor:
    axes = tuple(range(-len(named["normalized_shape"]), 0))
    value = _normalized(named["input"], axes, float(named.get("eps", 1e-5)), r, centred=True)
    return _scaled(value, named.get("weight"), named.get("bias"), r)


def _rms_norm(named: Named, r: Rounding) -> torch.Tensor:
    axes = tuple(range(-len(named["normalized_shape"]), 0))
    eps = named.get("eps")
    value = _normalized(named["input"], axes, 1.2e-7 if eps is None else float(eps), r, centred=False)
    return _scaled(value, named.get("weight"), None, r)


def _group_norm(named: Named, r: Rounding) -> torch.Tensor:
    x = named["input"]
    grouped = x.reshape(x.shape[0], int(named["num_groups"]), -1)
    value = _normalized(grouped, (-1,), float(named.get("eps", 1e-5)), r, centred=True).reshape(x.shape)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    weight, bias = (None if named.get(k) is None else named[k].reshape(shape) for k in ("weight", "bias"))
    return _scaled(value, weight, bias, r)


def _softmax(named: Named, r: Rounding) -> torch.Tensor:
    x, axis = named["self"], int(named["dim"])
    raised = r(torch.exp(r(x - x.amax(axis, keepdim=True))))
    return r(raised / r(raised.sum(axis, keepdim=True)))


_SUMMED: dict[str, Callable[[Named, Rounding], torch.Tensor | None]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    "conv2d": _conv2d,
    "sum": _total,
    "mean": _mean,
}
_APART: dict[str, Callable[[Named, Rounding], torch.Tensor | None]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
}
