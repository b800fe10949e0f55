"""Calls ops on 16-bit tensors if a device does more than compute in float32 and round once.

There are four kinds of such ops. A composite op calls others, each of which rounds: ``logsumexp`` stores a
sum of exponentials in 16 bits. An accumulating op (``scatter_add``) rounds after each addition. Some ops
depend on the format itself: ``nan_to_num`` replaces infinity by the format's largest number. For ops from
outside PyTorch, only their own kernels define what they do in 16 bits.

The CPU accumulates some of them in float32. Here they all go through ``index_put_``, whose CPU kernel adds
one element after the other in the tensor's own dtype. A GPU adds in an order that varies from run to run: the
size of the error is the same, its value is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.ops import having
from ampaudit.run.measure import rounded_components
from ampaudit.trace.kernels import TRANSFORMS, is_fourier, signal_sizes
from ampaudit.trace.opnames import (
    argument_names,
    base_name,
    composite_kernel,
    is_foreign,
    is_view,
    mutated_arguments,
    named_arguments,
    on_meta,
    rounds_once,
    selects,
)
from ampaudit.trace.values import (
    LOW_PRECISION_DTYPES,
    computing_dtype,
    converted_numbers,
    is_converted,
    promoted,
    tensors_in,
)

Arguments = dict[str, Any]
# values of ``reduce`` with which an op adds
_ADDS: dict[str, tuple[str | None, ...]] = {
    "index_add": (None,),
    "index_reduce": ("mean",),
    "scatter": ("add",),
    "scatter_add": (None,),
    "scatter_reduce": ("sum", "mean"),
}


def differs_from_one_rounding(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call with these (fake) arguments must run on 16-bit tensors."""
    if op.namespace != "aten":
        return is_foreign(op)
    if is_fourier(op) or str(op) == "aten.view.dtype" or _runs_natively(op) or accumulates(op, args, kwargs):
        return True
    if is_view(op) or _parts(op) is None:
        return False
    if base_name(op) in having("shared_function"):
        return True
    counter = _InnerOps(run=False)
    try:
        with torch.no_grad():
            counter.call(op, *pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return True  # the ops that it calls depend on values
    return counter.roundings > 1


def call_in_low_precision(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op on tensors of its true dtypes; each inner op is computed in float32 and rounded.

    Complex numbers are complex64 here, whatever their dtype in the graph, and results of Fourier transforms
    are in float32 or complex64.
    """
    if not is_fourier(op):
        return _InnerOps().call(op, args, kwargs)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.is_complex() else t.float(), (args, kwargs)
    )
    with _RoundedTransforms():
        result = op(*args, **kwargs)
    return rounded_components(result)


class _RoundedTransforms(TorchDispatchMode):
    """Rounds the result of every transform, before and after its scaling.

    cuFFT returns float16 before scaling: the zero frequency is the sum of all elements, which may overflow
    before a scale of 1/n is applied.
    """

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if base_name(func) not in TRANSFORMS:
            return func(*args, **(kwargs or {}))
        values, dims, normalization, *rest = args
        raw = rounded_components(func(values, dims, 0, *rest))
        size = math.prod(signal_sizes(func, args, {}))
        scale = (1.0, 1 / math.sqrt(size), 1 / size)[normalization]
        return raw if scale == 1 else rounded_components(raw * scale)


class _InnerOps(TorchDispatchMode):
    """Intercepts every op that a kernel calls, and runs it in float32.

    Without ``run``, tensors are on the meta device, and only ``roundings`` are counted.
    """

    def __init__(self, run: bool = True) -> None:
        super().__init__()
        self.roundings = 0
        self._run = run
        self._within: tuple[OpOverload, ...] = ()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op by its parts, if any; a kernel that calls itself is a leaf."""
        args = _with_tensors(op, args)
        if self._run and accumulates(op, args, kwargs):
            return accumulate(op, args, kwargs)
        parts = None if op in self._within else _parts(op)
        on_meta_only = not self._run and base_name(op) in having("shared_function")
        self.roundings += on_meta_only
        if parts is None or on_meta_only:
            return self._leaf(op, args, kwargs)
        outer, self._within = self._within, (*self._within, op)
        try:
            with self:
                return parts(*args, **kwargs)
        finally:
            self._within = outer

    def _leaf(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        low = [t for t in tensors_in((args, kwargs)) if t.dtype in LOW_PRECISION_DTYPES]
        moves = is_view(op) or selects(op) or base_name(op) in having("memory")
        if not low or moves or _runs_natively(op) or not self._run:
            result = op(*args, **kwargs)
            self.roundings += not moves and any(t.dtype in LOW_PRECISION_DTYPES for t in tensors_in(result))
            return result
        return _rounded_once(op, args, kwargs)


def _rounded_once(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a leaf in float32, like an accumulating kernel, and round its 16-bit results."""
    computing = computing_dtype(op, args, kwargs)
    if computing is not None:
        args, kwargs = converted_numbers(op, args, kwargs, computing)
    wide: dict[int, torch.Tensor] = {}

    def widen(value: Any) -> Any:
        if computing is not None and is_converted(value, computing):
            value = value.to(computing)
        if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION_DTYPES:
            return wide.setdefault(id(value), value.float())
        return torch.float32 if isinstance(value, torch.dtype) and value in LOW_PRECISION_DTYPES else value

    result = op(*pytree.tree_map(widen, args), **pytree.tree_map(widen, kwargs))
    targets = [args[p] if p < len(args) else None for p in mutated_arguments(op)]
    targets += [kwargs.get(argument_names(op)[p]) for p in mutated_arguments(op)]
    for original in (t for t in targets if isinstance(t, torch.Tensor) and id(t) in wide):
        if original.shape != wide[id(original)].shape:
            original.resize_(wide[id(original)].shape)
        original.copy_(wide[id(original)])
    originals = {id(wide[id(t)]): t for t in tensors_in((args, kwargs)) if id(t) in wide}
    dtype = named_arguments(op, args, kwargs).get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype = promoted(tensors_in((args, kwargs)))

    def narrow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        return value.to(dtype) if value.dtype is torch.float32 and dtype in LOW_PRECISION_DTYPES else value

    return pytree.tree_map(narrow, result)


def _with_tensors(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn numbers into tensors where the op takes tensors, since kernels pass them as numbers."""
    wants = _tensor_arguments(op)
    low = next((t.dtype for t in tensors_in(args) if t.dtype in LOW_PRECISION_DTYPES), None)
    return tuple(
        torch.tensor(value, dtype=low if isinstance(value, float) else None)
        if position in wants and isinstance(value, int | float)
        else value
        for position, value in enumerate(args)
    )


@cache
def _tensor_arguments(op: OpOverload) -> frozenset[int]:
    kinds = enumerate(str(argument.type) for argument in op._schema.arguments)
    return frozenset(position for position, kind in kinds if kind in ("Tensor", "Optional[Tensor]"))


@cache
def _runs_natively(op: OpOverload) -> bool:
    # div.Tensor_mode rounds to an integer
    return base_name(op) in having("own_type") or op._overloadname.endswith("_mode") or is_foreign(op)


@cache
def _parts(op: OpOverload) -> Callable[..., Any] | None:
    """Return a function that calls a composite op and dispatches its parts; ``None`` if it has none."""
    if base_name(op) in having("shared_function"):
        return lambda *args, **kwargs: op._op_dk(DispatchKey.CPU, *args, **kwargs)
    return None if rounds_once(op) or is_foreign(op) else composite_kernel(op)


def accumulates(op: OpOverload, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    """Return whether the call adds up elements in a 16-bit tensor one by one."""
    adds = _ADDS.get(base_name(op).rstrip("_")) if op.namespace == "aten" else None
    if adds is None or args[0].dtype not in LOW_PRECISION_DTYPES:
        return False
    return named_arguments(op, args, kwargs).get("reduce") in adds


def multiplies(op: OpOverload, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    """Return whether the call multiplies elements one by one, which is not emulated."""
    reduces = op.namespace == "aten" and base_name(op).rstrip("_") in _ADDS
    return reduces and named_arguments(op, args, kwargs).get("reduce") in ("prod", "multiply")


def accumulate(op: OpOverload, args: tuple[Any, ...], kwargs: Arguments) -> torch.Tensor:
    """Compute an accumulating call, in its first argument if the op is in-place."""
    arguments = named_arguments(op, args, kwargs)
    result = arguments["self"].clone()
    into = result.reshape(1) if result.ndim == 0 else result
    index = arguments["index"].reshape(1) if arguments["index"].ndim == 0 else arguments["index"]
    whole = base_name(op).startswith("index")  # each index selects a whole slice
    places = _places(into, arguments["dim"] % into.ndim, index, whole)
    values = _values(arguments, into, index, whole)
    include_self = arguments.get("include_self", True)
    if not include_self:
        into.index_put_(places, into.new_zeros(()))
    into.index_put_(places, values, accumulate=True)
    if arguments.get("reduce") == "mean":
        counts = torch.full_like(into, float(include_self))
        counts.index_put_(places, torch.ones_like(values), accumulate=True)
        into.div_(counts.masked_fill_(counts == 0, 1))
    result = into.reshape(result.shape)
    return arguments["self"].copy_(result) if mutated_arguments(op) else result  # type: ignore[no-any-return]


def _places(into: torch.Tensor, dim: int, index: torch.Tensor, whole: bool) -> tuple[torch.Tensor, ...]:
    """Return, for each dimension, coordinates that broadcast to the shape of the values."""
    sizes = [into.shape[d] if whole else index.shape[d] for d in range(into.ndim)]
    places = []
    for d, size in enumerate(sizes):
        shape = [1] * into.ndim
        shape[d] = -1
        places.append(torch.arange(size, device=into.device).view(shape))
    places[dim] = index.view([-1 if d == dim else 1 for d in range(into.ndim)]) if whole else index
    return tuple(places)


def _values(arguments: Arguments, into: torch.Tensor, index: torch.Tensor, whole: bool) -> torch.Tensor:
    source = next(arguments[name] for name in ("source", "src", "value") if name in arguments)
    if not isinstance(source, torch.Tensor):
        return torch.full(index.shape, source, dtype=into.dtype, device=into.device)
    source = source.reshape(1) if source.ndim == 0 else source
    if whole:
        return source * arguments["alpha"] if arguments.get("alpha", 1) != 1 else source
    return source[tuple(slice(0, size) for size in index.shape)]
