"""Measures every floating-point value of a run without changing it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.report.gap import Gap, GapKind
from ampaudit.run.accumulation import multiplies
from ampaudit.run.backends import Backend
from ampaudit.run.decisions import differing_choices
from ampaudit.run.local import local_error
from ampaudit.run.measure import FIELDS, BlockMeasure, measure_cpu, measure_on_device
from ampaudit.run.norm_internals import inside_peak
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.path_values import PathValues
from ampaudit.run.samples import Samples, SampleStatistics
from ampaudit.run.step import Step
from ampaudit.run.views import components, flat_pair
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Role

__all__ = ["MeasuredValue", "Meter", "float_outputs"]


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """The measurements of one site in one batch."""

    site: SiteId
    fields: dict[str, float]
    elements: int
    updated: int | None = None  # position of the argument, if it is one that the op wrote besides its result

    @property
    def bad(self) -> bool:
        """Return whether an element is inf or NaN in 16 bits only."""
        return self.fields["pos_inf"] + self.fields["neg_inf"] + self.fields["nan"] > 0


class Meter(Observer):
    """Measures pairs. On a CPU the numbers are there at once; on a GPU they stay until ``results``.

    Attributes:
        deferred: whether numbers stay on their device, even on a CPU.
    """

    deferred = False

    def __init__(self, number_format: NumberFormat, backend: Backend, local: bool = True) -> None:
        self.samples = Samples(number_format.min_normal)
        self.path = PathValues()
        self._near = number_format.max / 2
        self.gaps: set[Gap] = set()
        self._backend = backend
        self.local = local
        self._updated: dict[int, int] = {}  # positions of written arguments, by the number of a row
        self._rows: list[tuple[SiteId, list[float] | torch.Tensor, int]] = []
        self._local_rows: list[tuple[SiteId, torch.Tensor, int]] = []
        self._inside_rows: list[tuple[SiteId, torch.Tensor]] = []
        self._choices: list[tuple[SiteId, torch.Tensor, int]] = []
        self._chosen: list[tuple[str, torch.Tensor]] = []  # of stacks of matrices, by name

    def block_measure(self, step: Step, reference: Any) -> BlockMeasure | None:
        """Measure single CPU outputs while they are rounded."""
        if self.deferred or not isinstance(reference, torch.Tensor):
            return None
        if step.observed and reference.device.type == "cpu" and not reference.is_complex():
            return BlockMeasure(reference, self._near)
        return None

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure a step's outputs."""
        self._note_gaps(step)
        self.path.observe(step, reference, call)
        if step.decides and step.site is not None and not call.shared:
            self._count_choices(step.site.id, reference, value)
        if step.choice is not None:
            self._chosen.append(
                (step.choice.parameter, step.choice.chosen(call.inputs[step.choice.index][1]))
            )
        if step.site is None or not step.observed:
            return value
        bad = False
        for first, second in float_outputs(reference, value):
            bad |= self._measure_pair(step, first, second, call.measure)
        for position, first, second in call.updates(step):
            if second.is_floating_point():
                self._updated[len(self._rows)] = position
                bad |= self._measure_pair(step, first, second, None)
        self._measure_inside(step, call)
        if self.local and step.low_precision and not call.shared and not bad:
            error = local_error(step, self._backend, call, reference)
            if error is not None:
                self._local_rows.append((step.site.id, *error))
        return value

    def _measure_inside(self, step: Step, call: StepCall) -> None:
        assert step.site is not None
        if self.local and (peak := inside_peak(step, call.ref_args, self._near * 2)) is not None:
            self._inside_rows.append((step.site.id, peak))

    def _measure_pair(
        self, step: Step, reference: torch.Tensor, value: torch.Tensor, seen: BlockMeasure | None
    ) -> bool:
        """Measure one output; on the CPU, return whether it went wrong."""
        assert step.site is not None
        if reference.shape != value.shape:
            self._note_gap(
                step, GapKind.SHAPE, "its shape depends on values and differs between FP32 and 16 bits"
            )
            return False
        if value.numel() == 0:
            self._rows.append((step.site.id, [0.0] * len(FIELDS), 0))
            return False
        first, second = flat_pair(reference, value)
        self.samples.add(step.site.id, first, second)
        if self.deferred or value.device.type != "cpu":
            self._rows.append((step.site.id, measure_on_device(first, second), second.numel()))
            return False
        second = second.to(first.dtype)
        if seen is not None and seen.elements == value.numel():
            fields = seen.fields
        elif step.site.role is Role.WEIGHT_CAST:
            fields = self._measure_weight(first, second)
        else:
            fields = measure_cpu(first, second, self._near)
        self._rows.append((step.site.id, fields, second.numel()))
        return fields[2] + fields[3] + fields[4] > 0

    def _measure_weight(self, master: torch.Tensor, copy: torch.Tensor) -> list[float]:
        """Measure a weight; one within range is only rounded, so its exact error is not computed."""
        fields = measure_cpu(master, master)
        return fields if fields[0] < self._near else measure_cpu(master, copy, self._near)

    def _count_choices(self, site: SiteId, reference: Any, value: Any) -> None:
        counted = differing_choices(reference, value)
        if counted is not None:
            self._choices.append((site, *counted))

    def choices(self) -> Iterator[tuple[SiteId, int, int]]:
        """Return, per decision, the number of choices and how many differ between the runs."""
        differing = torch.stack([row for _, row, _ in self._choices]).tolist() if self._choices else []
        for (site, _, elements), count in zip(self._choices, differing, strict=True):
            yield site, elements, int(count)

    def chosen(self) -> Iterator[tuple[str, set[int]]]:
        """Return, per stack of matrices, the numbers of those that were chosen by a tensor."""
        if not self._chosen:
            return
        flags = iter(torch.cat([used for _, used in self._chosen]).tolist())
        for name, used in self._chosen:
            yield name, {number for number, flag in enumerate(islice(flags, len(used))) if flag}

    def _note_gap(self, step: Step, kind: GapKind, reason: str) -> None:
        if step.site is not None:
            self.gaps.add(Gap(step.site.id, kind, step.site.op, reason))

    def _note_gaps(self, step: Step) -> None:
        op = overload_of(step.target)
        if op is not None and step.low_precision and multiplies(op, step.args, step.kwargs):
            reason = "16 bits round after each factor; here the product is rounded once"
            self._note_gap(step, GapKind.PRODUCT, reason)
        if isinstance(step.target, HigherOrderOperator):
            reason = "control flow: only its outputs are checked, not its branches"
            self._note_gap(step, GapKind.CONTROL_FLOW, reason)

    def state(self) -> dict[str, Any]:
        """Return everything that was seen, as plain data and tensors, for another process to go on with."""
        self.samples.flush()
        return {
            "samples": [(site, asdict(found)) for site, found in self.samples.results.items()],
            "path": self.path.state(),
            "gaps": [(gap.site, gap.kind.value, gap.op, gap.reason) for gap in self.gaps],
            "updated": self._updated,
            "rows": self._rows,
            "local": self._local_rows,
            "inside": self._inside_rows,
            "choices": self._choices,
            "chosen": self._chosen,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take what a meter of another process has seen."""
        self.samples.results = {site: SampleStatistics(**found) for site, found in state["samples"]}
        self.path.restore(state["path"])
        self.gaps = {Gap(site, GapKind(kind), op, reason) for site, kind, op, reason in state["gaps"]}
        self._updated, self._rows = state["updated"], state["rows"]
        self._local_rows, self._inside_rows = state["local"], state["inside"]
        self._choices, self._chosen = state["choices"], state["chosen"]

    def results(self) -> Iterator[MeasuredValue]:
        """Return all measurements since the start, fetched from the device at once."""
        self.samples.flush()
        waiting = [row for _, row, _ in self._rows if isinstance(row, torch.Tensor)]
        fetched = iter(torch.stack(waiting).tolist() if waiting else [])
        for index, (site, row, elements) in enumerate(self._rows):
            numbers = next(fetched) if isinstance(row, torch.Tensor) else row
            yield MeasuredValue(
                site, dict(zip(FIELDS, numbers, strict=True)), elements, self._updated.get(index)
            )

    def inside_results(self) -> Iterator[tuple[SiteId, float]]:
        """Return the largest square inside each norm with 16-bit input."""
        if self._inside_rows:
            peaks = torch.stack([peak for _, peak in self._inside_rows]).tolist()
            yield from zip((site for site, _ in self._inside_rows), peaks, strict=True)

    def local_results(self) -> Iterator[tuple[SiteId, float, float, int]]:
        """Return sums of squared local errors and references, with the number of elements."""
        if not self._local_rows:
            return
        numbers = torch.stack([row for _, row, _ in self._local_rows]).tolist()
        for (site, _, elements), (error, signal) in zip(self._local_rows, numbers, strict=True):
            if math.isfinite(error) and math.isfinite(signal):
                yield site, error, signal, elements


def float_outputs(reference: Any, value: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of real tensors among an op's outputs; complex ones as their components."""
    single = not isinstance(value, list | tuple)
    pairs = zip((reference,), (value,)) if single else zip(reference, value)  # noqa: B905
    for first, second in pairs:
        if isinstance(second, torch.Tensor) and (second.is_floating_point() or second.is_complex()):
            yield components(first), components(second)
