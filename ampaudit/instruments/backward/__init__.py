"""Audits gradients and the loss scale: a backward pass in FP32 and in 16 bits, side by side."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from ampaudit.core.config import Config, Option, UserFunction, python_only
from ampaudit.core.errors import UsageError
from ampaudit.core.instruments import RUNS, Instrument, Need

__all__ = ["INSTRUMENT", "BackwardOptions"]


class BackwardOptions(Config):
    """Options of the backward pass."""

    backward: Annotated[bool, Option("Audit gradients and the loss scale; implies --train.")] = False
    loss: Annotated[
        UserFunction | None,
        python_only("Loss function, called as loss(output) or loss(output, batch); for backward."),
    ] = None
    loss_scale: Annotated[
        float | None, Gt(0), Option("Multiply the loss by X instead of the policy's scale.", metavar="X")
    ] = None

    def check(self) -> None:
        """Raise for a loss scale without a backward pass."""
        if self.loss_scale is not None and not self.backward:
            raise UsageError("--loss-scale scales gradients", hint="add --backward, or leave it out")
        super().check()


INSTRUMENT = Instrument(
    name="backward",
    title="Gradients",
    options=BackwardOptions,
    needs=RUNS,
    violates=Need.FORWARD_ONLY,
    trains=True,
)
