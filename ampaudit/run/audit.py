"""Audits a model over all batches, under one policy or several side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError, InputError
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet
from ampaudit.run.config import RunConfig
from ampaudit.run.eager import EagerModel, reporting_model_failures
from ampaudit.run.guards import guarded
from ampaudit.run.loop import run_steps
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import Runner
from ampaudit.run.segmented import run_segmented
from ampaudit.run.share import ALONE, Failure, PartRecords, Share
from ampaudit.run.sharing import Interleaved, SharedReference
from ampaudit.source.interface import Batch
from ampaudit.trace import Site
from ampaudit.trace.caster import TWIN
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["Audit", "RunConfig", "Runner", "measure", "promoted_sites", "run_audits"]

_FIXED = ("author", TWIN)  # decisions that no policy makes


@dataclass(frozen=True, slots=True)
class Audit:
    """The record of a run and its sites in graph order.

    ``promoted`` are the sites that the policy's measured rules promoted after a first pass; ``others`` are
    the graphs of later batches that add sites, or all graphs.
    """

    record: RunRecord
    sites: tuple[Site, ...]
    converted: ConvertedModel
    parameter_free: frozenset[str]
    promoted: tuple[SiteId, ...] = ()
    others: tuple[ConvertedModel, ...] = ()

    @property
    def every(self) -> tuple[ConvertedModel, ...]:
        """All graphs, starting with the first batch's."""
        return (self.converted, *self.others)


def run_audits(
    model: nn.Module,
    batches: Sequence[Batch],
    configs: Sequence[RunConfig],
    progress: Progress,
    share: Share = ALONE,
) -> list[Audit]:
    """Audit a model under several policies, with one run of the reference for all of them.

    The configurations differ in their rules only. Policies whose measured rules promote something are run
    again, together, with the promoted ops. Several machines may share the batches.

    Raises:
        PartDone: another machine continues with this one's records.
        TraceFailed: the model cannot be exported.
        RunFailed: the model cannot be run, for lack of memory or of a kernel.
        ReferenceBroken: FP32 is not finite either.
        InputError: an input holds NaN or infinity, or there is no batch.
    """
    if not batches:
        raise InputError("there is no batch to run", hint="make batches() yield at least one batch")
    runners = _run_all(model, batches, configs, progress, "auditing", share)
    again: dict[int, tuple[RunConfig, tuple[SiteId, ...]]] = {}
    for index, (config, runner) in enumerate(zip(configs, runners, strict=True)):
        if config.rules is not None and config.rules.measured:
            measurements = runner.measurements()
            promoted = promoted_sites(config.rules, runner.executors.sites.values(), measurements)
            if promoted:
                again[index] = (replace(config, measured=measurements), promoted)
    if again:
        spent = {index: sum(runners[index].record.seconds.values()) for index in again}
        changed = [config for config, _ in again.values()]
        repeated = _run_all(model, batches, changed, progress, "re-auditing", share)
        for index, runner in zip(again, repeated, strict=True):
            runner.record.seconds = {"first pass": spent[index], **runner.record.seconds}
            runners[index] = runner
    share.finish()
    for runner in runners:
        runner.attribute()
    return [_audit(runner, again[i][1] if i in again else ()) for i, runner in enumerate(runners)]


def _audit(runner: Runner, promoted: tuple[SiteId, ...]) -> Audit:
    sites, (first, *others) = tuple(runner.executors.sites.values()), runner.executors.converted
    return Audit(
        runner.record, sites, first, frozenset(runner.executors.parameter_free), promoted, tuple(others)
    )


def _run_all(
    model: nn.Module,
    batches: Sequence[Batch],
    configs: Sequence[RunConfig],
    progress: Progress,
    phase: str,
    share: Share = ALONE,
) -> list[Runner]:
    eager = EagerModel(configs[0].device, configs[0].seed, configs[0].release)
    runners = [Runner(model, config, eager) for config in configs]
    totals = [runner.end_batch() for runner in runners]  # without any batch
    if configs[0].memory is None:
        totals = _run_in_order(model, batches, runners, totals, progress, phase, share)
    else:
        totals = share.joined(phase, run_segmented(model, runners, batches, share, phase, progress), progress)
    for runner, total in zip(runners, totals, strict=True):
        runner.record.join(total)
    progress(phase, len(batches), len(batches))
    return runners


