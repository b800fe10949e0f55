"""Scales the loss by a published profile: torch's GradScaler with other rules for the next scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.amp import GradScaler

from ampaudit.core.errors import UsageError
from ampaudit.core.text import format_scale
from ampaudit.policy.scaling import profile
from ampaudit.policy.schema import LossScale
from ampaudit.training.agreement import agree, own_parts, process_groups

__all__ = ["LossScaler", "ScaleState", "next_scale_state", "scaler"]


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The state of a dynamic scale.

    Attributes:
        scale: what the loss is multiplied by.
        good: steps without overflow since the scale last changed, or since the last overflow.
        patience: overflows left until the scale is reduced.
    """

    scale: float
    good: int
    patience: int


def next_scale_state(state: ScaleState, rule: LossScale, overflow: bool) -> ScaleState:
    """Return the state after one step.

    An overflow takes one of the ``hysteresis`` lives; without any left, each lowers the scale. A scale that
    grows gives them back (Megatron-Core's ``DynamicGradScaler``, DeepSpeed's ``DynamicLossScaler``).
    """
    if rule.kind != "dynamic":
        return state
    if overflow:
        patience = max(state.patience - 1, 0)
        reduced = max(state.scale * rule.backoff, rule.min or 0.0) if patience == 0 else state.scale
        return ScaleState(reduced, 0, patience)
    if state.good + 1 != rule.interval:  # as torch: a shorter interval set later comes too late
        return replace(state, good=state.good + 1)
    grown = state.scale * rule.growth
    largest = torch.finfo(torch.float32).max
    if isinstance(rule.max, float):
        grown = min(grown, rule.max)
    elif rule.max == "finite" and grown > largest:
        grown = state.scale
    return ScaleState(grown, 0, rule.lives)


class LossScaler(GradScaler):
    """``torch.amp.GradScaler`` with a profile's constants, bounds and hysteresis.

    ``scale``, ``unscale_`` and ``step`` are torch's. Where gradients differ between the processes of a group
    (sharded, or not averaged), the group decides together: all processes skip a step, or none. Processes that
    hold shards of the same parameters (DTensor) do so without being told.

    Args:
        rule: the profile's numbers.
        device: ``cuda`` or ``cpu``.
        enabled: if false, the scaler does nothing.
        group: processes that skip steps together, ``True`` for all; by default those that share parameters.
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
        self._state = ScaleState(rule.start, 0, rule.lives)

    def __repr__(self) -> str:
        if not self.is_enabled():
            return f"<{type(self).__name__} off>"
        return f"<{type(self).__name__} {format_scale(self._state.scale)}, {self._rule.kind}>"

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

    @property
    def state(self) -> ScaleState:
        """The state of the scale."""
        return self._state

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as torch does, then agree on overflow within the group."""
        if not self.is_enabled():
            return
        _refuse_16_bits(optimizer)
        super().unscale_(optimizer)
        self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        """Check fused optimizers as torch does, then agree on overflow within the group."""
        found = super()._check_inf_per_device(optimizer)
        self._agree(optimizer)
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale and check as torch does, but of each gradient the part that this process holds."""
        return super()._unscale_grads_(own_parts(optimizer), inv_scale, found_inf, allow_fp16)

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the verdict on an optimizer's gradients that of all processes that hold parts of them."""
        groups = process_groups(optimizer) if self.group is None else [self.group]
        if groups and self.is_enabled():
            state = self._per_optimizer_states[id(optimizer)]
            scale, _ = self._check_scale_growth_tracker("unscale_")
            state["overflowed"] = agree(state["found_inf_per_device"], groups, scale.device)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return whether an optimizer's gradients are inf or NaN, by rank; ``None`` if no ranks have agreed.

        It is known from ``unscale_`` or ``step`` until ``update``.
        """
        found: torch.Tensor | None = self._per_optimizer_states[id(optimizer)].get("overflowed")
        return found

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the next scale from the overflow checks of this step's optimizers."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            super().update(new_scale)
            self._state = replace(self._state, scale=float(new_scale))
            return
        verdicts = [
            found for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]  # fmt: skip
        if not verdicts:
            raise UsageError(
                "scaler.update() was called before any scaler.step(optimizer) or unscale_(optimizer)",
                hint="call update() once at the end of each step",
            )
        overflow = sum(float(found) for found in verdicts) > 0
        self._state = next_scale_state(self._state, self.rule, overflow)
        super().update(self._state.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(self._state.good)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries and the remaining lives."""
        found = super().state_dict()
        if found:
            found |= {"scale": self._state.scale, "_growth_tracker": self._state.good}
            found["patience"] = self._state.patience
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the ``state_dict`` of this scaler or a plain GradScaler."""
        super().load_state_dict(state_dict)
        if not self.is_enabled():
            return
        patience = int(state_dict.get("patience", self.rule.lives))
        self._state = ScaleState(float(state_dict["scale"]), int(state_dict["_growth_tracker"]), patience)


def scaler(name: str = "torch", device: str = "cuda", *, group: Any = None) -> LossScaler:
    """Create the loss scaler of a system.

    Args:
        name: of a profile: torch, apex, mxnet, deepspeed, megatron-core, tensorflow, one, none ...
        device: device type of the gradients.
        group: processes that must skip steps together; ``True`` for all of them.

    Returns:
        The scaler, with the interface of torch's GradScaler.

    Raises:
        PolicyError: no such profile.
    """
    return LossScaler(profile(name).scale, device, group=group)


def _refuse_16_bits(optimizer: torch.optim.Optimizer) -> None:
    """Raise before torch does, with a hint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.dtype is torch.float16:
                raise UsageError(
                    "the optimizer holds float16 parameters (model.half()?): what they add up is lost in "
                    "rounding, and torch unscales no float16 gradients",
                    hint="keep parameters in float32: autocast, or ampaudit.prepare with policy='apex-o2'",
                )
