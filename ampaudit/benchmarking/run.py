"""Measures every mode at every batch size, and builds the report."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ampaudit.audit.checks.outputs import accuracy_text
from ampaudit.audit.config import rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.scan_report import THIS_TOOL, this_environment
from ampaudit.benchmarking.config import BenchConfig
from ampaudit.benchmarking.memory import holds_graph, live_bytes, measure_peak, predict_step
from ampaudit.benchmarking.modes import (
    BenchSetup,
    ModeRunner,
    NotSupported,
    batch_size_of,
    build_mode,
    moved,
    with_batch_size,
)
from ampaudit.core import interrupts
from ampaudit.core.config import with_options
from ampaudit.core.errors import AuditError, first_line
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import plural
from ampaudit.devices.estimate import roofline_seconds, total_work
from ampaudit.devices.host import this_machine
from ampaudit.report.bench import BenchReport, BenchRow, Largest
from ampaudit.report.model import ModelInfo
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.outputs import compare_outputs
from ampaudit.source import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.failure import plain_reason
from ampaudit.trace.isolation import isolated

CPU_NOTE = "times and memory on a CPU say nothing about a GPU, whose kernels and caching differ"


@with_options(BenchConfig)
@isolated()
def bench(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    source: SourceConfig | None = None,
    config: BenchConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> BenchReport:
    """Measure every mode at every batch size; an interrupted run reports the finished measurements.

    Args:
        model: Model, which is not changed; or its location: a path, or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        source: How to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: Context of the call; only ``on_progress`` is used.
        **options: Fields of ``BenchConfig``, which override those of ``config``.

    Returns:
        The report: time, memory and accuracy of each mode.

    Raises:
        AuditError: The model has no loss to train with, or the device does not exist.
    """
    config = BenchConfig.merged(config, options)
    config.check()
    opened = as_source(model, inputs, options=source or SourceConfig.of(config))
    opened = replace(opened, loss=config.loss or opened.loss)
    device, form = pick_device(config.device), low_precision_format(config.dtype)
    rules = rules_of(config.policy).for_environment(environment_of(device))
    setup = BenchSetup(opened, device, form, rules, config.train, config.seed, config.target)
    first = opened.batches[0]
    rows: list[BenchRow] = []
    largest_batches: tuple[Largest, ...] = ()
    interrupted = False
    for size in config.sizes or (batch_size_of(first),):
        measured, interrupted = _measure_size(with_batch_size(setup, size), size, config, session.on_progress)
        rows += measured
        if interrupted:
            break
    if interrupted and not any(row.status == "ok" for row in rows):
        raise KeyboardInterrupt
    if config.max_batch and not interrupted:
        try:
            largest_batches = tuple(find_largest(setup, config.modes, session.on_progress))
        except KeyboardInterrupt:
            interrupts.deliver_anyway()
            interrupted = True
    machine = this_machine()
    kind = device.type
    return BenchReport(
        schema=1,
        tool=THIS_TOOL,
        model=ModelInfo(opened.location, opened.kind, opened.sha256),
        device=kind,
        device_name=next((device.name for device in machine.devices if device.kind == kind), kind),
        dtype=setup.form.name,
        policy=setup.rules.name,
        train=config.train,
        repeats=config.repeats,
        rows=tuple(rows),
        target=config.target.id if config.target is not None else None,
        largest=largest_batches,
        interrupted=interrupted,
        notes=tuple(_notes(config, kind)),
        environment=this_environment(),
        inputs=opened.inputs,
    )


def _notes(config: BenchConfig, kind: str) -> Iterator[str]:
    if kind == "cpu":
        yield CPU_NOTE
    if config.target is not None:
        yield (
            f"at best: a roofline estimate for {config.target.name}, as if every kernel reached the peak "
            "rates; launches, caches and sizes that miss tensor cores are left out"
        )


def _measure_size(
    setup: BenchSetup, size: int, config: BenchConfig, progress: Progress
) -> tuple[list[BenchRow], bool]:
    """Measure one batch size; return the rows, and whether it was interrupted."""
    runs: list[ModeRun] = []
    interrupted = False
    try:
        for index, mode in enumerate(config.modes):
            progress(f"preparing batch size {size}", index, len(config.modes))
            runs.append(start_run(mode, setup, size))
        for repeat in range(config.repeats):
            progress(f"timing batch size {size}", repeat, config.repeats)
            for run in runs:
                if run.runner is not None:
                    time_step(run, setup.device)
    except KeyboardInterrupt:
        interrupts.deliver_anyway()
        interrupted = True
        runs = [run for run in runs if run.seconds or run.row.status != "ok"]
    exact = next((run.output for run in runs if run.row.mode == "fp32" and run.row.status == "ok"), None)
    return [finish_run(run, exact) for run in runs], interrupted


def find_largest(setup: BenchSetup, modes: Sequence[str], progress: Progress) -> Iterator[Largest]:
    """Find the largest batch of each mode, measured on a GPU or predicted for the target device."""
    for index, mode in enumerate(modes):
        progress("largest batch", index, len(modes))
        fits, how = _fits(mode, setup)
        if fits is not None:
            yield Largest(mode, search(fits), how)


def _fits(mode: str, setup: BenchSetup) -> tuple[Callable[[int], bool] | None, str]:
    """Return a function that tests whether a batch size fits, or ``None``, and a description of the test."""
    target = setup.target
    if target is not None:
        if not target.memory_gb:
            return None, ""
        limit = target.memory_gb * 1e9
        try:
            runner = build_mode(mode, setup)
        except NotSupported:
            return None, ""
        if holds_graph(runner.model):  # a graph accepts only the batch size of its trace
            return None, ""
        return (
            lambda size: predict_step(runner, setup, size=size)[0].peak <= limit,
            f"predicted, for {target.memory_gb:g} GB",
        )
    if setup.device.type != "cuda":
        return None, ""

    def measured_fits(size: int) -> bool:
        run = start_run(mode, with_batch_size(setup, size), size)
        fits = run.row.status == "ok"
        run.runner = run.batch = None
        release_memory(setup.device)
        return fits

    return measured_fits, "measured"


def search(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """Return the largest size up to ``limit`` that fits, by doubling and then bisecting; 0 if none does.

    Above 64, the result is only accurate to 3 %, since each test takes seconds.
    """
    size = 1
    if not fits(size):
        return 0
    while size < limit and fits(size * 2):
        size *= 2
    step = size // 2
    while step >= max(1, size // 64):
        if size + step <= limit and fits(size + step):
            size += step
        step //= 2
    return size


@dataclass
class ModeRun:
    """One mode at one batch size: its row so far and, while it can run, its runner."""

    row: BenchRow
    runner: ModeRunner | None = None
    batch: Batch | None = None
    output: tuple[torch.Tensor, ...] = ()
    seconds: tuple[float, ...] = ()


def start_run(mode: str, setup: BenchSetup, size: int) -> ModeRun:
    """Build a mode, warm it up, and measure its memory while no other mode runs."""
    row = BenchRow(mode=mode, how="", batch_size=size, status="ok")
    run = ModeRun(row)
    try:
        torch.manual_seed(setup.seed)
        before = int(torch.cuda.memory_allocated(setup.device)) if setup.device.type == "cuda" else 0
        runner = build_mode(mode, setup)
        batch = moved(setup.source.batches[0], setup.device, runner.dtype)
        output = runner.forward(batch)
        for _ in range(2):
            runner.step(batch)
        live = live_bytes(runner.model, runner.optimizer)
        peak = measure_peak(lambda: runner.step(batch), live, setup.device)
        run.runner, run.batch = runner, batch
        leaves = (t.detach().cpu() for t in tensor_leaves((output,), {}))
        run.output = tuple(t.float() if t.is_floating_point() else t for t in leaves)
        row = replace(row, how=runner.how, peak_bytes=peak.total - before, workspace_bytes=peak.workspace)
        row = replace(row, metric=_metric(setup, output))
        run.row = _with_prediction(row, runner, setup)
    except NotSupported as error:
        run.row = replace(row, status="not supported", note=str(error))
    except AuditError as error:
        if mode == "fp32":
            raise  # no other mode could run either
        run.row = replace(row, status="failed", note=str(error.args[0]))
    except Exception as error:  # the model's code may raise anything
        run.row = _failed(row, error)
    if run.runner is None:
        release_memory(setup.device)
    return run


def _failed(row: BenchRow, error: Exception) -> BenchRow:
    text = first_line(error)
    memory = isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text
    status: Literal["out of memory", "failed"] = "out of memory" if memory else "failed"
    return replace(row, status=status, note=f"{type(error).__name__}: {text}")


def _with_prediction(row: BenchRow, runner: ModeRunner, setup: BenchSetup) -> BenchRow:
    try:
        memory, ops = predict_step(runner, setup)
    except Exception as error:  # an op that needs data
        return replace(row, note=f"no prediction: {plain_reason(error)}")
    tf32 = row.mode == "tf32"
    best = roofline_seconds(ops, setup.target, tf32=tf32) if setup.target is not None else None
    return replace(row, memory=memory, work=total_work(ops, tf32=tf32), at_best=best)


def _metric(setup: BenchSetup, output: Any) -> float | None:
    """Compute the metric of the model file; ``None`` if there is none, or it fails."""
    if setup.source.metric is None:
        return None
    try:
        value = float(setup.source.metric(output, setup.source.batches[0].whole))
    except Exception:
        return None
    return value if math.isfinite(value) else None


def time_step(run: ModeRun, device: torch.device) -> None:
    """Time one more step; if it fails, the mode is not run again and its memory is released."""
    assert run.runner is not None
    assert run.batch is not None
    try:
        run.seconds = (*run.seconds, _seconds(run.runner, run.batch, device))
    except Exception as error:  # such as too little memory beside the other modes
        run.row = _failed(run.row, error)
        run.runner = None
        release_memory(device)


def _seconds(runner: ModeRunner, batch: Batch, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        runner.step(batch)
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    runner.step(batch)
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def release_memory(device: torch.device) -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def finish_run(run: ModeRun, exact: tuple[torch.Tensor, ...] | None) -> BenchRow:
    """Return the finished row; ``exact`` are the outputs of fp32, or ``None`` if it did not run."""
    row = run.row
    if row.status != "ok":
        return row
    finite = all(bool(t.isfinite().all()) for t in run.output)
    is_reference = run.output is exact
    sqnr_db, problem = _accuracy(exact, run.output) if finite and not is_reference else (None, "")
    return replace(
        row,
        seconds=statistics.median(run.seconds),
        least=min(run.seconds),
        most=max(run.seconds),
        finite=finite,
        sqnr_db=sqnr_db,
        problem=problem,
    )


def _accuracy(
    exact: tuple[torch.Tensor, ...] | None, outputs: tuple[torch.Tensor, ...]
) -> tuple[float | None, str]:
    """Return the accuracy of the least accurate output in dB, and a problem if it cannot be computed.

    Without a problem, ``None`` means that all outputs are exact.
    """
    if exact is None:
        return None, "fp32 did not run"
    if len(exact) != len(outputs):
        return None, f"{plural(len(outputs), 'output')}, in fp32 {len(exact)}"
    pairs = {f"output {index}": pair for index, pair in enumerate(zip(exact, outputs, strict=True))}
    comparisons = compare_outputs(pairs, 0)
    accuracies = {name: c.accuracy_db for name, c in comparisons.items() if c.accuracy_db is not None}
    if not accuracies:
        return None, ""
    worst = min(accuracies, key=accuracies.__getitem__)
    if math.isfinite(accuracies[worst]):
        return accuracies[worst], ""
    return None, f"{worst} {accuracy_text(comparisons[worst], '16 bits')}"
