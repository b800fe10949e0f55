"""Sets up the context of a run: exact float32, separate random numbers, errors with a next step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, RunFailed, first_line
from ampaudit.core.text import format_bytes

__all__ = ["exact_float32", "guarded", "refuse_broken_inputs", "refuse_larger_than_memory", "tf32"]


@contextlib.contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Set up the whole context; random numbers drawn inside do not affect later ones."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), exact_float32(), _memory_errors(device):
        yield


def exact_float32() -> contextlib.AbstractContextManager[None]:
    """Switch off TF32, so that the reference is float32."""
    return tf32(allowed=False)


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Switch TF32 on or off for products and convolutions of float32 tensors."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn
    torch.backends.cuda.matmul.allow_tf32 = allowed
    # cudnn.flags also works if the global flags are locked
    kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    try:
        with cudnn.flags(allow_tf32=allowed, benchmark_limit=cudnn.benchmark_limit, **kept):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


@contextlib.contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Turn out-of-memory and missing-kernel errors into errors with a next step."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"out of memory on {device}: the audit holds the FP32 and the 16-bit run at once",
            hint="use a smaller batch, --ranges (one FP32 run), or --device cpu",
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        text = first_line(error)
        if "allocate memory" in text:
            raise RunFailed(f"out of memory: {text}", hint="use a smaller batch, or --ranges") from error
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        raise RunFailed(f"{where}the converted model could not be run on {device}: {text}") from error


def refuse_larger_than_memory(graph: fx.Graph, device: torch.device) -> None:
    """Raise if one value of a graph alone is larger than the memory of the machine or the device.

    Raises:
        RunFailed: one is; the system might otherwise end the process without a word.
    """
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = psutil.virtual_memory().total
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            size = value.untyped_storage().nbytes()
            if isinstance(size, int) and size > available:
                raise RunFailed(
                    f"{node.target} computes a value of {format_bytes(size)}; {device} has "
                    f"{format_bytes(available)} of memory",
                    hint="use a smaller batch",
                )


def refuse_broken_inputs(tensors: list[torch.Tensor], number: int) -> None:
    """Raise for inputs that contain NaN or infinity.

    Raises:
        InputError: one holds NaN or infinity.
    """
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any()):
            raise InputError(
                f"input[{index}] of batch {number} holds NaN or infinity", hint="clean the input"
            )
