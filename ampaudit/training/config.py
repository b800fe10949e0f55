"""Options of ``train``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator, InstanceOf

from ampaudit.audit.config import FailOnLevel, check_device, rules_of
from ampaudit.core.config import (
    Config,
    DeviceName,
    DtypeName,
    Option,
    Seed,
    UserFunction,
    python_only,
)
from ampaudit.core.errors import UsageError
from ampaudit.policy import RuleSet
from ampaudit.policy.load import profile


def _names(value: Any) -> Any:
    """Split ``half, apex-o2``; an empty name is kept, to be rejected as unknown."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    return [value] if isinstance(value, Path | RuleSet) else value


def _scale(value: Any) -> Any:
    """Parse a number, or leave the name of a profile unchanged."""
    if value is None or isinstance(value, bool):
        return value
    try:
        value = float(value)
    except (TypeError, ValueError):
        return value
    if not 0 < value < math.inf:
        raise UsageError("--loss-scale must be positive and finite")
    return value


class TrainConfig(Config):
    """Options of ``train``."""

    steps: Annotated[int, Ge(1), Option("Number of steps of each run.")] = 100
    policies: Annotated[
        Sequence[str | Path | InstanceOf[RuleSet]],
        BeforeValidator(_names),
        AfterValidator(tuple),
        Option(
            "Policy name or rule file; separate several with commas.",
            flags=("--policy",),
            commas=True,
            accepts="Rules | Sequence[Rules]",
        ),
    ] = ("ampaudit",)
    dtype: DtypeName = "float16"
    loss_scale: Annotated[
        str | float | None,
        BeforeValidator(_scale),
        Option("Profile (torch, deepspeed, one ...) or fixed scale.", metavar="NAME|X"),
    ] = None
    every: Annotated[int, Ge(1), Option("Measure every N-th step.")] = 10
    device: DeviceName = "auto"
    seed: Seed = 0
    fail_on: FailOnLevel = "error"
    loss: Annotated[
        UserFunction | None, python_only("Loss function, called as loss(output) or loss(output, batch).")
    ] = None
    optimizer: Annotated[
        UserFunction | None,
        python_only("Function optimizer(params); by default, AdamW with a learning rate of 1e-3."),
    ] = None
    metric: Annotated[
        UserFunction | None, python_only("Function metric(output, batch); larger is better.")
    ] = None

    def check(self) -> None:
        """Raise early for what would fail after the model is loaded."""
        names = [rules_of(policy).name for policy in self.policies]
        if len(set(names)) < len(names):
            raise UsageError("a policy is named twice", hint="name each once in --policy")
        if isinstance(self.loss_scale, str):
            profile(self.loss_scale)
        check_device(self.device)
