"""The watch of a second look: every value that goes wrong is recorded, then repaired, and the run goes on.

A repaired element gets the reference's value, limited to the format's range. What follows is audited as
if the fault had not happened, so that every independent origin shows itself in one pass. A value that is
out of range because the (repaired) input already was is not a new origin; in elementwise ops this is
decided element by element, elsewhere for the whole value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampaudit.run.lockstep import StepCall
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.meter import Meter, float_outputs
from ampaudit.run.step import LOWER, Step
from ampaudit.sites import SiteId

__all__ = ["RepairingMeter"]


class RepairingMeter:
    """Measures like a ``Meter``, repairs what is wrong and notes which sites are origins.

    Attributes:
        origins: sites that went wrong although their inputs were in order.
    """

    def __init__(self, meter: Meter, masks: set[SiteId]) -> None:
        self.meter = meter
        self.origins: list[SiteId] = []
        self._masks = masks
        # which elements of a node's value were repaired
        self._repaired: dict[fx.Node, torch.Tensor] = {}

    def expects(self, step: Step, reference: Any) -> BlockMeasure | None:
        """What the meter expects."""
        return self.meter.expects(step, reference)

    def seen(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure; where elements are wrong, decide whose fault it is and repair them."""
        self.meter.measure(step, reference, value, call)
        if step.site is None or step.site.id in self._masks:
            return value
        if not step.makes_values:
            self._follow(step, call)
            return value
        wrong = [_wrong(r, v) for r, v in float_outputs(reference, value)]
        if not any(mask is not None for mask in wrong):
            return value
        first = next(mask for mask in wrong if mask is not None)
        if self._is_origin(step, first):
            self.origins.append(step.site.id)
        self._repaired[step.node] = first
        return _repair(reference, value, step)

    def _is_origin(self, step: Step, wrong: torch.Tensor) -> bool:
        inherited = [self._repaired[n] for n in step.node.all_input_nodes if n in self._repaired]
        if not inherited:
            return True
        if torch.Tag.pointwise not in getattr(step.target, "tags", ()):
            return False
        try:
            from_inputs = torch.zeros_like(wrong)
            for mask in inherited:
                from_inputs |= mask.expand_as(wrong)
        except RuntimeError:
            return False
        return bool((wrong & ~from_inputs).any())

    def _follow(self, step: Step, call: StepCall) -> None:
        source = next((n for n in step.node.all_input_nodes if n in self._repaired), None)
        if source is None:
            return
        mask, original = self._repaired[source], call.inputs[source][1]
        try:
            args = [mask if arg is original else arg for arg in call.args]
            result = step.target(*args, **call.kwargs)
        except (RuntimeError, TypeError):
            result = None
        value = step.node.meta.get("val")
        if not isinstance(result, torch.Tensor):
            result = torch.ones(getattr(value, "shape", ()), dtype=torch.bool, device=mask.device)
        if bool(result.any()):
            self._repaired[step.node] = result


def _wrong(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    if reference.shape != value.shape:
        return None
    mask = (reference.isfinite() & ~value.isfinite()) | (value.isnan() & ~reference.isnan())
    return mask if bool(mask.any()) else None


def _repair(reference: Any, value: Any, step: Step) -> Any:
    if isinstance(value, torch.Tensor):
        return _repaired_tensor(reference, value, step.dtypes[0], bool(step.mutates))
    pairs = zip(reference, value, step.dtypes, strict=True)
    return type(value)(
        _repaired_tensor(r, v, dtype, False) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for r, v, dtype in pairs
    )


def _repaired_tensor(
    reference: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None, in_place: bool
) -> torch.Tensor:
    mask = _wrong(reference, value)
    if mask is None:
        return value
    limit = torch.finfo(dtype).max if dtype in LOWER else torch.finfo(value.dtype).max
    replacement = reference.clamp(-limit, limit).to(value.dtype)
    if in_place:
        value.copy_(torch.where(mask, replacement, value))
        return value
    return torch.where(mask, replacement, value)
