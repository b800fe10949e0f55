"""Tells which dtypes kernels take, by calling them on zeros and reading their errors.

Where CUDA has a kernel that the CPU lacks, such as half-precision Fourier transforms, the meta device
describes its result.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.trace.fake_model import fake_like
from ampaudit.trace.internals import (
    FakeTensor,
    ProxyTorchDispatchMode,
    unset_fake_temporarily,
    without_autocast,
    without_modes,
)
from ampaudit.trace.isolation import seeded
from ampaudit.trace.op_calls import OpCalled, record_described
from ampaudit.trace.opnames import (
    argument_names,
    base_name,
    empty_example,
    example_size,
    is_foreign,
    named_arguments,
    on_meta,
)
from ampaudit.trace.values import LOW_PRECISION_DTYPES, WIDE, dtype_name

# the kernels of all Fourier ops; their second argument is the transformed dimensions
TRANSFORMS = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
_TO_REAL = ("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn")
# what torch says where an op has no kernel for a 16-bit format
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|Unsupported dtype|[Ll]ow precision dtypes not"
    r"|[Ff]loat (and|or) [Dd]ouble"
)
# arguments that CUDA kernels convert to the dtype of the tensor, which raises where they do not fit: found by
# calling every op of ATen with each of its numbers beyond the largest of float16 and bfloat16
_CONVERTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("masked_fill fill index_fill scatter pad constant_pad_nd".split(), ("value",)),
    **dict.fromkeys(("full", "full_like", "new_full"), ("fill_value",)),
    **dict.fromkeys(("hardshrink", "softshrink"), ("lambd",)),
    **dict.fromkeys(("addr", "index_add"), ("alpha", "beta")),
    **dict.fromkeys(("linspace", "logspace"), ("start", "end")),
    "threshold": ("threshold", "value"),
    "pow": ("exponent",),
    "where": ("self", "other"),
}
# ops whose meta functions take formats that no kernel takes: there is no complex bfloat16
_UNCHECKED = frozenset({"complex", "polar"})
_LARGEST = 1 << 20  # elements of the arguments that a trial computes with


def says_no_kernel(error: Exception) -> bool:
    """Return whether an error of torch's says that an op has no kernel for a 16-bit format."""
    return bool(_NO_KERNEL.search(str(error)))


def takes_low_precision(called: OpCalled) -> bool:
    """Return whether an argument of a call is a 16-bit tensor."""
    return any(tensor.dtype in LOW_PRECISION_DTYPES for tensor in called.tensors)


class KernelTrials:
    """Calls kernels on zeros to learn which dtypes they accept, which meta functions do not check.

    Ops that communicate with other processes are not tried.
    """

    def __init__(self) -> None:
        self._refused: dict[tuple[Any, ...], bool] = {}
        self._complaints: dict[tuple[Any, ...], str | None] = {}

    def refuses(self, called: OpCalled) -> bool:
        """Return whether an op that has to be tried raises for 16-bit tensors, but not for FP32."""
        if not _is_tried(called.op) or not takes_low_precision(called) or "c10d" in called.op.namespace:
            return False
        key = (called.op, repr(pytree.tree_map_only(torch.Tensor, _signature, (called.args, called.kwargs))))
        if key not in self._refused:
            self._refused[key] = _error(called) is not None and _error(called, wide=True) is None
        return self._refused[key]

    def complaint(self, called: OpCalled) -> str | None:
        """Return torch's error if an op rejects its mix of floating-point dtypes; ``None`` if it does not.

        Only a mix with a 16-bit dtype counts, and only if the op accepts float32 in place of 16 bits.
        """
        dtypes = tuple(tensor.dtype for tensor in called.tensors)
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        if len(floats) < 2 or floats.isdisjoint(LOW_PRECISION_DTYPES) or "c10d" in called.op.namespace:
            return None
        key = (called.op, *dtypes)
        if key not in self._complaints:
            error = _error(called)
            refused = error is not None and not says_no_kernel(error) and _error(called, wide=True) is None
            self._complaints[key] = str(error).partition("\n")[0] if refused else None
        return self._complaints[key]


