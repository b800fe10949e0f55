"""Peak memory of a step before it is run: the step is taken on tensors that have shapes and no data.

Every allocation of the step then happens in its order, and is counted with its life (torch's own memory
tracker), but nothing is computed. What kernels allocate inside themselves is not seen.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampaudit.bench.batches import batch_size_of
from ampaudit.bench.estimate import OpCost, OpCounter
from ampaudit.bench.memory import storage_bytes
from ampaudit.bench.modes import BenchSetup, ModeRunner
from ampaudit.report.bench import Memory
from ampaudit.trace.fake_model import make_fake_model, named_tensors
from ampaudit.trace.keys import TraceCache
from ampaudit.training.variants import make_optimizer, optimizer_state

__all__ = ["holds_graph", "predict_step"]

_SHARED = ("_ampaudit_compiled", "_ampaudit")  # graphs that a copy may use as they are


def predict_step(
    built: ModeRunner, subject: BenchSetup, *, size: int | None = None
) -> tuple[Memory, list[OpCost]]:
    """The split at the peak of a step, and the ops of another one.

    Args:
        built: a mode, whose model has run once with inputs of this shape.
        subject: what is measured.
        size: of the batch; by default the subject's own.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _shadow(built.model, mode)
    own = subject.source.batches[0]
    batch_size = batch_size_of(own)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        dtype = built.dtype if built.dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = list(tensor.shape)
        if size is not None and shape and shape[0] == batch_size:
            shape[0] = size
        with mode:
            return torch.empty(shape, dtype=dtype, device=subject.device)

    fake = own.mapped(shaped)
    stand_in = copy.copy(built)
    stand_in.model, stand_in.scaler = model, None
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if built.optimizer is not None:
            stand_in.optimizer = make_optimizer(subject.source, model)
            stand_in.step(fake)  # the optimizer's state is made in its first step
        tracker = MemTracker()
        tracker.track_external(model, *([stand_in.optimizer] if stand_in.optimizer else []))
        with tracker:
            stand_in.step(fake)
        peak = tracker.get_tracker_snapshot("peak")
        with OpCounter() as counter:
            stand_in.step(fake)
    total, gradients = _sum(peak, "Total"), _sum(peak, "GRAD")
    return _split(stand_in, built.masters, total, gradients), counter.ops


def holds_graph(model: nn.Module) -> bool:
    """Whether a model runs a graph, which is for inputs of one shape."""
    return any(name in vars(model) for name in _SHARED)


def _sum(snapshot: Any, kind: str) -> int:
    """Over devices, of one kind of memory; kinds are members of an enumeration, but for the total."""
    return sum(
        int(count)
        for device in snapshot.values()
        for key, count in device.items()
        if str(getattr(key, "name", key)) == kind
    )


def _split(built: ModeRunner, masters: frozenset[str], total: int, gradients: int) -> Memory:
    held = named_tensors(built.model)
    kept = storage_bytes(tensor for name, tensor in held.items() if name in masters)
    weights = storage_bytes(held.values()) - kept
    optimizer = storage_bytes(optimizer_state(built.optimizer)) if built.optimizer is not None else 0
    rest = total - weights - kept - gradients - optimizer
    return Memory(weights, kept, gradients, optimizer, max(rest, 0))


def _shadow(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The module with parameters that have no data, which ask for gradients as the real ones do."""
    with _without(model) as shared:
        made = make_fake_model(model, mode, {}).model
    for name, value in shared.items():
        setattr(made, name, value.fixed() if isinstance(value, TraceCache) else value)
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(wants[name])
    for module in made.modules():  # the tracker hooks every parameter, which one without a gradient refuses
        for name, own in list(module._parameters.items()):
            if own is not None and not own.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, own.detach())
    return made


@contextlib.contextmanager
def _without(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The module without what its copy may share with it."""
    shared = {name: vars(model)[name] for name in _SHARED if name in vars(model)}
    for name, value in shared.items():
        setattr(model, name, type(value)())
    try:
        yield shared
    finally:
        for name, value in shared.items():
            setattr(model, name, value)