def _run_in_order(
    model: nn.Module,
    batches: Sequence[Batch],
    runners: Sequence[Runner],
    totals: list[RunRecord],
    progress: Progress,
    phase: str,
    share: Share,
) -> list[RunRecord]:
    """Run one batch after the other."""
    local_records: dict[int, list[RunRecord]] = {}
    failure: Failure | None = None
    for number, batch in enumerate(batches):
        progress(share.progress_of(phase), number, len(batches))
        mine, earlier = share.mine(phase, number), share.recorded(phase, number)
        try:
            with reporting_model_failures(model, batch):
                _run_batch(runners, batch, number, progress, mine=mine and earlier is None)
        except AuditError as error:
            if len(batches) > 1:
                error.add_place(batch.title(number))
            if share.alone:
                raise
            failure = Failure.of(number, error)
            break
        ended = [runner.end_batch() for runner in runners]
        if share.alone:  # as in ``join_parts``, without keeping them all
            for total, record in zip(totals, ended, strict=True):
                total.join(record)
        elif mine:
            local_records[number] = earlier or ended
            if earlier is None:
                share.record(phase, number, ended)
    return totals if share.alone else share.joined(phase, PartRecords(local_records, failure), progress)


def _run_batch(
    runners: Sequence[Runner], batch: Batch, number: int, progress: Progress, *, mine: bool
) -> None:
    """Run a batch under every policy, or only trace it if another machine runs it."""
    first = runners[0]
    if not mine:
        for runner in runners:
            runner.skip(batch, number)
    elif (steps := first.config.steps) is not None:
        for runner in runners:
            run_steps(runner, steps, batch, number, progress)
    elif len(runners) == 1:
        first.run(batch, number)
    else:
        _run_together(runners, first.config, batch, number)


def _run_together(runners: Sequence[Runner], config: RunConfig, batch: Batch, number: int) -> None:
    """Run a batch under every policy together, or one by one if gradients or random numbers require it."""
    ready = [runner.prepare(batch, number) for runner in runners]
    programs = [item.executor.program for item in ready]
    alone = any(runner.config.differentiator is not None for runner in runners)
    if alone or any(step.random for program in programs for step in program.steps):
        for runner, item in zip(runners, ready, strict=True):
            runner.execute(item)
        return
    shared = SharedReference(programs)
    started = time.perf_counter()
    with guarded(config.device, batch), torch.no_grad():
        starts = [item.executor.start(item.tensors) for item in ready]
        runs = [i.executor.proceed(state, i.meter, shared) for i, state in zip(ready, starts, strict=True)]
        outputs = Interleaved(runs, shared).advance()
    assert outputs is not None, "nothing stops them"
    share = (time.perf_counter() - started) / len(runners)
    for runner, item, pairs in zip(runners, ready, outputs, strict=True):
        runner.record.add_seconds("run", share)
        runner.finish(item, pairs)


def measure(
    model: nn.Module, batches: Sequence[Batch], config: RunConfig, progress: Progress
) -> tuple[dict[SiteId, Measurement], tuple[Site, ...]]:
    """Measure the batches for the policy's measured rules; return the measurements and their sites.

    Raises:
        AuditError: the same as ``run_audits``.
    """
    runner = _run_all(model, batches, [config], progress, "measuring")[0]
    return runner.measurements(), tuple(runner.executors.sites.values())


def promoted_sites(
    rules: RuleSet, sites: Iterable[Site], measurements: Mapping[SiteId, Measurement]
) -> tuple[SiteId, ...]:
    """Return the 16-bit sites whose decision the measurements change.

    Ops that the author or their inputs keep in float32 are not counted as promoted.
    """
    return tuple(
        site.id
        for site in sites
        if site.dtype in LOW_PRECISION_DTYPES
        and site.decision.reason not in _FIXED
        and site.facts
        and site.id in measurements
        and rules.promotes(replace(site.facts, measurement=measurements[site.id]))
    )
