"""Prepares a model, its optimizer and a loss scaler for training under a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from ampaudit.audit.inputs import check_trained
from ampaudit.core.errors import RunFailed, UsageError, first_line
from ampaudit.core.formats import FLOAT16, Dtype, NumberFormat, low_precision_format
from ampaudit.core.text import format_scale
from ampaudit.core.untrusted import describe
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.load import loss_scale_for, profile
from ampaudit.policy.schema import LossScale
from ampaudit.run.backends import rounded
from ampaudit.trace.fake_model import named_tensors, stored_dtypes
from ampaudit.training.model_proxy import AutocastModule, ModelProxy
from ampaudit.training.module import MixedModule, ModuleConfig

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


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The state of a dynamic scale, which is a float32 number as in torch."""

    scale: float  # factor of the loss
    good: int  # steps without overflow since the scale last changed, or since the last overflow
    patience: int  # number of overflows left until the scale is reduced

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _as_float32(self.scale))


def next_scale_state(state: ScaleState, rule: LossScale, overflow: bool) -> ScaleState:
    """Return the state after one step.

    An overflow uses up one of ``hysteresis`` tolerated overflows; once none is left, each reduces the scale.
    Growth of the scale restores them (Megatron-Core's ``DynamicGradScaler``, DeepSpeed's
    ``DynamicLossScaler``).
    """
    if rule.kind != "dynamic":
        return state
    if overflow:
        patience = max(state.patience - 1, 0)
        reduced = max(state.scale * rule.backoff, rule.min or 0.0) if patience == 0 else state.scale
        return ScaleState(reduced, 0, patience)
    if state.good + 1 != rule.interval:  # like torch, which misses an interval that was shortened too late
        return replace(state, good=state.good + 1)
    grown = _as_float32(state.scale * rule.growth)
    if isinstance(rule.max, float):
        grown = min(grown, rule.max)
    elif rule.max == "finite" and math.isinf(grown):
        grown = state.scale
    return ScaleState(grown, 0, rule.lives)


def _as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


