"""Audits of gradients, with the gradients themselves kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit.core.formats import FLOAT16, NumberFormat
from ampaudit.core.session import silent
from ampaudit.instruments.backward.audit import GradientAudit, MeasuringObserver
from ampaudit.policy import load_policy
from ampaudit.policy.load import StartingScale
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.config import RunConfig
from ampaudit.source.interface import Batch
from ampaudit.trace.loss import LOSS_BATCH, WithLoss, with_input_references


def audit(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any],
    policy: str = "torch-cuda",
    scale: float = 65536.0,
    form: NumberFormat = FLOAT16,
) -> Audit:
    kwargs = kwargs or {}
    batch = Batch(args, {**kwargs, LOSS_BATCH: with_input_references(args, kwargs, args or kwargs)})
    plan = RunConfig(
        load_policy(policy),
        load_policy("torch-cuda"),
        form,
        torch.device("cpu"),
        recorders=(GradientAudit,),
        functionalize=True,
        loss_scale=StartingScale(scale, True, "test"),
    )
    return run_audits(WithLoss(model, loss), [batch], [plan], silent)[0]


class Kept:
    """Keeps the pairs of parameter gradients of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        original = MeasuringObserver.observe_total

        def observe_total(observer: MeasuringObserver, node: Any, dtype: Any, pair: Any) -> Any:
            name = observer._names.of(node)
            if name is not None and name[1]:
                self.pairs[name[0]] = pair
            return original(observer, node, dtype, pair)

        monkeypatch.setattr(MeasuringObserver, "observe_total", observe_total)
