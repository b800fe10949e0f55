"""Traces float16 Fourier transforms, which cuFFT supports for powers of two and CPUs lack.

A trace on CPU tensors cannot ask torch for their result: the meta device describes it instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.trace.fake_model import fake_like
from ampaudit.trace.internals import (
    FakeTensor,
    ProxyTorchDispatchMode,
    proxy_of,
    track_tensor_tree,
    unset_fake_temporarily,
)
from ampaudit.trace.opnames import argument_names, base_name, named_arguments, on_meta

__all__ = ["TRANSFORMS", "is_fourier", "record_half_fourier", "signal_sizes"]

# the kernels of all Fourier ops; their second argument is the transformed dimensions
TRANSFORMS = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
_TO_REAL = ("fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn")


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


def record_half_fourier(
    mode: ProxyTorchDispatchMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a float16 transform that CUDA supports; ``NotImplemented`` otherwise."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    if not fakes or any(size & (size - 1) for size in signal_sizes(op, args, kwargs)):
        return NotImplemented
    try:
        with unset_fake_temporarily():
            meta_leaves = [on_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            meta_args, meta_kwargs = pytree.tree_unflatten(meta_leaves, structure)
            described = op(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError):
        return NotImplemented
    result = fake_like(described, fakes[0].fake_mode, described.dtype, fakes[0].device)
    proxies = [proxy_of(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    proxy_args, proxy_kwargs = pytree.tree_unflatten(proxies, structure)
    proxy = mode.tracer.create_proxy("call_function", op, proxy_args, proxy_kwargs, name=base_name(op))
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