class LossScaler(GradScaler):
    """``torch.amp.GradScaler`` with a profile's constants, bounds and hysteresis.

    ``scale``, ``unscale_`` and ``step`` are torch's. Where gradients differ between the processes of a group
    (sharded, or not averaged), the group decides together: all processes skip a step, or none. Processes that
    hold shards of the same parameters (DTensor) do so automatically.

    Args:
        rule: Constants of the profile.
        device: ``cuda`` or ``cpu``.
        enabled: Whether the scaler has any effect.
        group: Processes that skip steps together, ``True`` for all; by default those that share parameters.

    Attributes:
        state: State of the scale.
    """

    def __init__(
        self, rule: LossScale, device: str = "cuda", *, enabled: bool = True, group: Any = None
    ) -> None:
        super().__init__(
            device,
            init_scale=rule.start,
            growth_factor=rule.growth,
            backoff_factor=rule.backoff,
            growth_interval=rule.interval,
            enabled=enabled and rule.kind != "none",
        )
        self._rule = rule
        self.group = group
        self.state = ScaleState(rule.start, 0, rule.lives)

    def __repr__(self) -> str:
        if not self.is_enabled():
            return f"<{type(self).__name__} off>"
        return f"<{type(self).__name__} {format_scale(self.state.scale)}, {self._rule.kind}>"

    @property
    def rule(self) -> LossScale:
        """The profile's constants, including changes made on the scaler."""
        if not self.is_enabled():
            return self._rule
        changed = {
            "growth": self.get_growth_factor(),
            "backoff": self.get_backoff_factor(),
            "interval": self.get_growth_interval(),
        }
        return self._rule.model_copy(update=changed)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as torch does, then agree on overflow within the group."""
        if not self.is_enabled():
            return
        if any(p.grad is not None and p.grad.dtype is torch.float16 for p in parameters_of(optimizer)):
            raise UsageError(
                "the optimizer holds float16 parameters (model.half()?): small updates of them are lost "
                "in rounding, and torch does not unscale float16 gradients",
                hint="keep parameters in float32: use autocast, or ampaudit.prepare with policy='apex-o2'",
            )
        super().unscale_(optimizer)
        self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        """Check fused optimizers as torch does, then agree on overflow within the group."""
        result = super()._check_inf_per_device(optimizer)
        self._agree(optimizer)
        return result

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale and check as torch does, on this process's part of each gradient."""
        return super()._unscale_grads_(with_local_gradients(optimizer), inv_scale, found_inf, allow_fp16)

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Combine the overflow verdicts of all processes that hold parts of an optimizer's gradients."""
        groups = process_groups(optimizer) if self.group is None else [self.group]
        if groups and self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            scale, _ = self._check_scale_growth_tracker("unscale_")
            state["overflowed"] = agree(state["found_inf_per_device"], groups, scale.device)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return whether an optimizer's gradients are inf or NaN, by rank; ``None`` if no ranks have agreed.

        Available from ``unscale_`` or ``step`` until ``update``.
        """
        overflow: torch.Tensor | None = self._per_optimizer_states[id(optimizer)].get("overflowed")
        return overflow

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the next scale from the overflow checks of this step's optimizers."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            super().update(new_scale)
            self.state = replace(self.state, scale=float(new_scale))
            return
        verdicts = [
            verdict for state in self._per_optimizer_states.values()
            for verdict in state["found_inf_per_device"].values()
        ]  # fmt: skip
        if not verdicts:
            raise UsageError(
                "scaler.update() was called before any scaler.step(optimizer) or unscale_(optimizer)",
                hint="call update() once at the end of each step",
            )
        overflow = sum(float(verdict) for verdict in verdicts) > 0
        self.state = next_scale_state(self.state, self.rule, overflow)
        super().update(self.state.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(self.state.good)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries and the remaining patience."""
        state = super().state_dict()
        if state:
            state |= {"scale": self.state.scale, "_growth_tracker": self.state.good}
            state["patience"] = self.state.patience
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the ``state_dict`` of this scaler or a plain GradScaler."""
        super().load_state_dict(state_dict)
        if not self.is_enabled():
            return
        patience = int(state_dict.get("patience", self.rule.lives))
        self.state = ScaleState(float(state_dict["scale"]), int(state_dict["_growth_tracker"]), patience)


def scaler(name: str = "torch", device: str = "cuda", *, group: Any = None) -> LossScaler:
    """Create the loss scaler of a system.

    Args:
        name: Name of a profile: torch, apex, mxnet, deepspeed, megatron-core, tensorflow, one, none ...
        device: Device type of the gradients.
        group: Processes that must skip steps together; ``True`` for all of them.

    Returns:
        The scaler, with the interface of torch's GradScaler.

    Raises:
        PolicyError: The profile does not exist.
    """
    return LossScaler(profile(name).scale, device, group=group)


@dataclass(frozen=True, repr=False)
class Prepared:
    """A model, optimizer and scaler, ready to train.

    Attributes:
        model: Prepared model, with the calling convention of the original.
        optimizer: User's optimizer, which steps the FP32 masters, or the 16-bit weights without masters.
        scaler: GradScaler with the policy's constants; disabled if the policy has no loss scale, or keeps the
            parameters themselves in float16.
        master_free: Whether the parameters themselves are in 16 bits.
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
            UsageError: It belongs to another model, or steps 16-bit weights that another optimizer keeps
                rounded.
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
            UsageError: An entry is missing.
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
        model: Model with FP32 parameters, which the optimizer continues to step.
        optimizer: Optimizer of ``model.parameters()``. FSDP2 and tensor parallelism replace these: omit it,
            shard ``prepared.model``, make the optimizer, and continue with ``prepared.stepping(optimizer)``.
        policy: ``torch-cuda`` or ``apex-o1`` (casts in the graph), ``apex-o2`` (16-bit working weights made
            from FP32 masters), ``apex-o3`` (no masters), ``apex-o0`` (FP32), any other, or a rule file.
        dtype: ``float16`` or ``bfloat16``.
        loss_scale: Name of a profile, or a fixed scale; by default the policy's, and none in bfloat16.
        how: ``graph`` traces the model; ``autocast`` runs its own code under ``torch.autocast``, for models
            with custom autograd functions, or to recompute activations (a graph keeps them).
        emulate: Whether to compute in float32 and round to 16 bits, for devices without 16-bit kernels.
        group: Processes that must skip steps together if their gradients differ; ``True`` for all of them.
            Processes that share sharded parameters always do.

    Returns:
        The model, optimizer and scaler to train with.

    Raises:
        UsageError: The policy does not support this kind of training, or the model is wrapped already.
        PolicyError: The policy or profile does not exist.
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
            stored = stored_dtypes(model, config.rules.file.weights, config.low_dtype)
            (round_parameters if emulate else cast_parameters)(model, optimizer, stored)
        prepared = MixedModule(model, config)
    rule, master_free = _loss_scale(loss_scale, rules, form), is_master_free(rules)
    unscalable = master_free and form is FLOAT16 and not emulate  # torch does not unscale such gradients
    scaler = LossScaler(rule, device, enabled=not unscalable, group=group)
    return Prepared(prepared, optimizer, scaler, master_free)


def _refuse_wrapped(model: nn.Module) -> None:
    """Reject a model that is already prepared, parallel or sharded: a graph cannot contain that."""
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


def _loss_scale(option: str | float | None, rules: RuleSet, form: NumberFormat) -> LossScale:
    if isinstance(option, int | float):
        if not 0 < option < math.inf:
            raise UsageError(f"loss_scale={option!r}", hint="give a positive, finite number, or a profile")
        return LossScale(kind="static", init=float(option))
    if isinstance(option, str):
        return profile(option).scale
    return loss_scale_for(rules.file.loss_scale, form)[0]


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer with parameters other than the model's FP32 ones."""
    model_parameters = {id(parameter) for parameter in model.parameters()}
    parameters = list(parameters_of(optimizer))
    if not any(id(parameter) in model_parameters for parameter in parameters):
        raise UsageError(
            "the optimizer holds no parameter of the model",
            hint="make it from model.parameters(), after model.to()",
        )
    low_precision = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
    if low_precision:
        raise UsageError(
            f"{len(low_precision)} parameters are in 16 bits already "
            "(model.half()?): there are no FP32 masters",
            hint="pass the FP32 model, and policy='apex-o2' or 'apex-o3' for 16-bit weights",
        )


