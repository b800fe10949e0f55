"""Computes the converted graph, natively in its dtypes or emulated in float32.

A backend decides how a tensor of some dtype is represented, how a step is called, and which operation
autograd differentiates. ``choose_backend`` selects one for a device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.ops import having
from ampaudit.run.low_precision import call_in_low_precision
from ampaudit.run.measure import BLOCK, flat_pair, rounded_components
from ampaudit.run.program import Step
from ampaudit.trace.caster import TOO_LARGE
from ampaudit.trace.functional import OnCopy, overload_of
from ampaudit.trace.opnames import base_name, is_foreign, is_view, mutated_arguments, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES, fits, node_dtype, sizes_of, widened, widened_tensor

CONTRACTS = {
    "lower-accumulate": "sums and products add up in the 16-bit format",
    "saturate": "overflow gives the largest finite number, as Ascend may",
    "flush-to-zero": "subnormal results are zero",
    "decomposed": "norms and softmax are decomposed into 16-bit ops, as in many exports",
}
TERMS = 16  # terms that one matrix instruction adds up before it rounds
STEPS = 1024  # longer sums are split into longer pieces, to bound the time

Arguments = dict[str, Any]
Rounding = Callable[[torch.Tensor], torch.Tensor]


class Backend:
    """Computes the steps of the converted graph; the base class computes all of them in float32."""

    name = "reference"  # name of the backend in reports
    follows_writes = False  # whether gradients pass in-place writes that autograd does not see

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the representation of a tensor whose dtype in the converted model is ``dtype``.

        Widens 16-bit tensors, and float64 that the converted model narrows, to float32.
        """
        narrowed = tensor.dtype is torch.float64 and dtype in LOW_PRECISION_DTYPES
        return tensor.float() if narrowed else widened_tensor(tensor)

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the step's argument templates, with nodes in the places of values.

        These have float32 in place of 16-bit dtypes, and undo the policy's changes to arguments.
        """
        exact = step.site.original_args if step.site is not None else {}
        if not exact:
            return step.float32_arguments
        args, kwargs = step.float32_arguments
        args = tuple(exact.get(position, value) for position, value in enumerate(args))
        return args, {name: exact.get(name, value) for name, value in kwargs.items()}

    def rounds(self, step: Step) -> bool:
        """Return whether the step may differ from the reference on equal inputs."""
        return step.rounds

    def represented_result(
        self, tensor: torch.Tensor, dtype: torch.dtype | None, operands: Iterable[Any]
    ) -> torch.Tensor:
        """Represent a new result of ``operands``, whose memory may be overwritten."""
        return self.represent(tensor, dtype)

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the step's result in this backend's representation."""
        return step.target(*args, **kwargs)

    def call_differentiably(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the step's result with the graph that autograd differentiates for this backend."""
        return step.target(*args, **kwargs)

    def deriving(self, step: Step) -> AbstractContextManager[Any]:
        """Return the context in which autograd computes the gradients of the step's inputs."""
        return contextlib.nullcontext()


class Float32Backend(Backend):
    """The reference: every 16-bit dtype of the graph becomes float32."""


class Emulated(Backend):
    """Emulates 16 bits in float32 carriers: inputs and results are rounded, arithmetic is float32.

    This matches a tensor core with float32 accumulation. Values are cast to the format and back, so they
    overflow to infinity and underflow to subnormals or zero as they do on the device.
    """

    name = "emulated"

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with float32 for 16-bit dtypes, and numbers as a 16-bit kernel reads them."""
        return step.emulated_arguments

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the rounded tensor in a float32 carrier."""
        return rounded(tensor, dtype)

    def represented_result(
        self, tensor: torch.Tensor, dtype: torch.dtype | None, operands: Iterable[Any]
    ) -> torch.Tensor:
        """Round in place where the result does not share memory with an operand."""
        if not tensor.is_contiguous():
            return self.represent(tensor, dtype)
        return _round_result(tensor, dtype, operands)

    def call_differentiably(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op in float32; its backward reads the rounded output.

        Saved statistics of a kernel (a mean, a logsumexp) differ in shape and stay in float32, as on a GPU.
        """
        dtype, value = step.dtypes[0], step.node.meta.get("val")
        if dtype not in LOW_PRECISION_DTYPES or step.random or not isinstance(value, torch.Tensor):
            return step.target(*args, **kwargs)
        addresses = {a.data_ptr() for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}

        def keep(saved: torch.Tensor) -> torch.Tensor:
            is_output = fits(saved, sizes_of(value)) and saved.dtype is torch.float32
            return rounded(saved, dtype) if is_output and saved.data_ptr() not in addresses else saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            return step.target(*args, **kwargs)

    def deriving(self, step: Step) -> AbstractContextManager[Any]:
        """Round each op of the derivative, which may be a formula of several."""
        op, dtype = overload_of(step.target), step.dtypes[0]
        if op is None or dtype not in LOW_PRECISION_DTYPES or not _derived_by_parts(op):
            return contextlib.nullcontext()
        return _RoundedOps(dtype)

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op in float32 and round its 16-bit outputs; mutated arguments are rounded in place."""
        if step.rounds_inside:
            return _in_true_dtypes(step, args, kwargs)
        if step.converted_operands:
            # round what type promotion converts to 16 bits
            low, dtype = step.converted_operands, step.computing
            args = tuple(rounded(_float(v), dtype) if at in low else v for at, v in enumerate(args))
            kwargs = {name: rounded(_float(v), dtype) if name in low else v for name, v in kwargs.items()}
        result = step.target(*args, **kwargs)
        if step.mutates:
            nodes = step.written(step.node.args, dict(step.node.kwargs))
            for node, tensor in zip(nodes, step.written(args, kwargs), strict=True):
                dtype = node_dtype(node)
                if dtype in LOW_PRECISION_DTYPES and isinstance(tensor, torch.Tensor):
                    _round_blocks(tensor, tensor, dtype)
        if step.in_place or not step.low_precision or not step.makes_values:
            return result
        return step.mapped(result, lambda item, dtype: _round_result(item, dtype, args))


class Native(Backend):
    """Runs the converted graph as deployed: in its true dtypes, on the device's own kernels."""

    name = "native"

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Cast a floating-point tensor to its dtype."""
        if dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the graph's own arguments."""
        return step.args, step.kwargs

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op in its dtypes; random ops run in float32, so that both runs draw the same numbers."""
        if step.in_place and step.site is not None and step.site.decision.reason == TOO_LARGE:
            limit = torch.finfo(args[0].dtype).max

            def overflowed(value: Any) -> Any:  # torch refuses to fill with a number beyond the format
                number = isinstance(value, int | float) and abs(value) > limit
                return math.copysign(math.inf, value) if number else value

            args, kwargs = pytree.tree_map(overflowed, (args, kwargs))
        if not step.random or not step.low_precision:
            return step.target(*args, **kwargs)
        wide, wide_kwargs = widened(args), widened(kwargs)
        wide = [widened_tensor(a) if isinstance(a, torch.Tensor) else a for a in wide]
        result = step.target(*wide, **wide_kwargs)
        return result.to(step.dtypes[0]) if isinstance(result, torch.Tensor) else result

    def call_differentiably(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op in its dtypes, with autograd's own backward."""
        return self.call(step, args, kwargs)


def choose_backend(device: torch.device) -> Emulated | Native:
    """Return the native backend for CUDA and XPU, whose kernels compute in 16 bits, else the emulated one."""
    return Native() if device.type in ("cuda", "xpu") else Emulated()


def rounded(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Round to a 16-bit format and back to the carrier, in a new tensor; other dtypes pass unchanged."""
    if tensor.is_complex():
        return rounded_components(tensor) if dtype is torch.complex32 else widened_tensor(tensor)
    if dtype not in LOW_PRECISION_DTYPES or not tensor.is_floating_point():
        return widened_tensor(tensor)
    if tensor.dtype is not torch.float32:
        return tensor.to(dtype).float()
    return _round_blocks(tensor, torch.empty_like(tensor), dtype)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_floating_point() else tensor.float()


def _round_result(tensor: torch.Tensor, dtype: torch.dtype | None, args: Iterable[Any]) -> torch.Tensor:
    """Round an op's output in place, unless it shares memory with an input."""
    if (
        tensor.dtype is not torch.float32
        or dtype not in LOW_PRECISION_DTYPES
        or _shares_memory(tensor.untyped_storage().data_ptr(), args)
    ):
        return rounded(tensor, dtype)
    return _round_blocks(tensor, tensor, dtype)


def _shares_memory(address: int, values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().data_ptr() == address:
                return True
        elif isinstance(value, list | tuple) and _shares_memory(address, value):
            return True
    return False


def _round_blocks(tensor: torch.Tensor, into: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round block by block, so that the 16-bit copy stays in the cache."""
    source, target = flat_pair(tensor, into)
    if target.data_ptr() != into.data_ptr() or tensor.numel() == 0:
        return into.copy_(tensor.to(dtype))
    scratch = torch.empty(min(BLOCK, source.numel()), dtype=dtype, device=tensor.device)
    for start in range(0, source.numel(), BLOCK):
        part = source[start : start + BLOCK]
        target[start : start + BLOCK].copy_(scratch[: part.numel()].copy_(part))
    return into


@functools.cache
def _derived_by_parts(op: OpOverload) -> bool:
    """Return whether every op of the derivative rounds, as it does unless CUDA has one kernel for it."""
    whole = having("one_kernel", "derived_in_one_kernel") - having("derived_by_parts")
    return not is_foreign(op) and base_name(op) not in whole


class _RoundedOps(TorchDispatchMode):
    """Rounds the result of every op."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if base_name(func) in having("derived_in_own_type"):
            args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._dtype), args)
            return func(*args, **(kwargs or {})).float()
        result = func(*args, **(kwargs or {}))
        if is_view(func) or not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
            return result
        if result.is_sparse:
            return result  # it is rounded once it is dense
        low = rounded(result, self._dtype)
        return result.copy_(low) if mutated_arguments(func) else low


def _in_true_dtypes(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op on tensors of its true dtypes, and return float32 carriers."""
    template = pytree.tree_leaves((step.args, step.kwargs))
    values, structure = pytree.tree_flatten((args, kwargs))
    true = [_as_in_graph(*pair) for pair in zip(template, values, strict=True)]
    true_args, true_kwargs = pytree.tree_unflatten(true, structure)
    op = overload_of(step.target)
    assert op is not None
    if isinstance(step.target, OnCopy):
        true_args = (true_args[0].clone(), *true_args[1:])
    result = call_in_low_precision(op, true_args, true_kwargs)
    targets = step.written(args, kwargs)
    for target, updated in zip(targets, step.written(true_args, true_kwargs), strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(updated)
    if step.in_place:
        return targets[0]
    return step.mapped(result, rounded)


def _as_in_graph(template: Any, value: Any) -> Any:
    """Return a carrier in the dtype of its node, or the graph's own constant."""
    if not isinstance(template, fx.Node):
        return template
    dtype = node_dtype(template)
    real = isinstance(value, torch.Tensor) and not value.is_complex()
    return value.to(dtype) if real and dtype in LOW_PRECISION_DTYPES else value


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
        UsageError: A word is not one of ``CONTRACTS``.
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

    def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op under the contract, and limit the range of its result."""
        stepwise = self._in_rounding_steps(step, args, kwargs)
        result = stepwise if stepwise is not None else super().call(step, args, kwargs)
        if not step.low_precision or not step.makes_values:
            return result
        changed = step.mapped(result, self._limit)
        return result.copy_(changed) if step.mutates and isinstance(result, torch.Tensor) else changed

    def _limit(self, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype not in LOW_PRECISION_DTYPES:
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
    if not a.shape[-1]:
        return r(a @ b)
    pieces = zip(a.split(TERMS, -1), b.split(TERMS, -2), strict=True)
    return _accumulated((first @ second for first, second in pieces), r)


def _accumulated(parts: Iterable[torch.Tensor], r: Rounding) -> torch.Tensor:
    """Add up parts one after the other, and round each part and each sum."""
    return functools.reduce(lambda total, part: r(total + part), map(r, parts))


def _linear(arguments: Arguments, r: Rounding) -> torch.Tensor:
    total = _products(arguments["input"], arguments["weight"].t(), r)
    return total if arguments.get("bias") is None else r(total + arguments["bias"])


def _matmul(arguments: Arguments, r: Rounding) -> torch.Tensor | None:
    first, second = arguments["self"], arguments["other"] if "other" in arguments else arguments["mat2"]
    return _products(first, second, r) if first.ndim > 1 and second.ndim > 1 else None


def _conv2d(arguments: Arguments, r: Rounding) -> torch.Tensor | None:
    x, weight = arguments["input"], arguments["weight"]
    if arguments.get("groups", 1) != 1 or x.ndim != 4 or not x.shape[1]:
        return None
    step = max(TERMS // (weight.shape[2] * weight.shape[3]), 1)
    options = {k: arguments[k] for k in ("stride", "padding", "dilation") if k in arguments}
    pieces = zip(x.split(step, 1), weight.split(step, 1), strict=True)
    total = _accumulated((torch.conv2d(*piece, None, **options) for piece in pieces), r)
    return total if arguments.get("bias") is None else r(total + arguments["bias"][:, None, None])


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


def rows_of_norm(x: torch.Tensor, arguments: Arguments) -> tuple[torch.Tensor, list[int]]:
    """Return the input of a norm or a variance, and the axes over which it takes each mean; all if empty."""
    if "num_groups" in arguments:
        return x.reshape(x.shape[0], int(arguments["num_groups"]), -1), [-1]
    if "normalized_shape" in arguments:
        return x, list(range(-len(arguments["normalized_shape"]), 0))
    if "running_mean" in arguments:
        return x, [axis for axis in range(x.ndim) if axis != 1]
    axes = arguments.get("dim")
    return x, [] if axes is None else axes


def _norm(arguments: Arguments, r: Rounding, *, centred: bool = True) -> torch.Tensor:
    x, axes = rows_of_norm(arguments["input"], arguments)
    eps = arguments.get("eps", 1e-5 if centred else None)
    centre = r(x - r(x.mean(axes, keepdim=True))) if centred else x
    variance = r(r(centre * centre).mean(axes, keepdim=True))
    inverse = r(torch.rsqrt(r(variance + (1.2e-7 if eps is None else float(eps)))))
    value = r(centre * inverse).reshape(arguments["input"].shape)
    for name, function in (("weight", torch.mul), ("bias", torch.add)):
        if (operand := arguments.get(name)) is not None:
            by_channel = "num_groups" in arguments
            operand = operand.reshape(-1, *[1] * (value.ndim - 2)) if by_channel else operand
            value = r(function(value, operand))
    return value


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
    "layer_norm": _norm,
    "rms_norm": functools.partial(_norm, centred=False),
    "group_norm": _norm,
    "softmax": _softmax,
}
