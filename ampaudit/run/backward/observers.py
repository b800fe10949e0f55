"""What looks at gradients on the way back: one that measures, and one that repairs and finds origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.run.backends import Backend
from ampaudit.run.backward.backward import GradientPair
from ampaudit.run.backward.custom_backward import Fault
from ampaudit.run.backward.meter import GradientMeter
from ampaudit.run.backward.record import GradientOrigin
from ampaudit.run.step import Step
from ampaudit.trace.backward.marks import is_mark, marked_values
from ampaudit.trace.graph import Placeholder, Role, Site
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["Measuring", "Names", "Repairing", "Rounding"]

_HANDS_ON = (Role.VIEW, Role.SELECT)


class Rounding:
    """How the 16-bit run holds the gradient of a node: as its value."""

    def __init__(self, backend: Backend, dtypes: Mapping[fx.Node, tuple[torch.dtype | None, ...]]) -> None:
        self._backend = backend
        self._dtypes = dtypes

    def dtype(self, node: fx.Node) -> torch.dtype | None:
        """Of a node's (first) output."""
        return self._dtypes[node][0]

    def represent(self, gradient: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """A gradient as the backend holds it."""
        return self._backend.represent(gradient, self.dtype(node))


class Names:
    """What a node's gradient is called in a record: its site, or the parameter that it is."""

    def __init__(self, sites: dict[str, Site], placeholders: Sequence[Placeholder]) -> None:
        self._sites = sites
        self._parameters = {place.node: place.name for place in placeholders}

    def of(self, node: fx.Node) -> tuple[str, bool] | None:
        """The name, and whether it is a parameter's; ``None`` for what only hands values on."""
        if node.name in self._parameters:
            return self._parameters[node.name], True
        site = self._sites.get(node.name)
        return None if site is None or site.role in _HANDS_ON else (site.id, False)

    def site(self, node: fx.Node) -> Site | None:
        """The node's site."""
        return self._sites.get(node.name)

    def parameters_behind(self, nodes: Sequence[fx.Node]) -> set[str]:
        """The parameters from which values are computed."""
        waiting, seen = list(nodes), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return {self._parameters[node.name] for node in seen if node.name in self._parameters}

    def own(self, node: fx.Node) -> SiteId:
        """The site of an op, or of what a custom function has made; else the nearest one."""
        site = self._sites.get(marked_values(node)[0].name if is_mark(node.target) else node.name)
        return self.nearest(node) if site is None else site.id

    def nearest(self, node: fx.Node) -> SiteId:
        """The site that made the values, or the first one that uses a parameter."""
        name, is_parameter = self.anyway(node)
        if not is_parameter:
            return SiteId(name)
        while node.name not in self._parameters:
            node = node.all_input_nodes[0]
        users = (self._sites.get(user.name) for user in node.users)
        return next((site.id for site in users if site is not None), SiteId(name))

    def anyway(self, node: fx.Node) -> tuple[str, bool]:
        """The same, going up to what made the values."""
        while (found := self.of(node)) is None:
            site, sources = self._sites.get(node.name), node.all_input_nodes
            if not sources:
                return (site.id if site else node.name), False
            node = sources[0]
        return found


class Measuring:
    """Measures every complete gradient and changes none."""

    def __init__(self, meter: GradientMeter, names: Names) -> None:
        self.meter = meter
        self._names = names

    def made(
        self,
        step: Step,
        of: fx.Node,
        out: Sequence[GradientPair | None],
        pair: GradientPair,
        fault: Fault | None = None,
    ) -> torch.Tensor:
        """Sums are looked at, in ``complete``; a bias's is noted, to see how much of it is left."""
        del out, fault
        value = of.meta.get("val")
        name = self._names.of(of) if isinstance(value, torch.Tensor) and value.dim() <= 1 else None
        source = self._names.of(marked_values(step.node)[0] if is_mark(step.target) else step.node)
        if name is not None and source is not None:
            self.meter.sums(*name, source[0])
        return pair[1]

    def summed(self, node: fx.Node, pair: GradientPair) -> torch.Tensor:
        """It is looked at when it is complete."""
        del node
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


class Repairing:
    """Measures as well; repairs each wrong element, and notes whose fault it was.

    A wrong element gets FP32's value, limited to the format and rounded; so does all that is computed from a
    repaired gradient, so that what lies behind is audited as if the fault had not happened. The op that made
    a wrong share is the origin, unless what it was given has stayed beyond the format since a repair.

    Attributes:
        origins: in the order of the way back.
    """

    def __init__(self, inner: Measuring, names: Names, rounding: Rounding, limit: float, batch: int) -> None:
        self._inner = inner
        self._names = names
        self._rounding = rounding
        self._limit = limit
        self._batch = batch
        self._beyond: set[fx.Node] = set()
        self._followed: set[fx.Node] = set()
        self.origins: list[GradientOrigin] = []

    def made(
        self,
        step: Step,
        of: fx.Node,
        out: Sequence[GradientPair | None],
        pair: GradientPair,
        fault: Fault | None = None,
    ) -> torch.Tensor:
        """Look at one op's share."""
        self._inner.made(step, of, out, pair)
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
        """Shares that are in order can have a sum that is not; the scaled loss may be too large itself."""
        wrong = _wrong(*pair)
        value = pair[1]
        if wrong is not None:
            if node not in self._beyond:
                self._note(node, node)
            self._repair(node, pair, wrong)
            self._followed.add(node)
            value = self._following(node, pair)
        return value

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Measure what it is after the repairs."""
        del dtype
        return self._inner.complete(node, self._rounding.dtype(node), pair)

    def _note(self, node: fx.Node, of: fx.Node, fault: Fault | None = None) -> None:
        value, is_parameter = self._names.anyway(of)
        where = (fault.way, fault.op, fault.source) if fault is not None else ()
        site = self._names.nearest(node) if fault is None else self._names.own(node)
        origin = GradientOrigin(site, value, is_parameter, self._batch, *where)
        self.origins.append(origin)

    def _repair(self, of: fx.Node, pair: GradientPair, wrong: torch.Tensor) -> None:
        self._beyond.add(of)
        bad = int(wrong.sum())
        nan = int((pair[1].isnan() & wrong).sum())
        self._inner.meter.wrong(*self._names.anyway(of), infinite=bad - nan, nan=nan)

    def _following(self, of: fx.Node, pair: GradientPair) -> torch.Tensor:
        return self._rounding.represent(pair[0].clamp(-self._limit, self._limit), of).to(pair[1].dtype)


def _wrong(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    if value is reference or value.shape != reference.shape:
        return None
    mask = reference.isfinite() & ~value.isfinite()
    return mask if bool(mask.any()) else None
