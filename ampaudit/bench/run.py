"""Measures every mode at every batch size, in turns, and builds the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.bench.batches import batch_size_of
from ampaudit.bench.devices.catalogue import Device
from ampaudit.bench.devices.host import this_machine
from ampaudit.bench.largest import largest
from ampaudit.bench.mode_runs import ModeRun, finish_run, start_run, time_step
from ampaudit.bench.modes import BenchSetup, with_batch_size
from ampaudit.core.formats import low_precision_format
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.bench import BenchReport, BenchRow, Largest
from ampaudit.report.model import ModelInfo
from ampaudit.run.audit import Progress, silent
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource

__all__ = ["BenchSettings", "bench_source"]

CPU_NOTE = "times and memory on a CPU say nothing about a GPU, whose kernels and caching differ"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How to measure.

    Attributes:
        modes: in the order of the table; the first is what others are compared with.
        sizes: of batches; empty takes the model file's own.
        policy: of conversions.
        dtype: of autocast and conversions.
        device: ``auto``, ``cpu`` or ``cuda``.
        train: whether steps are training steps.
        repeats: timed steps of each mode.
        seed: of random numbers.
        target: a device to estimate the time for.
        max_batch: whether to search for the largest batch that fits.
        progress: told about each mode.
    """

    modes: Sequence[str]
    sizes: Sequence[int] = ()
    policy: str | RuleSet = "ampaudit"
    dtype: str = "float16"
    device: str = "auto"
    train: bool = False
    repeats: int = 10
    seed: int = 0
    target: Device | None = None
    max_batch: bool = False
    progress: Progress | None = None


def bench_source(source: ModelSource, settings: BenchSettings) -> BenchReport:
    """Measure every mode at every batch size; an interrupted run reports what is finished.

    Raises:
        AuditError: the model has no loss to train with, or there is no such device.
    """
    setup = _setup(source, settings)
    first = source.batches[0]
    rows: list[BenchRow] = []
    most: tuple[Largest, ...] = ()
    interrupted = False
    for size in settings.sizes or (batch_size_of(first),):
        found, interrupted = _of_size(with_batch_size(setup, size), size, settings)
        rows += found
        if interrupted:
            break
    if interrupted and not any(row.status == "ok" for row in rows):
        raise KeyboardInterrupt
    if settings.max_batch and not interrupted:
        try:
            most = tuple(largest(setup, settings.modes, settings.progress or silent))
        except KeyboardInterrupt:
            interrupted = True
    machine = this_machine()
    kind = setup.device.type
    return BenchReport(
        schema=1,
        tool=THIS_TOOL,
        model=ModelInfo(source.location, source.kind, source.sha256),
        device=kind,
        device_name=next((found.name for found in machine.devices if found.kind == kind), kind),
        dtype=setup.form.name,
        policy=setup.rules.name,
        train=settings.train,
        repeats=settings.repeats,
        rows=tuple(rows),
        target=settings.target.id if settings.target is not None else None,
        largest=most,
        interrupted=interrupted,
        notes=tuple(_notes(settings, kind)),
        environment=this_environment(),
    )


def _setup(source: ModelSource, settings: BenchSettings) -> BenchSetup:
    device, form = pick_device(settings.device), low_precision_format(settings.dtype)
    rules = settings.policy if isinstance(settings.policy, RuleSet) else load_policy(settings.policy)
    rules = rules.for_environment(environment_of(device))
    return BenchSetup(source, device, form, rules, settings.train, settings.seed, settings.target)


def _notes(settings: BenchSettings, kind: str) -> Iterator[str]:
    if kind == "cpu":
        yield CPU_NOTE
    if settings.target is not None:
        yield (
            f"at best: a roofline estimate for {settings.target.name}, as if every kernel reached the peak "
            "rates; launches, caches and sizes that miss tensor cores are left out"
        )


def _of_size(setup: BenchSetup, size: int, settings: BenchSettings) -> tuple[list[BenchRow], bool]:
    """Measure one size; if interrupted, the rows are of modes that were timed at least once."""
    progress = settings.progress or silent
    runs: list[ModeRun] = []
    interrupted = False
    try:
        for index, mode in enumerate(settings.modes):
            progress(f"preparing batch size {size}", index, len(settings.modes))
            runs.append(start_run(mode, setup, size))
        for repeat in range(settings.repeats):
            progress(f"timing batch size {size}", repeat, settings.repeats)
            for run in runs:
                if run.runner is not None:
                    time_step(run, setup.device)
    except KeyboardInterrupt:
        interrupted = True
        runs = [run for run in runs if run.seconds or run.row.status != "ok"]
    exact = next((run.output for run in runs if run.row.mode == "fp32" and run.output), ())
    return [finish_run(run, exact) for run in runs], interrupted
