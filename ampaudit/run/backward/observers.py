"""Observers of a backward pass: one measures gradients, the other also repairs them and finds origins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.run.backward.backward import GradientObserver, GradientPair
from ampaudit.run.backward.custom_backward import FaultSource
from ampaudit.run.backward.meter import GradientMeter
from ampaudit.run.backward.record import GradientOrigin
from ampaudit.run.step import Step
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site
from ampaudit.trace.marks import is_mark, marked_values
from ampaudit.trace.opnames import base_name, converts, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["GradientNames", "MeasuringObserver", "RepairingObserver"]

_PASSES_ON = (Role.VIEW, Role.SELECT)


class GradientNames:
    """Maps nodes to the names of their gradients in a record: a site or a parameter."""

    def __init__(self, sites: dict[str, Site], placeholders: Sequence[Placeholder]) -> None:
        self._sites = sites
        self._parameters = {place.node: place.name for place in placeholders}

    def of(self, node: fx.Node) -> tuple[str, bool] | None:
        """Return the name, and whether it is a parameter's; ``None`` for ops that only pass on values."""
        if node.name in self._parameters:
            return self._parameters[node.name], True
        site = self._sites.get(node.name)
        return None if site is None or site.role in _PASSES_ON else (site.id, False)

    def site(self, node: fx.Node) -> Site | None:
        """Return the node's site."""
        return self._sites.get(node.name)

    def parameters_behind(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Return the parameters from which values are computed."""
        waiting, seen = list(nodes), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return {self._parameters[node.name] for node in seen if node.name in self._parameters}

    def op_site(self, node: fx.Node) -> SiteId:
        """Return the site of an op or of a custom function's output; else the nearest one."""
        site = self._sites.get(marked_values(node)[0].name if is_mark(node.target) else node.name)
        return self.source_site(node) if site is None else site.id

    def source_site(self, node: fx.Node) -> SiteId:
        """Return the site that made the values, or the first one that uses a parameter."""
        name, is_parameter = self.name_or_source(node)
        if not is_parameter:
            return SiteId(name)
        while node.name not in self._parameters:
            node = node.all_input_nodes[0]
        users = (self._sites.get(user.name) for user in node.users)
        return next((site.id for site in users if site is not None), SiteId(name))

    def name_or_source(self, node: fx.Node) -> tuple[str, bool]:
        """Return the name or, for ops that only pass on values, that of their source."""
        while (found := self.of(node)) is None:
            site, sources = self._sites.get(node.name), node.all_input_nodes
            if not sources:
                return (site.id if site else node.name), False
            node = sources[0]
        return found


class MeasuringObserver(GradientObserver):
    """Measures every complete gradient without changing any."""

    def __init__(self, meter: GradientMeter, names: GradientNames) -> None:
        self.meter = meter
        self._names = names

    def made(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Note the source of a gradient that is a sum, to see later whether only rounding is left of it."""
        del fault
        name = self._names.of(of) if is_mark(step.target) or _adds(step.node, of) else None
        source = self._names.of(marked_values(step.node)[0] if is_mark(step.target) else step.node)
        if name is not None and source is not None:
            self.meter.sums(*name, source[0])
        return pair[1]

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Measure it."""
        name = self._names.of(node)
        if name is not None:
            site = self._names.site(node)
            keep = site is not None and site.role is Role.WEIGHT_CAST
            self.meter.add(
                name[0], *pair, parameter=name[1], low_precision=dtype in LOW_PRECISION_DTYPES, keep=keep
            )
        return pair[1]


class RepairingObserver(GradientObserver):
    """Measures, repairs each wrong element, and records its origin.

    A wrong element gets FP32's value, limited to the format and rounded; so does all that is computed from a
    repaired gradient, so that what lies behind is audited as if the fault had not happened. The op that made
    a wrong share is the origin, unless what it was given has stayed beyond the format since a repair.

    Args:
        inner: measures.
        names: of gradients.
        represent: holds a gradient of a node as the 16-bit run does.
        limit: largest finite value of the format.
        batch: its number.

    Attributes:
        origins: in the order of the backward pass.
    """

    def __init__(
        self,
        inner: MeasuringObserver,
        names: GradientNames,
        represent: Callable[[torch.Tensor, fx.Node], torch.Tensor],
        limit: float,
        batch: int,
    ) -> None:
        self._inner = inner
        self._names = names
        self._represent = represent
        self._limit = limit
        self._batch = batch
        self._beyond: set[fx.Node] = set()
        self._followed: set[fx.Node] = set()
        self.origins: list[GradientOrigin] = []

    def made(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Look at one op's share."""
        self._inner.made(step, of, pair)
        if pair[0].shape != pair[1].shape:
            return pair[1]
        given = (
            marked_values(step.node) if is_mark(step.target) else [step.node]
        )  # whose gradients it was given
        behind = not self._beyond.isdisjoint(given)
        wrong = _wrong(*pair)
        if wrong is not None:
            self._repair(of, pair, wrong)
            if not behind:
                self._note(step.node, of, fault)
        elif behind and bool(pair[0].abs().nan_to_num().amax() > self._limit):
            self._beyond.add(of)
        if wrong is None and self._followed.isdisjoint(given):
            return pair[1]
        self._followed.add(of)
        return self._following(of, pair)

    def summed(self, node: fx.Node, pair: GradientPair) -> torch.Tensor:
        """Check the sum: that of finite shares may be infinite, as may the scaled loss itself."""
        wrong = _wrong(*pair)
        if wrong is not None:
            if node not in self._beyond:
                self._note(node, node)
            self._repair(node, pair, wrong)
            self._followed.add(node)
        # repaired shares are clamped, so that two of opposite sign would add up to zero
        followed = node in self._followed and pair[0].shape == pair[1].shape
        return self._following(node, pair) if followed else pair[1]

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Measure what it is after the repairs."""
        return self._inner.complete(node, dtype, pair)

    def _note(self, node: fx.Node, of: fx.Node, fault: FaultSource | None = None) -> None:
        value, is_parameter = self._names.name_or_source(of)
        where = (fault.name, fault.op, fault.source) if fault is not None else ()
        site = self._names.source_site(node) if fault is None else self._names.op_site(node)
        origin = GradientOrigin(site, value, is_parameter, self._batch, *where)
        self.origins.append(origin)

    def _repair(self, of: fx.Node, pair: GradientPair, wrong: torch.Tensor) -> None:
        self._beyond.add(of)
        bad = int(wrong.sum())
        nan = int((pair[1].isnan() & wrong).sum())
        self._inner.meter.wrong(*self._names.name_or_source(of), infinite=bad - nan, nan=nan)

    def _following(self, of: fx.Node, pair: GradientPair) -> torch.Tensor:
        return self._represent(pair[0].clamp(-self._limit, self._limit), of).to(pair[1].dtype)


def _adds(node: fx.Node, term: fx.Node) -> bool:
    """Return whether an op adds a value as it is, so that its gradient is a sum of the result's."""
    op = overload_of(node.target)
    if op is None:
        return False
    given = named_arguments(op, node.args, dict(node.kwargs))
    if converts(op) or base_name(op) in ("add", "add_", "sub", "sub_"):
        return "alpha" not in given
    return given.get("bias") is term or (base_name(op) == "addmm" and given["self"] is term)


def _wrong(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    if value is reference or value.shape != reference.shape:
        return None
    mask = reference.isfinite() & ~value.isfinite()
    return mask if bool(mask.any()) else None