def cast_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.dtype]
) -> None:
    """Cast parameters and buffers to 16 bits in place, so that the optimizer keeps them."""
    for name, tensor in named_tensors(model).items():
        if name in stored:
            tensor.data = tensor.data.to(stored[name])
    optimizer.load_state_dict(optimizer.state_dict())  # casts what state there is


def round_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.dtype]
) -> None:
    """Emulate 16-bit parameters: round them and the optimizer state after each step, and eps during it."""
    tensors = named_tensors(model)
    low_precision = {id(tensors[name]): (tensors[name], dtype) for name, dtype in stored.items()}

    @torch.no_grad()
    def round_all(*_: Any) -> None:
        for tensor, dtype in low_precision.values():
            tensor.copy_(rounded(tensor, dtype))
            for value in optimizer.state.get(tensor, {}).values():
                # a step count is a tensor without dimensions, and stays exact
                if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                    value.copy_(rounded(value, dtype))

    def round_eps(*_: Any) -> None:
        for group in groups_with_eps(optimizer):
            exact_eps.append(group["eps"])
            group["eps"] = float(torch.tensor(group["eps"]).to(low_dtype))

    def restore_eps(*_: Any) -> None:
        for group in groups_with_eps(optimizer):
            group["eps"] = exact_eps.pop(0)

    round_all()
    if not low_precision:
        return
    low_dtype = next(iter(low_precision.values()))[1]
    exact_eps: list[float] = []
    optimizer.register_step_pre_hook(round_eps)
    optimizer.register_step_post_hook(restore_eps)
    optimizer.register_step_post_hook(round_all)


def groups_with_eps(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups whose ``eps`` is one number, as in Adam; Adafactor's is a pair of other numbers."""
    return [group for group in optimizer.param_groups if isinstance(group.get("eps"), int | float)]


def eps_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the ``eps`` of the first group that has one."""
    return next((float(group["eps"]) for group in groups_with_eps(optimizer)), None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's local part of a sharded tensor, detached, sharing its memory."""
    local: Any = tensor.detach()
    part: torch.Tensor = local.to_local() if isinstance(local, DTensor) else local
    return part


def with_local_gradients(optimizer: Any) -> Any:
    """Return an optimizer proxy for GradScaler with the local part of each sharded gradient.

    Torch cannot check whole and sharded gradients together: it assumes the first one's sharding for all.
    """
    parts = [_local_proxy(p) if isinstance(p.grad, DTensor) else p for p in parameters_of(optimizer)]
    return SimpleNamespace(param_groups=[{"params": parts}])


def _local_proxy(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    proxy = local_part(parameter.grad)
    proxy.grad = local_part(parameter.grad)
    return proxy


def process_groups(optimizer: Any) -> list[Any]:
    """Return the groups of processes that hold shards of an optimizer's parameters."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters_of(optimizer) if isinstance(p, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def agree(
    verdicts: dict[torch.device, torch.Tensor], groups: Sequence[Any], device: torch.device
) -> torch.Tensor:
    """Combine the verdicts of all processes, in place.

    Args:
        verdicts: Scalars by device, 1 if a gradient is inf or NaN. Empty if this process has no gradients;
            filled if another one has some.
        groups: Process groups to reduce over, one after another; ``True`` for all processes.
        device: Device of the communication.

    Returns:
        The verdict of each rank, of shape (ranks,).

    Raises:
        RunFailed: A process is gone.
        UsageError: ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        raise UsageError(
            "the scaler has a group, but this process is in none",
            hint="call torch.distributed.init_process_group first, or leave out group=",
        )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    by_rank = torch.zeros(ranks + 1, device=device)  # last: whether anybody has gradients
    if verdicts:
        by_rank[rank] = torch.stack([verdict.to(device) for verdict in verdicts.values()]).amax()
        by_rank[ranks] = 1.0
    try:
        for group in groups:
            dist.all_reduce(by_rank, op=dist.ReduceOp.MAX, group=None if group is True else group)
    except (RuntimeError, dist.DistBackendError) as error:
        raise RunFailed(
            f"a process of the group is gone: they could not agree about this step ({first_line(error)})",
            hint="read the other ranks' output; restart from the last checkpoint",
        ) from error
    if not verdicts and by_rank[ranks]:
        verdicts[device] = torch.zeros((), device=device)
    for verdict in verdicts.values():
        verdict.copy_(by_rank[:ranks].amax())
    return by_rank[:ranks]
