"""Counts subnormal values during a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from ampaudit.audit.instruments import Measuring
from ampaudit.core.formats import NumberFormat
from ampaudit.instruments.subnormals import INSTRUMENT, Subnormals
from ampaudit.run.audit import Audit
from ampaudit.run.config import Recorder, RunConfig
from ampaudit.run.lockstep import Observer, StepCall, WrappedObserver
from ampaudit.run.program import Program, Step
from ampaudit.run.record import RunRecord
from ampaudit.source import ModelSource
from ampaudit.trace.values import LOW_PRECISION_DTYPES


@dataclass(frozen=True, slots=True)
class SubnormalsPart:
    """Number of subnormal values by layer, of some batches."""

    layers: Mapping[str, int]

    def joined(self, later: SubnormalsPart) -> SubnormalsPart:
        """Return the sum of both."""
        return SubnormalsPart(Counter(self.layers) + Counter(later.layers))


class _Count(WrappedObserver):
    def __init__(self, observer: Observer, tiny: float) -> None:
        super().__init__(observer)
        self.layers: Counter[str] = Counter()
        self._tiny = tiny

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        for result, dtype in zip(pytree.tree_leaves(value), step.dtypes, strict=False):
            if step.site is not None and dtype in LOW_PRECISION_DTYPES:
                size = result.abs()
                self.layers[step.site.layer] += int(((size > 0) & (size < self._tiny)).sum())
        return super().observe(step, reference, value, call)


class _Recorder(Recorder):
    def __init__(self, config: RunConfig) -> None:
        self._tiny = config.number_format.min_normal
        self._count = _Count(Observer(), self._tiny)
        self._layers: Counter[str] = Counter()

    def following(self, observer: Observer, program: Program) -> Observer:
        self._count = _Count(observer, self._tiny)
        return self._count

    def finish(self, *_: Any) -> None:
        self._layers += self._count.layers  # of the last run: with repairs, if there were any

    def take(self, record: RunRecord) -> None:
        record.parts[INSTRUMENT.name], self._layers = SubnormalsPart(self._layers), Counter()


class _Measuring(Measuring):
    part = SubnormalsPart

    def configured(self, run_config: RunConfig, source: ModelSource, options: Any) -> RunConfig:
        return replace(run_config, recorders=(*run_config.recorders, _Recorder))

    def section(self, audit: Audit, number_format: NumberFormat) -> Subnormals:
        return Subnormals(dict(sorted(audit.record.parts[INSTRUMENT.name].layers.items())))


MEASURING = _Measuring()
