"""Measures the peak memory of a step as counted by torch's allocator."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch._C._profiler import _EventType as EventType

from ampaudit.training.step import optimizer_state

__all__ = ["Peak", "live_bytes", "measure_peak", "storage_bytes"]


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Count the bytes of parameters, buffers, gradients and optimizer state; shared memory counts once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return storage_bytes([*tensors, *(optimizer_state(optimizer) if optimizer is not None else [])])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the storages of tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of allocated memory during a step, in bytes.

    Attributes:
        total: Peak of all allocations.
        workspace: Part that kernels allocate and free themselves; ``None`` on a GPU, where it is unknown.
            Libraries choose kernels by the processor (oneDNN packs weights for AMX), so this part differs
            between machines; the rest does not.
    """

    total: int
    workspace: int | None


def measure_peak(step: Callable[[], object], live: int, device: torch.device) -> Peak:
    """Measure the peak of allocated memory during a step.

    On a GPU, this is torch's own count. On a CPU, it is ``live``, the bytes allocated before, plus the
    highest running sum of the allocations and frees in the step, as recorded by torch's profiler.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return Peak(int(torch.cuda.max_memory_allocated(device)), None)
    calls = _profiled(step)
    total = _peak_sum(calls)
    return Peak(live + total, total - _peak_sum(_without_workspaces(calls)))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the allocator.

    Attributes:
        time: Time in nanoseconds.
        size: Bytes; negative for a free.
        address: Address of the memory.
        kernel_end: End of the kernel that made the call, in nanoseconds; 0 outside of a kernel.
    """

    time: int
    size: int
    address: int
    kernel_end: int


def _profiled(step: Callable[[], object]) -> list[_Call]:
    """Profile a step, and return the calls of the allocator by time; frees come first."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages at start and end
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    results = profiler.profiler.kineto_results
    kernels, calls = _kernels(), list[_Call]()
    todo = [(event, 0) for event in results.experimental_event_tree()]
    while todo:
        event, kernel_end = todo.pop()
        fields = event.typed[1]
        if event.tag == EventType.Allocation:
            calls.append(_Call(event.start_time_ns, fields.alloc_size, fields.ptr, kernel_end))
        elif not kernel_end and event.tag == EventType.TorchOp and event.name in kernels:
            kernel_end = event.end_time_ns
        todo += [(child, kernel_end) for child in event.children]
    return sorted(calls, key=lambda call: (call.time, call.size))


def _kernels() -> frozenset[str]:
    """Return the ops that compute, without those that only call other ops."""
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(name.split(".")[0] for name in every) - {name.split(".")[0] for name in composite}


def _without_workspaces(calls: list[_Call]) -> list[_Call]:
    """Leave out workspaces: memory that a kernel allocated and freed before it ended."""
    remaining = dict(enumerate(calls))
    alive: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.size > 0:
            alive[call.address] = index
        elif (allocation := alive.pop(call.address, None)) is not None and call.time <= calls[
            allocation
        ].kernel_end:
            del remaining[allocation], remaining[index]
    return list(remaining.values())


def _peak_sum(calls: list[_Call]) -> int:
    return max(itertools.accumulate((call.size for call in calls), initial=0))
