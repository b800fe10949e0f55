"""Prepares a model, its optimizer and a loss scaler for training under a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ampaudit.audit.inputs import check_trained
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import FLOAT16, Dtype, NumberFormat, low_precision_format
from ampaudit.core.untrusted import describe
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.scaling import loss_scale_for, profile
from ampaudit.policy.schema import LossScale
from ampaudit.trace.storage import stored_dtypes
from ampaudit.training.master_free import cast_parameters, round_parameters
from ampaudit.training.model_proxy import AutocastModule, ModelProxy
from ampaudit.training.module import MixedModule, ModuleConfig
from ampaudit.training.scaler import LossScaler

__all__ = ["How", "Prepared", "is_master_free", "prepare"]

How = Literal["graph", "autocast"]
_SHARD = "prepared = ampaudit.prepare(model, group=True); fully_shard(prepared.model)"
_WRAP = (
    "prepared = ampaudit.prepare(model.module, optimizer); model = DistributedDataParallel(prepared.model)"
)
_WRAPPERS = {  # by name, since torch.distributed.fsdp takes a second to import
    "DataParallel": _WRAP,
    "DistributedDataParallel": _WRAP,
    "FullyShardedDataParallel": _SHARD,
    "FSDPModule": _SHARD,
}
_AUTOCAST = {"torch-cuda": "cuda", "torch-cpu": "cpu"}


@dataclass(frozen=True, repr=False)
class Prepared:
    """A model, optimizer and scaler, ready to train.

    Attributes:
        model: the prepared model, with the calling convention of the original.
        optimizer: the user's own; it steps the FP32 masters, or the 16-bit weights if there are none.
        scaler: torch's GradScaler with the policy's constants; does nothing if the policy has no loss scale,
            or keeps the parameters themselves in float16.
        master_free: whether the parameters themselves are in 16 bits.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scaler: LossScaler
    master_free: bool = False

    def __repr__(self) -> str:
        optimizer = type(self.optimizer).__name__ if self.optimizer is not None else "no optimizer"
        model = type(getattr(self.model, "original", self.model)).__name__
        return f"<{type(self).__name__} {model}, {optimizer}, {self.scaler!r}>"

    def stepping(self, optimizer: torch.optim.Optimizer) -> Prepared:
        """Return a copy with an optimizer that was created later.

        Raises:
            UsageError: it is another model's, or steps 16-bit weights that another optimizer keeps rounded.
        """
        if self.master_free and optimizer is not self.optimizer:
            raise UsageError(
                "the policy keeps no masters: another optimizer cannot take over its 16-bit weights",
                hint="choose a policy with FP32 masters, such as apex-o2",
            )
        if optimizer is not self.optimizer:
            _check_parameters(self.model, optimizer)
        return replace(self, optimizer=optimizer)

    @contextmanager
    def float32(self) -> Iterator[nn.Module]:
        """Run the model in FP32 with its masters while active, for evaluation."""
        model: Any = self.model
        with model.float32() as plain:
            yield plain

    def state_dict(self) -> dict[str, Any]:
        """Return masters and buffers under the model's own names, the optimizer's state, and the scaler's."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else {},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``, so that the next step is bitwise identical.

        Raises:
            UsageError: an entry is missing.
        """
        missing = {"model", "optimizer", "scaler"} - set(state)
        if missing:
            raise UsageError(
                f"the checkpoint has no {', '.join(sorted(missing))}: a resumed run would differ",
                hint="save prepared.state_dict()",
            )
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: str | Path | RuleSet = "torch-cuda",
    dtype: Dtype = "float16",
    loss_scale: str | float | None = None,
    how: How = "graph",
    emulate: bool = False,
    group: Any = None,
) -> Prepared:
    """Prepare a model to train in mixed precision.

    Args:
        model: the model, with FP32 parameters, which the optimizer continues to step.
        optimizer: made from ``model.parameters()``. FSDP2 and tensor parallelism replace these: omit it,
            shard ``prepared.model``, make the optimizer, and continue with ``prepared.stepping(optimizer)``.
        policy: ``torch-cuda`` or ``apex-o1`` (casts in the graph), ``apex-o2`` (16-bit working weights made
            from FP32 masters), ``apex-o3`` (no masters), ``apex-o0`` (FP32), any other, or a rule file.
        dtype: ``float16`` or ``bfloat16``.
        loss_scale: name of a profile, or a fixed scale; by default the policy's own, none in bfloat16.
        how: ``graph`` traces the model; ``autocast`` runs its own code under ``torch.autocast``, for models
            with custom autograd functions, or to recompute activations (a graph keeps them).
        emulate: compute in float32 and round to 16 bits, for devices without 16-bit kernels.
        group: processes that must skip steps together, if their gradients differ; ``True`` for all of them.
            Those that share sharded parameters do so in any case.

    Returns:
        The model, optimizer and scaler to train with.

    Raises:
        UsageError: the policy does not support this kind of training, or the model is wrapped already.
        PolicyError: no such policy or profile.
    """
    if how not in get_args(How):
        raise UsageError(f"how={how!r}", hint=f"one of: {', '.join(get_args(How))}")
    check_trained(model, optimizer)
    _refuse_wrapped(model)
    rules = policy if isinstance(policy, RuleSet) else load_policy(policy)
    form = low_precision_format(dtype)
    config = ModuleConfig(rules, load_policy("torch-cuda"), form, emulate)
    if optimizer is not None:
        _check_parameters(model, optimizer)
    device = next(iter(model.parameters()), torch.empty(0)).device.type
    prepared: nn.Module
    if how == "autocast":
        prepared = _autocast(model, rules, config, device)
    else:
        if is_master_free(rules):
            if optimizer is None:
                raise UsageError(
                    f"policy {rules.name!r} keeps no masters: it needs the optimizer from the start"
                )
            _cast_masters(model, optimizer, config)
        prepared = MixedModule(model, config)
    rule, master_free = _loss_scale(loss_scale, rules, form), is_master_free(rules)
    unscalable = master_free and form is FLOAT16 and not emulate  # torch unscales no such gradients
    scaler = LossScaler(rule, device, enabled=not unscalable, group=group)
    return Prepared(prepared, optimizer, scaler, master_free)


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise for a model that is prepared, parallel or sharded already: a graph cannot contain that."""
    for name, module in model.named_modules():
        place = f" (its submodule {describe(name)})" if name else ""
        if isinstance(module, ModelProxy):
            raise UsageError(f"the model is prepared already{place}", hint="pass the model itself")
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if kind is not None:
            raise UsageError(
                f"the model is wrapped in {kind} already{place}",
                hint=f"prepare first, wrap after: {_WRAPPERS[kind]}",
            )


def is_master_free(rules: RuleSet) -> bool:
    """Return whether a policy keeps no FP32 masters of its 16-bit weights."""
    return rules.file.weights.storage == "lower" and not rules.file.weights.master


def _cast_masters(model: nn.Module, optimizer: torch.optim.Optimizer, config: ModuleConfig) -> None:
    stored = stored_dtypes(model, config.rules.file.weights, config.low_dtype)
    if config.emulate:
        round_parameters(model, optimizer, stored)
    else:
        cast_parameters(model, optimizer, stored)


def _autocast(model: nn.Module, rules: RuleSet, config: ModuleConfig, device: str) -> AutocastModule:
    if _AUTOCAST.get(rules.name) != device:
        usual = f"torch-{device}"
        raise UsageError(
            f"how='autocast' runs torch.autocast on {device}, which is policy {usual!r}, not {rules.name!r}",
            hint=f"use policy={usual!r}, or how='graph'",
        )
    if config.emulate:
        raise UsageError("how='autocast' cannot be emulated", hint="use how='graph', or dtype='bfloat16'")
    return AutocastModule(model, device, config.low_dtype)


def _loss_scale(given: str | float | None, rules: RuleSet, form: NumberFormat) -> LossScale:
    if isinstance(given, int | float):
        if not 0 < given < math.inf:
            raise UsageError(f"loss_scale={given!r}", hint="give a positive, finite number, or a profile")
        return LossScale(kind="static", init=float(given))
    if isinstance(given, str):
        return profile(given).scale
    return loss_scale_for(rules.file.loss_scale, form)[0]


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer holds other parameters than the model's FP32 ones."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(parameter) in own for parameter in held):
        raise UsageError(
            "the optimizer holds no parameter of the model",
            hint="make it from model.parameters(), after model.to()",
        )
    low_precision = [p for p in held if p.dtype in (torch.float16, torch.bfloat16)]
    if low_precision:
        raise UsageError(
            f"{len(low_precision)} parameters are in 16 bits already "
            "(model.half()?): there are no FP32 masters",
            hint="pass the FP32 model, and policy='apex-o2' or 'apex-o3' for 16-bit weights",
        )
