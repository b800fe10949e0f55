"""One mode of one batch size: built, warmed up, measured, timed in its turn, and what is known in the end."""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampaudit.bench.batches import moved
from ampaudit.bench.estimate import roofline_seconds, total_work
from ampaudit.bench.memory import live_bytes, measure_peak
from ampaudit.bench.modes import BenchSetup, ModeRunner, NotSupported, build_mode
from ampaudit.bench.predict import predict_step
from ampaudit.core.decibels import signal_to_noise_db
from ampaudit.core.errors import AuditError, first_line
from ampaudit.report.bench import BenchRow
from ampaudit.source import Batch
from ampaudit.trace.entry import tensor_leaves

__all__ = ["ModeRun", "finish_run", "release_memory", "start_run", "time_step"]


@dataclass
class ModeRun:
    """One mode of a size: what is known, and while it can run, the mode itself."""

    row: BenchRow
    built: ModeRunner | None = None
    batch: Batch | None = None
    output: tuple[torch.Tensor, ...] = ()
    seconds: tuple[float, ...] = ()


def start_run(mode: str, subject: BenchSetup, size: int) -> ModeRun:
    """Build a mode, warm it up, and measure its memory while it is the only one that runs."""
    row = BenchRow(mode=mode, how="", batch_size=size, status="ok")
    lane = ModeRun(row)
    try:
        torch.manual_seed(subject.seed)
        before = _allocated(subject.device)
        built = build_mode(mode, subject)
        batch = moved(subject.source.batches[0], subject.device, built.dtype)
        output = built.forward(batch)
        for _ in range(2):
            built.step(batch)
        held = live_bytes(built.model, built.optimizer)
        peak = measure_peak(lambda: built.step(batch), held, subject.device)
        lane.built, lane.batch = built, batch
        lane.output = tuple(t.detach().float().cpu() for t in _floats(output))
        row = replace(row, how=built.how, peak_bytes=peak.total - before, workspace_bytes=peak.workspace)
        row = replace(row, metric=_metric(subject, output))
        lane.row = _with_prediction(row, built, subject)
    except NotSupported as error:
        lane.row = replace(row, status="not supported", note=str(error))
    except AuditError as error:
        if mode == "fp32":
            raise  # no mode can run then
        lane.row = replace(row, status="failed", note=str(error.args[0]))
    except (MemoryError, RuntimeError, TypeError, ValueError) as error:
        lane.row = _broken(row, error)
    if lane.built is None:
        release_memory(subject.device)
    return lane


def _broken(row: BenchRow, error: Exception) -> BenchRow:
    """A mode in which the model cannot be run: it goes into the table, and the others go on."""
    text = first_line(error)
    memory = isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text
    return replace(
        row, status="out of memory" if memory else "failed", note=f"{type(error).__name__}: {text}"
    )


def _allocated(device: torch.device) -> int:
    """Bytes of the other modes, which stay on a GPU."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _with_prediction(row: BenchRow, built: ModeRunner, subject: BenchSetup) -> BenchRow:
    try:
        memory, ops = predict_step(built, subject)
    except Exception as error:  # an op that needs data, or that torch cannot take without
        return replace(row, note=f"no prediction: {type(error).__name__}: {first_line(error)}")
    tf32 = row.mode == "tf32"
    best = roofline_seconds(ops, subject.target, tf32=tf32) if subject.target is not None else None
    return replace(row, memory=memory, work=total_work(ops, tf32=tf32), at_best=best)


def _metric(subject: BenchSetup, output: Any) -> float | None:
    """The model file's own measure of the output; none if it has none, or cannot take this one."""
    if subject.source.metric is None:
        return None
    try:
        found = float(subject.source.metric(output, subject.source.batches[0].whole))
    except Exception:
        return None
    return found if math.isfinite(found) else None


def time_step(lane: ModeRun, device: torch.device) -> None:
    """Time one more step; a mode that fails now leaves its memory to the others."""
    assert lane.built is not None
    assert lane.batch is not None
    try:
        lane.seconds = (*lane.seconds, _seconds(lane.built, lane.batch, device))
    except (MemoryError, RuntimeError) as error:  # the other modes may have left too little memory
        lane.row = _broken(lane.row, error)
        lane.built = None
        release_memory(device)


def _seconds(built: ModeRunner, batch: Batch, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        built.step(batch)
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    built.step(batch)
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def release_memory(device: torch.device) -> None:
    """Give memory back that nothing holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _floats(output: Any) -> list[torch.Tensor]:
    return [t for t in tensor_leaves((output,), {}) if t.is_floating_point()]


def finish_run(lane: ModeRun, exact: tuple[torch.Tensor, ...]) -> BenchRow:
    """The row of a mode; ``exact`` are fp32's outputs."""
    row = lane.row
    if row.status != "ok":
        return row
    finite = all(bool(t.isfinite().all()) for t in lane.output)
    return replace(
        row,
        seconds=statistics.median(lane.seconds),
        least=min(lane.seconds),
        most=max(lane.seconds),
        finite=finite,
        sqnr_db=_sqnr(exact, lane.output) if row.mode != "fp32" and finite and exact else None,
    )


def _sqnr(exact: tuple[torch.Tensor, ...], seen: tuple[torch.Tensor, ...]) -> float | None:
    """10 log10 of the sum of squares over that of the errors, over all outputs; ``None`` if equal."""
    signal = sum(float(t.double().square().sum()) for t in exact)
    pairs = zip(exact, seen, strict=True)
    noise = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return signal_to_noise_db(signal, noise)
