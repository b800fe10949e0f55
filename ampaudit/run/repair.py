"""Repairs broken values during a run, to find all origins in one pass.

A repaired element gets the reference's value, clamped to the format. Values computed from it also follow the
reference, so that later sites are audited as if the fault had not happened, and all independent origins are
found in one pass. A value that is wrong because its input was is not an origin; elementwise ops decide this
per element, other ops for the whole value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.meter import Meter, float_outputs
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.step import Step
from ampaudit.run.views import as_complex, components
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["RepairingMeter"]


class RepairingMeter(Observer):
    """Measures like ``Meter``, repairs broken elements, and records which sites are origins.

    Attributes:
        origins: Sites that went wrong although their inputs were intact.
    """

    def __init__(self, meter: Meter, masks: set[SiteId]) -> None:
        self.meter = meter
        self.origins: list[SiteId] = []
        self._masks = masks
        # masks of the repaired elements of each node's value
        self._repaired: dict[fx.Node, torch.Tensor] = {}

    def state(self) -> dict[str, Any]:
        """Return the measurements and repairs as plain data and tensors."""
        repaired = {node.name: mask for node, mask in self._repaired.items()}
        return {"meter": self.meter.state(), "origins": list(self.origins), "repaired": repaired}

    def forget(self, live: Container[fx.Node]) -> None:
        """Drop the masks of values that are no longer live."""
        self._repaired = {node: mask for node, mask in self._repaired.items() if node in live}

    def restore(self, state: dict[str, Any], graph: fx.Graph) -> None:
        """Restore the state of another process, with masks at the nodes of a graph."""
        self.meter.restore(state["meter"])
        self.origins = state["origins"]
        nodes = {node.name: node for node in graph.nodes}
        self._repaired = {nodes[name]: mask for name, mask in state["repaired"].items()}

    def block_measure(self, step: Step, reference: Any) -> BlockMeasure | None:
        """Delegate to the meter."""
        return self.meter.block_measure(step, reference)

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure; if elements are broken, attribute the fault and repair them."""
        self.meter.observe(step, reference, value, call)
        if step.site is not None and step.site.id in self._masks:
            return value
        if not step.makes_values:
            self._follow(step, value, call)
            return value
        self._repair_updates(step, call)
        if not any(True for _ in float_outputs(reference, value)):
            return value
        single = isinstance(reference, torch.Tensor) and reference.shape == value.shape
        affected = self._affected(step, reference) if single else None
        wrong = next((m for r, v in float_outputs(reference, value) if (m := _wrong(r, v)) is not None), None)
        if wrong is not None and single and reference.is_complex():
            wrong = wrong.any(-1)  # one component of a complex number is enough
        if wrong is not None and step.site is not None and self._is_origin(step, wrong, affected):
            self.origins.append(step.site.id)
        if wrong is None and affected is None:
            return value
        if not single:
            assert wrong is not None
            self._repaired[step.node] = wrong
            return _repaired_list(reference, value, step)
        replaced = functools.reduce(torch.logical_or, (m for m in (wrong, affected) if m is not None))
        # FP32's value may exceed the format over many ops: values added to it share the fault
        beyond = reference.abs() > _limit(step.dtypes[0], value.dtype)
        mark = beyond & replaced if wrong is None else beyond & replaced | wrong
        if bool(mark.any()):
            self._repaired[step.node] = mark
        return _replace(reference, value, replaced, step.dtypes[0], bool(step.mutates))

    def _repair_updates(self, step: Step, call: StepCall) -> None:
        """Repair buffers that the step has written, even if this run does not read them."""
        for (position, reference, value), (_, dtype) in zip(call.updates(step), step.updates, strict=True):
            wrong = _wrong(reference, value) if value.is_floating_point() else None
            if wrong is not None:
                if step.site is not None and self._is_origin(step, wrong, None):
                    self.origins.append(step.site.id)
                _replace(reference, value, wrong, dtype, in_place=True)
                target = step.written_at(position, step.node.args, dict(step.node.kwargs))
                self._repaired[target] = wrong | self._repaired.get(target, wrong)

    def _affected(self, step: Step, reference: torch.Tensor) -> torch.Tensor | None:
        """Return the elements that depend on a repaired one."""
        masks = [self._repaired[n] for n in step.node.all_input_nodes if n in self._repaired]
        if not masks:
            return None
        if torch.Tag.pointwise in getattr(step.target, "tags", ()):
            try:
                affected = torch.zeros(reference.shape, dtype=torch.bool, device=reference.device)
                for mask in masks:
                    affected |= mask
                return affected
            except RuntimeError:
                pass
        return torch.ones(reference.shape, dtype=torch.bool, device=reference.device)

    def _is_origin(self, step: Step, wrong: torch.Tensor, affected: torch.Tensor | None) -> bool:
        if affected is not None:
            return bool((wrong & ~affected).any())
        return not any(node in self._repaired for node in step.node.all_input_nodes)

    def _follow(self, step: Step, value: Any, call: StepCall) -> None:
        """Apply an op that selects, moves or reshapes elements to their masks."""
        sources = [node for node in step.node.all_input_nodes if node in self._repaired]
        if not sources or not isinstance(value, torch.Tensor):
            return

        def mark_of(node: fx.Node) -> Any:
            operand = call.inputs[node][1]
            if isinstance(operand, torch.Tensor) and (operand.is_floating_point() or operand.is_complex()):
                return self._repaired.get(node, torch.zeros_like(operand, dtype=torch.bool))
            return operand

        result = None
        if step.site is not None and not step.mutates:
            with contextlib.suppress(RuntimeError, TypeError):
                result = step.target(*fx.node.map_arg(step.args, mark_of), **call.kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
            # the op does not support booleans, or accesses one of several outputs
            mark = self._repaired[sources[0]]
            result = mark if mark.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
        if bool(result.any()):
            self._repaired[step.node] = result


def _wrong(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    if reference.shape != value.shape:
        return None
    mask = (reference.isfinite() & ~value.isfinite()) | (value.isnan() & ~reference.isnan())
    return mask if bool(mask.any()) else None


def _repaired_list(reference: Any, value: Any, step: Step) -> Any:
    """Repair each of several outputs."""
    items = []
    for first, second, dtype in zip(reference, value, step.dtypes, strict=True):
        mask = None
        if isinstance(second, torch.Tensor) and (second.is_floating_point() or second.is_complex()):
            mask = _wrong(first, second)
        items.append(second if mask is None else _replace(first, second, mask, dtype, False))
    return type(value)(items)


def _limit(dtype: torch.dtype | None, carrier: torch.dtype) -> float:
    return torch.finfo(dtype if dtype in LOW_PRECISION_DTYPES else carrier).max


def _replace(
    reference: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype | None,
    in_place: bool,
) -> torch.Tensor:
    """Replace masked elements by the reference's value, clamped to the format and rounded."""
    if value.is_complex():
        real = torch.float16 if dtype is torch.complex32 else dtype
        parts = components(reference), components(value), mask.unsqueeze(-1), real
        repaired = as_complex(_replace(*parts, in_place=False))
        return value.copy_(repaired) if in_place else repaired
    limit = _limit(dtype, value.dtype)
    mask = mask & reference.isfinite()
    replacement = reference.clamp(-limit, limit)
    if dtype in LOW_PRECISION_DTYPES:
        replacement = replacement.to(dtype)
    repaired = torch.where(mask, replacement.to(value.dtype), value)
    return value.copy_(repaired) if in_place else repaired
