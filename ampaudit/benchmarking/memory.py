"""Measures and predicts the peak memory of a step, as torch's allocator counts it.

A prediction runs the step on fake tensors, which compute nothing, while torch's memory tracker counts every
allocation as long as it lives. Workspaces inside kernels are not included.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType as EventType
from torch._subclasses.fake_tensor import FakeTensorMode

from ampaudit.benchmarking.modes import BenchSetup, ModeRunner, batch_size_of
from ampaudit.devices.estimate import OpCost, OpCounter
from ampaudit.report.bench import Memory
from ampaudit.trace.fake_model import make_fake_model, named_tensors
from ampaudit.trace.state import TraceCache
from ampaudit.training.train import make_optimizer, optimizer_state

_SHARED = ("_ampaudit_compiled", "_ampaudit")  # attributes with graphs, which copies share


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Count the bytes of parameters, buffers, gradients and optimizer state; shared storages count once."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return storage_bytes([*tensors, *(optimizer_state(optimizer) if optimizer is not None else [])])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the storages of tensors; a shared storage counts once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak of allocated memory during a step, in bytes.

    Attributes:
        total: Peak of all allocations.
        workspace: Part that kernels allocate and free themselves; ``None`` on a GPU, where it is unknown.
            This part differs between machines, because libraries choose kernels by processor (oneDNN packs
            weights for AMX); the rest does not.
    """

    total: int
    workspace: int | None


def measure_peak(step: Callable[[], object], live: int, device: torch.device) -> Peak:
    """Measure the peak of allocated memory during a step.

    On a GPU, this is torch's own count. On a CPU, it is the bytes allocated before (``live``) plus the
    highest running sum of the allocations and frees in the step, which torch's profiler records.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return Peak(int(torch.cuda.max_memory_allocated(device)), None)
    calls = _profile(step)
    total = _peak_sum(calls)
    return Peak(live + total, total - _peak_sum(_without_workspaces(calls)))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the allocator, with times in nanoseconds."""

    time: int
    size: int  # bytes; negative for a free
    address: int
    kernel_end: int  # of the kernel that made the call; 0 outside of a kernel


def _profile(step: Callable[[], object]) -> list[_Call]:
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
    """Return the names of ops that compute, without those that only call other ops."""
    composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(name.split(".")[0] for name in every) - {name.split(".")[0] for name in composite}


def _without_workspaces(calls: list[_Call]) -> list[_Call]:
    """Remove the calls for workspaces: memory that a kernel allocates, and frees before it ends."""
    remaining = dict(enumerate(calls))
    alive: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.size > 0:
            alive[call.address] = index
            continue
        allocation = alive.pop(call.address, None)
        if allocation is not None and call.time <= calls[allocation].kernel_end:
            del remaining[allocation], remaining[index]
    return list(remaining.values())


def _peak_sum(calls: list[_Call]) -> int:
    return max(itertools.accumulate((call.size for call in calls), initial=0))


def predict_step(
    runner: ModeRunner, setup: BenchSetup, *, size: int | None = None
) -> tuple[Memory, list[OpCost]]:
    """Predict the memory at the peak of a step, and the cost of its ops.

    The runner's model must have run once with inputs of this shape. By default, the batch size is the
    setup's.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _fake_copy(runner.model, mode)
    batch = setup.source.batches[0]
    batch_size = batch_size_of(batch)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        dtype = runner.dtype if runner.dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = list(tensor.shape)
        if size is not None and shape and shape[0] == batch_size:
            shape[0] = size
        with mode:
            return torch.empty(shape, dtype=dtype, device=setup.device)

    fake = batch.mapped(shaped)
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = runner.training
        if training is not None:  # without the scaler, which would read values
            optimizer = make_optimizer(setup.source, model)
            training = replace(training, model=model, optimizer=optimizer, scaler=None)
        fake_runner = replace(runner, model=model, training=training)
        if training is not None:
            fake_runner.step(fake)  # the first step creates the optimizer's state
        tracker = MemTracker()
        tracker.track_external(model, *([fake_runner.optimizer] if fake_runner.optimizer else []))
        with tracker:
            fake_runner.step(fake)
        peak = tracker.get_tracker_snapshot("peak")
        with OpCounter() as counter:
            fake_runner.step(fake)
    total, gradients = _sum(peak, "Total"), _sum(peak, "GRAD")
    return _split(fake_runner, runner.masters, total, gradients), counter.ops


def holds_graph(model: nn.Module) -> bool:
    """Return whether a model runs a graph, which is valid for one input shape only."""
    return any(name in vars(model) for name in _SHARED)


def _sum(snapshot: Any, kind: str) -> int:
    """Sum one kind of memory over devices; the keys are enumeration members, except for the total."""
    return sum(
        int(count)
        for device in snapshot.values()
        for key, count in device.items()
        if str(getattr(key, "name", key)) == kind
    )


def _split(runner: ModeRunner, masters: frozenset[str], total: int, gradients: int) -> Memory:
    tensors = named_tensors(runner.model)
    master_bytes = storage_bytes(tensor for name, tensor in tensors.items() if name in masters)
    weights = storage_bytes(tensors.values()) - master_bytes
    optimizer = storage_bytes(optimizer_state(runner.optimizer)) if runner.optimizer is not None else 0
    rest = total - weights - master_bytes - gradients - optimizer
    return Memory(weights, master_bytes, gradients, optimizer, max(rest, 0))


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a module with fake tensors, keeping the parameters' ``requires_grad``."""
    with _without_graphs(model) as shared:
        fake, _ = make_fake_model(model, mode, {})
    for name, value in shared.items():
        setattr(fake, name, value.fixed() if isinstance(value, TraceCache) else value)
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in fake.named_parameters():
        parameter.requires_grad_(requires_grad[name])
    for module in fake.modules():  # the tracker cannot hook parameters without gradients
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, weight.detach())
    return fake


@contextlib.contextmanager
def _without_graphs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Remove the graphs that a copy of the module would share, while active."""
    shared = {name: vars(model)[name] for name in _SHARED if name in vars(model)}
    for name, value in shared.items():
        setattr(model, name, type(value)())
    try:
        yield shared
    finally:
        for name, value in shared.items():
            setattr(model, name, value)