def rejected_number(called: OpCalled) -> str | None:
    """Return a number that a kernel converts to a 16-bit dtype and that does not fit, with the dtype."""
    names = _CONVERTED.get(base_name(called.op).rstrip("_"))
    if names is None:
        return None
    arguments = called.named
    tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
    dtype = arguments.get("dtype") or next((t.dtype for t in tensors if t.dtype is not torch.bool), None)
    if dtype not in LOW_PRECISION_DTYPES:
        return None
    limit = torch.finfo(dtype).max
    for name in names:
        number = arguments.get(name)
        if isinstance(number, int | float) and limit < abs(number) < math.inf:
            return f"{number:g} in {dtype_name(dtype)}"
    return None


def _is_tried(op: OpOverload) -> bool:
    """Return whether only the kernel of an op tells what it takes."""
    return is_foreign(op) or base_name(op) in _UNCHECKED


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(example_size, tensor.shape)), tensor.dtype, tensor.device


def _error(called: OpCalled, *, wide: bool = False) -> Exception | None:
    """Return the error of an op on zeros of the same sizes; ``wide`` tries float32 instead of 16 bits.

    Large tensors are tried on the meta device.
    """
    large = sum(math.prod(map(example_size, tensor.shape)) for tensor in called.tensors) > _LARGEST

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
        device = torch.device("meta") if large and not _is_tried(called.op) else tensor.device
        return empty_example(tensor, dtype, device).zero_()

    try:
        with without_modes(), torch.no_grad(), without_autocast(), seeded(0):
            args, kwargs = pytree.tree_map_only(torch.Tensor, zeros, (called.args, called.kwargs))
            args, kwargs = pytree.tree_map_only(torch.SymInt, example_size, (args, kwargs))
            called.op(*args, **kwargs)
    except Exception as error:  # whatever a kernel raises
        return error
    return None


def is_fourier(op: OpOverload) -> bool:
    """Return whether an op is a Fourier transform, such as ``fft_rfft`` or ``stft``."""
    base = base_name(op)
    return op.namespace == "aten" and (base in ("stft", "istft") or base.startswith(("fft_", "_fft_")))


def signal_sizes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the sizes that an op transforms, taken from the output if that is real."""
    base, arguments = base_name(op), named_arguments(op, args, kwargs)
    if "n_fft" in arguments:
        return [int(arguments["n_fft"])]
    shape = [int(size) for size in arguments["self"].shape]
    to_real = base in _TO_REAL
    if base == "_fft_c2r":
        return [*(shape[d] for d in arguments["dim"][:-1]), int(arguments["last_dim_size"])]
    lengths = arguments.get("s", arguments.get("n"))
    dims = arguments.get("dim", (-2, -1) if base.endswith("2") else -1 if "n" in argument_names(op) else None)
    if dims is None:
        dims = range(-len(lengths), 0) if lengths is not None else range(len(shape))
    dims = [dims] if isinstance(dims, int) else list(dims)
    sizes = [shape[d] for d in dims]
    if to_real and sizes:
        sizes[-1] = 2 * (sizes[-1] - 1)
    lengths = [lengths] if isinstance(lengths, int) else lengths or [-1] * len(sizes)
    return [size if length == -1 else int(length) for size, length in zip(sizes, lengths, strict=True)]


def record_half_fourier(mode: ProxyTorchDispatchMode, called: OpCalled) -> Any:
    """Record a float16 transform that CUDA supports; ``NotImplemented`` otherwise."""
    fakes = [tensor for tensor in called.tensors if isinstance(tensor, FakeTensor)]
    if not fakes or any(n & (n - 1) for n in signal_sizes(called.op, called.args, called.kwargs)):
        return NotImplemented
    try:
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map_only(torch.Tensor, on_meta, (called.args, called.kwargs))
            described = called.op(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return NotImplemented
    result = fake_like(described, fakes[0].fake_mode, described.dtype, fakes[0].device)
    return record_described(mode, called, result)
