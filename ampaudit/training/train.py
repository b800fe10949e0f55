"""Trains FP32, torch.amp and policies side by side, and compares the runs."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ampaudit.audit.config import rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.core.config import with_options
from ampaudit.core.errors import InputError, ReferenceBroken, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import finite_or_none
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.model import ModelInfo
from ampaudit.report.training import Health, TrainingReport, Variant
from ampaudit.run.device import (
    environment_of,
    generators_of,
    naming_indices,
    pick_device,
    random_state,
    restore_random_state,
)
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import LossAndOutput
from ampaudit.trace.isolation import isolated, structural_copy
from ampaudit.trace.loss import LOSS_BATCH, WithLoss, with_input_references
from ampaudit.training.config import TrainConfig
from ampaudit.training.findings import diverged_at, smoothed_end, training_report
from ampaudit.training.module import KEEPS_ACTIVATIONS, MixedModule
from ampaudit.training.prepare import How, is_master_free, prepare
from ampaudit.training.watch import watch

_METRIC_BATCHES = 8
MAX_BATCHES = 256  # batches in memory; a longer run repeats them


@with_options(TrainConfig)
@isolated()
def train(
    model: ModelLike,
    batches: Iterable[Inputs] | None = None,
    *,
    source: SourceConfig | None = None,
    config: TrainConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> TrainingReport:
    """Train in FP32, with torch.amp and under policies, from the same start on the same batches.

    Args:
        model: Model, which is not changed, or its location: a path, or ``package.module:factory``.
        batches: Training batches; by default those of the model's file.
        source: Options to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: Context of the call; only ``on_progress`` is used.
        **options: Fields of ``TrainConfig``, which override those of ``config``.

    Returns:
        The report with the curves and findings of each run.

    Raises:
        UsageError: The model cannot be trained, or options contradict each other.
        InputError: There is no loss, or no parameter gets a gradient.
        ReferenceBroken: The FP32 loss is not finite.
    """
    config = TrainConfig.merged(config, options)
    config.check()
    count = min(config.steps, MAX_BATCHES)
    loading = source or SourceConfig(seed=config.seed)
    opened = as_source(model, None, batches, loading.changed(batches=count, train=True), max_batches=count)
    opened = replace(
        opened,
        loss=config.loss or opened.loss,
        optimizer=config.optimizer or opened.optimizer,
        metric=config.metric or opened.metric,
    )
    if opened.kind in ("pt2", "converted") or opened.release is not None:
        raise UsageError(f"{opened.location} cannot be trained", hint="give the Python model")
    if not opened.batches:
        raise InputError("there is no batch to train on", hint="make batches() yield at least one batch")
    device = pick_device(config.device)
    specs = _specs(config, device)
    variants, optimizer, notes = _train_variants(opened, specs, config, device, session.on_progress)
    if len(opened.batches) < config.steps:
        notes.append(f"{len(opened.batches)} batches for {config.steps} steps: they were used again")
    return training_report(
        ModelInfo(opened.location, opened.kind, opened.sha256),
        device.type,
        low_precision_format(config.dtype).name,
        variants,
        seed=config.seed,
        optimizer=optimizer,
        fail_on=config.fail_on,
        judged=[spec.name for spec in specs if spec.name not in ("fp32", "torch.amp")],
        notes=notes,
    )


def _specs(config: TrainConfig, device: torch.device) -> list[VariantSpec]:
    """Return FP32, autocast (CUDA's, emulated if the device has none), and each policy."""
    dtype = low_precision_format(config.dtype).name
    native = device.type == "cuda" or (device.type == "cpu" and dtype == "bfloat16")
    environment = environment_of(device)
    policies = [rules_of(policy).for_environment(environment) for policy in config.policies]
    specs = [VariantSpec("fp32", "plain FP32", None, dtype)]
    autocast = load_policy(f"torch-{device.type}" if native else "torch-cuda")
    if autocast.name not in {rules.name for rules in policies}:
        what = f"torch.autocast({device.type!r})" if native else "CUDA autocast, emulated"
        how: How = "autocast" if native else "graph"
        specs.append(
            VariantSpec("torch.amp", f"{what}, {dtype}", autocast, dtype, how=how, emulate=not native)
        )
    description = f"{'native' if native else 'emulated'}, {dtype}"
    specs += [
        VariantSpec(rules.name, description, rules, dtype, config.loss_scale, emulate=not native)
        for rules in policies
    ]
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError("a policy is named twice")
    return specs


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """The configuration of one variant."""

    name: str  # in reports
    description: str  # in reports
    rules: RuleSet | None  # None for plain FP32
    dtype: str  # 16-bit format
    loss_scale: str | float | None = None  # profile or fixed scale; None for the policy's
    how: How = "graph"
    emulate: bool = False  # whether 16 bits are emulated

    @property
    def storage(self) -> str:
        """The dtype that the optimizer's parameters represent."""
        return self.dtype if self.rules is not None and is_master_free(self.rules) else "float32"


class _VariantRun:
    """A variant in training: its step, its monitor, and its own random numbers."""

    def __init__(self, spec: VariantSpec, source: ModelSource, device: torch.device, every: int) -> None:
        self.spec, self.device = spec, device
        if spec.rules is None:
            model = model_with_loss(source, device)
            self.training = TrainingStep(model, make_optimizer(source, model))
        else:
            self.training = prepare_step(
                source,
                device,
                spec.rules,
                spec.dtype,
                how=spec.how,
                emulate=spec.emulate,
                loss_scale=spec.loss_scale,
            )
        self.inner: Any = self.training.inner
        self.monitor = watch(
            self.inner, self.training.optimizer, self.training.scaler, every=every, dtype=spec.dtype
        )
        self.random_states = _random_states(device)
        self.seconds: list[float] = []
        self.peak: int | None = None

    def step(self, batch: Batch, number: int) -> None:
        """Take one step, and check after the first that there are gradients."""
        for kind, state in self.random_states.items():
            restore_random_state(state, kind)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        self.training.optimizer.zero_grad()
        # an exception of plain FP32 is an error of the model
        with calling_user_code("the model") if self.spec.rules is None else nullcontext():
            loss = self.training.forward(batch).loss
        self.monitor.loss(loss)
        if loss.requires_grad:
            self.training.backward(loss)
        if not loss.requires_grad or (number == 0 and all(p.grad is None for p in self.inner.parameters())):
            raise InputError(
                "no parameter gets a gradient: the loss depends on none that requires one",
                hint="check requires_grad of the parameters, and detach() or no_grad() before the loss",
            )
        self.training.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated(self.device))
        self.seconds.append(time.perf_counter() - started)
        self.random_states = _random_states(self.device)
        if self.spec.rules is None and not math.isfinite(float(loss.detach())):
            raise ReferenceBroken(
                f"the FP32 loss is {float(loss.detach())} in step {number} (counted from 0): "
                f"there is nothing to compare with",
                hint="lower the learning rate, or inspect the batch",
            )

    def health(self) -> Health:
        """Fetch the record; parameters that emulation rounds are stored in 16 bits."""
        health, storage = self.monitor.health(), self.spec.storage
        parameters = tuple(replace(parameter, storage=storage) for parameter in health.parameters)
        return replace(health, storage=storage, parameters=parameters)

    def result(self, health: Health, metric: float | None, reference: Sequence[float | None]) -> Variant:
        """Compare the run with the losses of FP32."""
        losses = [record.loss for record in health.steps]
        low_precision = self.spec.storage != "float32"
        tensors = [t for p in self.inner.parameters() for t in (p, p.grad) if t is not None]
        tensors += optimizer_state(self.training.optimizer)
        bytes_held = sum(
            t.numel() * (2 if low_precision and t.is_floating_point() else t.element_size()) for t in tensors
        )
        return Variant(
            name=self.spec.name,
            how=self.spec.description,
            health=health,
            diverged=None if self.spec.rules is None else diverged_at(losses, reference),
            final_loss=smoothed_end(losses),
            metric=metric,
            # the first steps trace the model
            seconds=statistics.median(self.seconds[len(self.seconds) // 3 :]),
            bytes_held=bytes_held,
            peak_bytes=self.peak,
        )


def _train_variants(
    source: ModelSource,
    specs: Sequence[VariantSpec],
    config: TrainConfig,
    device: torch.device,
    progress: Progress,
) -> tuple[list[Variant], str, list[str]]:
    """Train each variant, of which the first is FP32; return the results, the optimizer's name, and notes."""
    steps = config.steps
    every = min(config.every, max(steps // 4, 1))
    batches = [batch.mapped(lambda tensor: tensor.to(device)) for batch in source.batches]
    runs: list[_VariantRun] = []
    with torch.random.fork_rng(**generators_of(device)):
        for spec in specs:
            torch.manual_seed(config.seed)
            runs.append(_VariantRun(spec, source, device, every))
        with ExitStack() as watching, warnings.catch_warnings():
            warnings.filterwarnings("ignore", KEEPS_ACTIVATIONS)  # the report has a note instead
            for run in runs:
                watching.enter_context(run.monitor)
            for number in range(steps):
                progress("training", number, steps)
                for run in runs:
                    run.step(batches[number % len(batches)], number)
        progress("training", steps, steps)
        metrics = [_metric(run, source, batches) for run in runs]
    healths = [run.health() for run in runs]
    reference = [record.loss for record in healths[0].steps]
    variants = [
        run.result(health, metric, reference)
        for run, health, metric in zip(runs, healths, metrics, strict=True)
    ]
    models = {run.spec.name: run.training.model for run in runs}
    keeping = [name for name, m in models.items() if isinstance(m, MixedModule) and m.keeps_activations]
    notes = [f"{', '.join(keeping)}: {KEEPS_ACTIVATIONS}"] if keeping else []
    return variants, type(runs[0].training.optimizer).__name__, notes


def _metric(run: _VariantRun, source: ModelSource, batches: Sequence[Batch]) -> float | None:
    """Return the mean of the model file's metric over the first batches, computed in FP32."""
    if source.metric is None:
        return None
    model = structural_copy(source.model).to(run.device)
    trained = run.inner.inner.state_dict().items()
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in trained})
    model.eval()
    with torch.no_grad(), calling_user_code("metric(output, batch)"):
        outputs = ((model(*batch.args, **batch.kwargs), batch.whole) for batch in batches[:_METRIC_BATCHES])
        values = [float(source.metric(output, whole)) for output, whole in outputs]
    return finite_or_none(sum(values) / len(values))


def _random_states(device: torch.device) -> dict[torch.device, torch.Tensor]:
    return {kind: random_state(kind) for kind in (torch.device("cpu"), device)}


@dataclass
class TrainingStep:
    """A model with its optimizer, and the parts of one step."""

    model: nn.Module  # from ``model_with_loss``, prepared or not: gives a loss and an output
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None = None  # of the loss, if there is one
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around each forward pass

    def __post_init__(self) -> None:
        if self.scaler is not None and any(p.is_complex() for p in self.model.parameters()):
            raise UsageError(
                "torch's GradScaler cannot unscale the gradients of complex parameters",
                hint="train in bfloat16, which needs no loss scale",
            )

    @property
    def inner(self) -> nn.Module:
        """The model without the wrappers of ``prepare``."""
        model: nn.Module = getattr(self.model, "original", self.model)
        return model

    def forward(self, batch: Batch) -> LossAndOutput:
        """Run the forward pass."""
        item = with_input_references(batch.args, batch.kwargs, batch.whole)
        with self.context(), naming_indices(batch):
            result: LossAndOutput = self.model(*batch.args, **batch.kwargs, **{LOSS_BATCH: item})
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the loss, scaled if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self) -> None:
        """Step the optimizer, unless the scaler skips it."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def model_with_loss(source: ModelSource, device: torch.device) -> nn.Module:
    """Return a copy of a source's model together with its loss, ready to train."""
    return WithLoss(structural_copy(source.model), source.loss).to(device).train()


def prepare_step(
    source: ModelSource,
    device: torch.device,
    rules: RuleSet,
    dtype: str,
    *,
    how: How = "graph",
    emulate: bool = False,
    loss_scale: str | float | None = None,
) -> TrainingStep:
    """Prepare a copy of a source's model to train under a policy."""
    model = model_with_loss(source, device)
    optimizer = make_optimizer(source, model)
    prepared = prepare(
        model, optimizer, policy=rules, dtype=dtype, loss_scale=loss_scale, how=how, emulate=emulate
    )
    return TrainingStep(prepared.model, optimizer, prepared.scaler if prepared.scaler.is_enabled() else None)


def make_optimizer(source: ModelSource, model: nn.Module) -> torch.optim.Optimizer:
    """Create the model file's own optimizer, or AdamW.

    Raises:
        InputError, UsageError: there is nothing to train, or it is no optimizer that steps once a batch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("no parameter of the model requires a gradient", hint="call requires_grad_()")
    with calling_user_code("optimizer(params)"):
        optimizer = source.optimizer(parameters) if source.optimizer is not None else None
    if optimizer is None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer(params) returned {type(optimizer).__name__}", hint="return a torch optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model itself, and torch's GradScaler cannot scale that",
            hint="return another optimizer, such as torch.optim.AdamW(params)",
        )
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]
