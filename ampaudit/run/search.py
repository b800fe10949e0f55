"""Searches the input range for an input that maximizes a site's values.

Runs gradient ascent, by signs, on the largest magnitude from several starts, and then tries the corner of the
domain that the gradient points at. Token ids are selected by the gradient of their embedding: for each
position, the row of the table that increases the value most, to first order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.run.backends import Float32Backend
from ampaudit.run.program import Program, Step, compile_program
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.graph import Slot

__all__ = ["Search", "SearchResult"]

STARTS = 3
KEEP = -1  # marks ids that the value does not depend on
FIRST_STEP = 0.25  # as a share of the domain's width; halved after each step


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best input of a search, and its FP32 peak at the site."""

    tensors: list[torch.Tensor]
    peak: float


class Search:
    """Runs the FP32 reference of a converted model with gradients of its inputs.

    ``domain`` holds the low and high end of each input, by placeholder.
    """

    def __init__(
        self, converted: ConvertedModel, domain: Mapping[str, tuple[float, float]], device: torch.device
    ) -> None:
        self._program: Program = compile_program(converted.traced, device)
        self._reference = Float32Backend()
        self._masters = {name: t.detach().to(device) for name, t in converted.masters.items()}
        places = [p for p in converted.traced.placeholders if p.slot is Slot.INPUT]
        self._inputs = [place.node for place in places]
        self._domain = [domain[place.node] for place in places]
        self._device = device

    def ascend(self, site: SiteId, start: Sequence[torch.Tensor], steps: int, seed: int) -> SearchResult:
        """Search for the input with the largest value at a site, starting from a batch."""
        generator = torch.Generator().manual_seed(seed)
        best = SearchResult([t.clone() for t in start], -1.0)
        each = max(steps // STARTS, 1)
        for attempt in range(STARTS):
            tensors = self._project(start) if attempt == 0 else self._random(start, generator, attempt)
            size = FIRST_STEP
            for step in range(each):
                peak, slopes = self._evaluate(site, tensors)
                if peak > best.peak:
                    best = SearchResult([t.clone() for t in tensors], peak)
                last = step == each - 1
                tensors = self._moved(tensors, slopes, 1.0 if last or step % 4 == 3 else size)
                size = max(size / 2, 1 / 64)
            peak, _ = self._evaluate(site, tensors)
            best = SearchResult(tensors, peak) if peak > best.peak else best
        return best

    def _project(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            t.clone().clamp(low, high) if t.is_floating_point() else t.clone()
            for t, (low, high) in zip(tensors, self._domain, strict=True)
        ]

    def _random(
        self, like: Sequence[torch.Tensor], generator: torch.Generator, attempt: int
    ) -> list[torch.Tensor]:
        """Return a corner of the domain and a random point of it, alternately."""
        points: list[torch.Tensor] = []
        for tensor, (low, high) in zip(like, self._domain, strict=True):
            draw = torch.rand(tensor.shape, generator=generator)
            draw = (draw > 0.5).float() if attempt % 2 else draw
            value = low + draw * (high - low)
            value = value if tensor.is_floating_point() else value.round()
            points.append(value.to(tensor.dtype) if tensor.dtype is not torch.bool else tensor.clone())
        return points

    def _moved(
        self, tensors: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor | None], size: float
    ) -> list[torch.Tensor]:
        points: list[torch.Tensor] = []
        for tensor, slope, (low, high) in zip(tensors, slopes, self._domain, strict=True):
            if slope is None:
                points.append(tensor)
            elif tensor.is_floating_point():
                points.append((tensor + slope.cpu().sign() * (high - low) * size).clamp(low, high))
            else:
                ids = slope.cpu().to(tensor.dtype)
                points.append(torch.where(ids == KEEP, tensor, ids.clamp(int(low), int(high))))
        return points

    def _evaluate(
        self, site: SiteId, tensors: Sequence[torch.Tensor]
    ) -> tuple[float, list[torch.Tensor | None]]:
        """Return the site's peak and, per input, its gradient or the best ids."""
        values: dict[fx.Node, Any] = {}
        leaves: dict[str, torch.Tensor] = {}
        for node in self._program.inputs:
            if node.name in self._masters:
                values[node] = self._reference.represent(self._masters[node.name], None)
                continue
            tensor = tensors[self._inputs.index(node.name)].to(self._device)
            if tensor.is_floating_point():
                tensor = tensor.float().clone().requires_grad_()
                leaves[node.name] = tensor
            values[node] = tensor
        tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        with torch.enable_grad():
            for step in self._program.steps:
                values[step.node] = self._call(step, values, tables)
                if step.site is not None and step.site.id == site:
                    return self._slopes(values[step.node], leaves, tables)
        raise KeyError(site)

    def _call(
        self,
        step: Step,
        values: Mapping[fx.Node, Any],
        tables: dict[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> Any:
        args, kwargs = self._reference.arguments(step)
        args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
        if targets := {id(value) for value in step.written(args, kwargs)}:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda value: value.clone() if id(value) in targets else value, (args, kwargs)
            )
        result = step.target(*args, **kwargs)
        source = step.node.args[1] if len(step.node.args) > 1 else None
        looked_up = str(step.target).startswith("aten.embedding.")
        if looked_up and isinstance(source, fx.Node) and source.name in self._inputs:
            result = result.detach().requires_grad_()
            tables[source.name] = (args[0], result)
        return result

    def _slopes(
        self,
        value: Any,
        leaves: Mapping[str, torch.Tensor],
        tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[float, list[torch.Tensor | None]]:
        first = value[0] if isinstance(value, list | tuple) else value
        magnitude = first.abs().nan_to_num(0.0, torch.finfo(torch.float32).max).amax()
        sources = [*leaves.values(), *(rows for _, rows in tables.values())]
        gradients = (
            torch.autograd.grad(magnitude, sources, allow_unused=True)
            if sources and magnitude.requires_grad
            else [None] * len(sources)
        )
        by_name = dict(zip([*leaves, *tables], gradients, strict=True))
        slopes = [self._slope(name, by_name.get(name), tables) for name in self._inputs]
        return float(magnitude.detach()), slopes

    def _slope(
        self,
        name: str,
        gradient: torch.Tensor | None,
        tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor | None:
        if gradient is None or name not in tables:
            return gradient
        table, _ = tables[name]
        # of either sign: large negative values count as well
        best = (gradient @ table.t()).abs().argmax(-1)
        return torch.where(gradient.abs().amax(-1) > 0, best, KEEP)
