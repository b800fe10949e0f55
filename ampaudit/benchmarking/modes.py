"""Builds the modes to compare, each with its own copy of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ampaudit.audit.plan import trace_under
from ampaudit.core.errors import InputError, first_line
from ampaudit.core.formats import NumberFormat
from ampaudit.devices.catalogue import Device
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.program import GraphModel
from ampaudit.policy import RuleSet, load_policy
from ampaudit.run.device import naming_indices, tf32
from ampaudit.run.program import call_on
from ampaudit.source import Batch, ModelSource
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.fake_model import stored_dtypes
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.values import dtype_name, torch_dtype
from ampaudit.training.prepare import is_master_free
from ampaudit.training.train import TrainingStep, make_optimizer, model_with_loss, prepare_step

_STORED = {"half": torch.float16, "bf16": torch.bfloat16}
# unlike ``to``, these keep complex weights
_CASTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


class NotSupported(Exception):
    """Raised for a mode that the device or model does not support; the message says why."""


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """The model and the conditions of a measurement."""

    source: ModelSource  # with batches of the size to measure
    device: torch.device
    form: NumberFormat  # of autocast and conversions
    rules: RuleSet  # of conversions
    train: bool  # whether a step is a training step
    seed: int
    target: Device | None = None  # device to estimate for, whose autocast is then emulated

    @property
    def low_dtype(self) -> torch.dtype:
        """The torch dtype of the 16-bit format."""
        return torch_dtype(self.form)


def with_batch_size(setup: BenchSetup, size: int) -> BenchSetup:
    """Return a copy with another batch size."""
    batch = resized(setup.source.batches[0], size)
    return replace(setup, source=replace(setup.source, batches=(batch,)))


@dataclass
class ModeRunner:
    """A mode that is ready to run."""

    how: str  # description for the report
    model: nn.Module  # with its weights, on the device
    # entered around forward passes outside of training
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    dtype: torch.dtype | None = None  # of floating-point inputs; unchanged if None
    training: TrainingStep | None = None  # None for inference
    masters: frozenset[str] = frozenset()  # names of parameters that are FP32 masters of 16-bit copies

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; ``None`` for inference."""
        return self.training.optimizer if self.training is not None else None

    def forward(self, batch: Batch) -> Any:
        """Compute the model's outputs, without gradients."""
        with torch.no_grad():
            if self.training is not None:
                return self.training.forward(batch).output
            with self.context(), naming_indices(batch):
                return self.model(*batch.args, **batch.kwargs)

    def step(self, batch: Batch) -> None:
        """Take one training step, or one forward pass for inference."""
        if self.training is None:
            self.forward(batch)
            return
        self.training.backward(self.training.forward(batch).loss)
        self.training.update()
        self.training.optimizer.zero_grad(set_to_none=True)


def build_mode(mode: str, setup: BenchSetup) -> ModeRunner:
    """Build a mode, ready to run.

    Raises:
        NotSupported: The device or the model does not support the mode.
        AuditError: The model cannot be traced, or has no loss.
    """
    builders = {"converted": _converted, "converted+compile": _compiled, "autocast": _autocast}
    if mode in builders:
        return builders[mode](setup)
    if mode == "tf32":
        device = setup.device
        if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            raise NotSupported("TF32 needs an NVIDIA GPU of compute capability 8.0 or later")
        return _eager(setup, "float32, products in TF32", lambda: tf32(allowed=True), dtype=torch.float32)
    if mode in _STORED:
        dtype = _STORED[mode]
        return _eager(setup, f"everything in {dtype_name(dtype)}", dtype=dtype)
    return _eager(setup, "float32, TF32 off", lambda: tf32(allowed=False), dtype=torch.float32)


def _eager(
    setup: BenchSetup,
    how: str,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    dtype: torch.dtype | None = None,
    scaler: GradScaler | None = None,
) -> ModeRunner:
    """Build a mode that runs the model's own code, in a context or with its weights in another dtype."""
    if setup.train:
        model = model_with_loss(setup.source, setup.device)
    else:
        model = structural_copy(setup.source.model).eval()
    if dtype is not None:
        getattr(model, _CASTS[dtype])()
    model.to(setup.device)  # after the cast, since the device may have no room for it in float32
    if not setup.train:
        return ModeRunner(how, model, context, dtype)
    training = TrainingStep(model, make_optimizer(setup.source, model), scaler, context)
    return ModeRunner(how, model, context, dtype, training)


