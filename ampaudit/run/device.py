"""Selects the device to run on, and describes it to policies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, RunFailed, UsageError, first_line
from ampaudit.core.text import format_bytes
from ampaudit.policy import TargetEnvironment
from ampaudit.source.interface import Batch

_OUT_OF_RANGE = ("out of range", "out of bounds", "class values must be smaller")
_ACCELERATORS = ("cuda", "mps", "xpu")


def pick_device(name: str, *, audits: bool = False) -> torch.device:
    """Return the device for ``auto``, ``cpu``, or an accelerator such as ``cuda``, ``cuda:1`` or ``mps``.

    Args:
        name: Value of ``--device``.
        audits: Whether values are measured on the device, in float64.

    Raises:
        UsageError: The device is not available here, or lacks float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type != "cpu" and (device.index or 0) >= _count(device.type):
        hint = f"available: {', '.join(available_devices())}"
        raise UsageError(f"--device {name} is not available here", hint=hint)
    if audits and device.type == "mps":
        raise UsageError(
            "--device mps has no float64, in which an audit measures",
            hint="use --device cpu: it emulates the same 16-bit formats",
        )
    return device


def available_devices() -> list[str]:
    """List the devices of this machine as values of ``--device``."""
    devices = ["cpu"]
    for kind in _ACCELERATORS:
        count = _count(kind)
        devices += [kind] if count == 1 else [f"{kind}:{number}" for number in range(count)]
    return devices


def _count(kind: str) -> int:
    """Count the usable devices of a kind."""
    backend = torch.get_device_module(kind)
    return int(backend.device_count()) if backend.is_available() else 0


def generators_of(device: torch.device) -> dict[str, Any]:
    """Return arguments for ``torch.random.fork_rng`` to also restore a device's generator."""
    if device.type == "cpu":
        return {"devices": []}
    return {"devices": [device.index or 0], "device_type": device.type}


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state(*_index(device))
    return state


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore the state of a device's random generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one, and its functions do not take it


def environment_of(device: torch.device) -> TargetEnvironment:
    """Return the compute capability (on CUDA only) and versions that rules depend on."""
    versions = {"torch": torch.__version__.partition("+")[0]}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if device.type != "cuda":
        return TargetEnvironment(None, versions)
    major, minor = torch.cuda.get_device_capability(device)
    return TargetEnvironment(major + minor / 10, versions)


@contextlib.contextmanager
def guarded(device: torch.device, batch: Batch | None = None) -> Iterator[None]:
    """Set up the context of a run, and restore the random state afterwards."""
    naming = contextlib.nullcontext() if batch is None else naming_indices(batch)
    with torch.random.fork_rng(**generators_of(device)), tf32(allowed=False), _memory_errors(device), naming:
        yield


@contextlib.contextmanager
def naming_indices(batch: Batch) -> Iterator[None]:
    """Report an index out of range, such as an unknown token id, as an error about the inputs.

    Raises:
        InputError: An index is out of range, and the batch contains integers.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        text = first_line(error)
        integers = ", ".join(_integers(batch))
        if not integers or not any(words in text.lower() for words in _OUT_OF_RANGE):
            raise
        raise InputError(
            f"{_noted_line(error)}an index is beyond its table ({text}); "
            f"the batch has the integers {integers}",
            hint="check the inputs against the sizes of embeddings, positions and classes",
        ) from error


def _integers(batch: Batch) -> Iterator[str]:
    """Describe the tensors of integers in a batch, with their ranges."""
    places = {"input": batch.args, "item": batch.item} | dict(batch.kwargs)
    visited: set[int] = set()
    for name, value in places.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in visited or not leaf.numel():
                continue
            visited.add(id(leaf))
            if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype is not torch.bool:
                yield f"{name}{pytree.keystr(path)} from {int(leaf.min()):,} to {int(leaf.max()):,}"


def _noted_line(error: Exception) -> str:
    """Return the source line that ``noting_source_line`` added to an error, as a prefix."""
    return "".join(f"{note}: " for note in getattr(error, "__notes__", ()))


@contextlib.contextmanager
def tf32(*, allowed: bool) -> Iterator[None]:
    """Switch TF32 on or off for products and convolutions; without it, they compute in full float32."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn
    torch.backends.cuda.matmul.allow_tf32 = allowed
    # cudnn.flags also works if the global flags are locked
    flags = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    try:
        with cudnn.flags(allow_tf32=allowed, benchmark_limit=cudnn.benchmark_limit, **flags):
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
    except (RuntimeError, NotImplementedError, IndexError) as error:
        text = first_line(error)
        if "allocate memory" in text:
            raise RunFailed(f"out of memory: {text}", hint="use a smaller batch, or --ranges") from error
        where = _noted_line(error)
        if "FakeTensor" in text:
            raise RunFailed(
                f"{where}the model computes values that torch.export does not record",
                hint="audit the model without torch.autograd.grad in its forward, or the part before it",
            ) from error
        raise RunFailed(f"{where}the converted model could not be run on {device}: {text}") from error


def refuse_larger_than_memory(graph: fx.Graph, device: torch.device) -> None:
    """Raise if a single value of a graph is larger than the memory of the machine or the device.

    Otherwise, the system might kill the process without a message.
    """
    available = _memory(device)
    for node in graph.nodes:
        size = max((size for _, _, size in storages_of(node)), default=0)
        if size > available:
            raise RunFailed(
                f"{node.target} computes a value of {format_bytes(size)}; {device} has "
                f"{format_bytes(available)} of memory",
                hint="use a smaller batch",
            )


def refuse_more_than_memory(graph: fx.Graph, device: torch.device, copies: int) -> None:
    """Raise if so many copies of all values of a graph exceed the memory of the device."""
    computed = (node for node in graph.nodes if node.op != "placeholder")
    sizes = {key: size for node in computed for _, key, size in storages_of(node)}
    needed, available = sum(sizes.values()) * copies, _memory(device)
    if needed > available:
        raise RunFailed(
            f"the gradients of a whole run need {format_bytes(needed)}; {device} has "
            f"{format_bytes(available)} of memory",
            hint="use a smaller batch",
        )


def _memory(device: torch.device) -> int:
    if device.type in ("cuda", "xpu"):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def storages_of(node: fx.Node) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield the tensors of a node with the identity and bytes of their storage, if those are known."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            storage = value.untyped_storage()
            size = storage.nbytes()
            if isinstance(size, int):
                yield value, storage._cdata, size


def refuse_broken_inputs(inputs: Mapping[str, torch.Tensor], title: str) -> None:
    """Raise for inputs, by name, that contain NaN or infinity."""
    for name, tensor in inputs.items():
        if tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any()):
            raise InputError(f"{name} of {title} holds NaN or infinity", hint="clean the input")
