"""Runs one mode at one batch size: builds it, warms it up, measures its memory and times its steps."""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ampaudit.benchmarking.memory import live_bytes, measure_peak
from ampaudit.benchmarking.modes import BenchSetup, ModeRunner, NotSupported, build_mode, moved
from ampaudit.benchmarking.predict import predict_step
from ampaudit.core.decibels import signal_to_noise_db
from ampaudit.core.errors import AuditError, first_line
from ampaudit.devices.estimate import roofline_seconds, total_work
from ampaudit.report.bench import BenchRow
from ampaudit.source import Batch
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.failure import plain_reason

__all__ = ["ModeRun", "finish_run", "release_memory", "start_run", "time_step"]


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
        floats = (t for t in tensor_leaves((output,), {}) if t.is_floating_point())
        run.output = tuple(t.detach().float().cpu() for t in floats)
        row = replace(row, how=runner.how, peak_bytes=peak.total - before, workspace_bytes=peak.workspace)
        row = replace(row, metric=_metric(setup, output))
        run.row = _with_prediction(row, runner, setup)
    except NotSupported as error:
        run.row = replace(row, status="not supported", note=str(error))
    except AuditError as error:
        if mode == "fp32":
            raise  # then no mode can run
        run.row = replace(row, status="failed", note=str(error.args[0]))
    except Exception as error:  # the model's code may raise anything
        run.row = _failed(row, error)
    if run.runner is None:
        release_memory(setup.device)
    return run


def _failed(row: BenchRow, error: Exception) -> BenchRow:
    """Return the row of a mode that failed."""
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
    """Compute the model file's metric of an output; ``None`` without a metric or if it fails."""
    if setup.source.metric is None:
        return None
    try:
        value = float(setup.source.metric(output, setup.source.batches[0].whole))
    except Exception:
        return None
    return value if math.isfinite(value) else None


def time_step(run: ModeRun, device: torch.device) -> None:
    """Time one more step; if it fails, the mode ends and its memory is released."""
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


def finish_run(run: ModeRun, exact: tuple[torch.Tensor, ...]) -> BenchRow:
    """Return the finished row; ``exact`` are the outputs of fp32."""
    row = run.row
    if row.status != "ok":
        return row
    finite = all(bool(t.isfinite().all()) for t in run.output)
    return replace(
        row,
        seconds=statistics.median(run.seconds),
        least=min(run.seconds),
        most=max(run.seconds),
        finite=finite,
        sqnr_db=_sqnr(exact, run.output) if row.mode != "fp32" and finite and exact else None,
    )


def _sqnr(exact: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> float | None:
    """Return the signal-to-noise ratio over all outputs in dB; ``None`` if they are equal."""
    signal = sum(float(t.double().square().sum()) for t in exact)
    pairs = zip(exact, outputs, strict=True)
    noise = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return signal_to_noise_db(signal, noise)