def _autocast(setup: BenchSetup) -> ModeRunner:
    kind, dtype = setup.device.type, setup.low_dtype
    if setup.target is not None and setup.target.capability is not None and kind != "cuda":
        runner = _converted(replace(setup, rules=load_policy("torch-cuda")), folded=False)
        runner.how = (
            f"the casts of torch.autocast('cuda', {setup.form.name}), as a graph: this machine has no GPU"
        )
        return runner
    try:
        torch.autocast(kind, dtype=dtype)
    except RuntimeError as error:
        raise NotSupported(str(error)) from error
    scaler = GradScaler(kind) if setup.train and dtype is torch.float16 else None
    how = f"torch.autocast({kind!r}, {setup.form.name}){' with GradScaler' if scaler is not None else ''}"
    return _eager(setup, how, lambda: torch.autocast(kind, dtype=dtype), scaler=scaler)


def _converted(setup: BenchSetup, *, folded: bool = True) -> ModeRunner:
    """Build a mode that runs the converted model, or for training the prepared model."""
    how = f"policy {setup.rules.name}, {setup.form.name}"
    if setup.train:
        training = prepare_step(setup.source, setup.device, setup.rules, setup.form.name)
        masters: Mapping[str, torch.dtype] = {}
        if not is_master_free(setup.rules):
            masters = stored_dtypes(training.inner, setup.rules.file.weights, setup.low_dtype)
        how = f"{how}, ampaudit.prepare"
        return ModeRunner(how, training.model, training=training, masters=frozenset(masters))
    traced, _ = trace_under(setup.source, setup.rules, setup.form, setup.device, setup.seed)
    converted = attach_weights(traced)
    graph = fold_casts(converted, "inference" if folded else "train")
    for node in graph.graph.nodes:  # whose devices are those of the model
        node.target, node.args, node.kwargs = call_on(node, setup.device)
    values = {name: t.to(setup.device) for name, t in folded_weights(converted, graph, {}).items()}
    model = GraphModel(graph, values, traced.paths, train=False).eval()
    return ModeRunner(f"{how}, casts folded into the weights", model)


def _compiled(setup: BenchSetup) -> ModeRunner:
    if setup.train:
        raise NotSupported("a prepared model traces itself, so it cannot be compiled")
    runner = _converted(setup)
    compiled: Any = torch.compile(runner.model)
    runner = replace(runner, model=compiled, how=f"{runner.how}, torch.compile")
    try:
        runner.forward(moved(setup.source.batches[0], setup.device))
    except Exception as error:
        raise NotSupported(f"torch.compile: {type(error).__name__}: {first_line(error)}") from error
    return runner


def batch_size_of(batch: Batch) -> int:
    """Return the most frequent first dimension of a batch's tensors; 1 without tensors."""
    counts = Counter(t.shape[0] for t in tensor_leaves(batch.args, batch.kwargs) if t.ndim > 0)
    return counts.most_common(1)[0][0] if counts else 1


def resized(batch: Batch, size: int) -> Batch:
    """Resize a batch to ``size`` samples, by repeating or truncating the tensors with a batch dimension.

    Raises:
        InputError: No tensor has a batch dimension.
    """
    current = batch_size_of(batch)
    if current == size:
        return batch
    tensors = tensor_leaves((*batch.args, batch.item), batch.kwargs)
    if not any(t.ndim > 0 and t.shape[0] == current for t in tensors):
        raise InputError("the inputs have no batch dimension", hint="leave out --batch-size")

    def change(value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 0 or value.shape[0] != current:
            return value
        return value[torch.arange(size) % current].contiguous()

    return batch.mapped(change)


def moved(batch: Batch, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
    """Move a batch to a device, and cast floating-point tensors to a dtype if one is given."""

    def move(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)

    return batch.mapped(move)
