"""Predicts the peak memory of a step by running it on tensors without data.

Every allocation is made in order and counted while it lives (by torch's memory tracker), but nothing is
computed. Workspaces inside kernels are not included.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampaudit.benchmarking.memory import storage_bytes
from ampaudit.benchmarking.modes import BenchSetup, ModeRunner, batch_size_of
from ampaudit.devices.estimate import OpCost, OpCounter
from ampaudit.report.bench import Memory
from ampaudit.trace.fake_model import make_fake_model, named_tensors
from ampaudit.trace.keys import TraceCache
from ampaudit.training.step import make_optimizer, optimizer_state

__all__ = ["holds_graph", "predict_step"]

_SHARED = ("_ampaudit_compiled", "_ampaudit")  # attributes with graphs, which copies share


def predict_step(
    runner: ModeRunner, setup: BenchSetup, *, size: int | None = None
) -> tuple[Memory, list[OpCost]]:
    """Predict the memory at the peak of a step, and the cost of its ops.

    Args:
        runner: Mode, whose model has run once with inputs of this shape.
        setup: Conditions of the measurement.
        size: Batch size; that of the setup by default.
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
        fake_runner = _on_fake_model(runner, model, setup)
        if runner.training is not None:
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
    """Return whether a model runs a graph, which is specialized to one input shape."""
    return any(name in vars(model) for name in _SHARED)


def _on_fake_model(runner: ModeRunner, model: nn.Module, setup: BenchSetup) -> ModeRunner:
    """Return the mode with a fake model, and without the scaler, which would read values."""
    training = runner.training
    if training is not None:
        optimizer = make_optimizer(setup.source, model)
        training = replace(training, model=model, optimizer=optimizer, scaler=None)
    return replace(runner, model=model, training=training)


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
        fake = make_fake_model(model, mode, {}).model
    for name, value in shared.items():
        setattr(fake, name, value.fixed() if isinstance(value, TraceCache) else value)
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in fake.named_parameters():
        parameter.requires_grad_(wants[name])
    for module in fake.modules():  # the tracker cannot hook parameters without gradients
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, weight.detach())
    return fake


@contextlib.contextmanager
def _without_graphs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Remove, while active, the graphs that a copy of the module would share."""
    shared = {name: vars(model)[name] for name in _SHARED if name in vars(model)}
    for name, value in shared.items():
        setattr(model, name, type(value)())
    try:
        yield shared
    finally:
        for name, value in shared.items():
            setattr(model, name, value)
