"""Measures what an audit costs, as ratios to the plain FP32 forward pass in the same run.

Prints for each model the time of tracing, then scan and ``--ranges`` without tracing in multiples of the
plain eager forward (median and spread over interleaved repetitions), and peak memory in multiples of the
plain forward's, each measured in its own process.

    python -m benchmarks.scan_overhead [--repeats 9] [--device cpu|cuda] [--json FILE]
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.cli.loading import keep_freed_memory
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.run.audit import RunConfig, Runner
from ampaudit.source import Batch
from benchmarks.options import TINY_BERT, TINY_RESNET, parser
from benchmarks.timing import repeated_seconds, seconds

LIMITS = {"scan": 3.0, "ranges": 1.3, "memory": 3.0}


@dataclass(frozen=True)
class BenchCase:
    model: nn.Module
    batch: Batch


def bert(smoke: bool) -> BenchCase:
    """BERT-base, batch 4 x 128, eager model as Transformers builds it."""
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 30000, (4, 128))
    model = BertModel(BertConfig(**(TINY_BERT if smoke else {})))
    return BenchCase(model.eval(), Batch((), {"input_ids": ids}))


def resnet(smoke: bool) -> BenchCase:
    """A ResNet-50, batch 4 of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    pixels = torch.randn(4, 3, 224, 224)
    model = ResNetForImageClassification(ResNetConfig(**(TINY_RESNET if smoke else {})))
    return BenchCase(model.eval(), Batch((), {"pixel_values": pixels}))


CASES: dict[str, Callable[[bool], BenchCase]] = {"bert": bert, "resnet": resnet}


def forward(case: BenchCase, device: torch.device) -> None:
    with torch.no_grad():
        case.model(**{k: v.to(device) for k, v in case.batch.kwargs.items()})
    if device.type == "cuda":
        torch.cuda.synchronize()


def runner(case: BenchCase, level: str, device: torch.device) -> Runner:
    rules = load_policy("torch-cuda")
    plan = RunConfig(None if level == "ranges" else rules, rules, FLOAT16, device)
    return Runner(case.model, plan)


def time_subject(name: str, repeats: int, device: torch.device, *, smoke: bool = False) -> dict[str, Any]:
    """Time the plain forward, the scan and the ranges, interleaved, after a warm-up of each."""
    torch.manual_seed(0)
    case = CASES[name](smoke)
    runners = {level: runner(case, level, device) for level in ("scan", "ranges")}
    for one in runners.values():
        one.run(case.batch, 0)
    tracing = {level: one.record.seconds["trace"] for level, one in runners.items()}
    if device.type == "cuda":
        case.model.to(device)
    tasks: dict[str, Callable[[], None]] = {"plain": lambda: forward(case, device)}
    for level, one in runners.items():
        tasks[level] = lambda one=one: one.run(case.batch, 0)
    tasks["plain"]()
    times: dict[str, list[float]] = {task: [] for task in tasks}
    for _ in range(repeats):
        for task, call in tasks.items():
            times[task].append(seconds(call))
    plain = statistics.median(times["plain"])
    ratios = {
        level: {
            "median": statistics.median(times[level]) / plain,
            "low": min(times[level]) / plain,
            "high": max(times[level]) / plain,
        }
        for level in runners
    }
    return {"plain_seconds": plain, "trace_seconds": tracing, "ratio": ratios}


def _memory(name: str, level: str, smoke: bool, connection: Any) -> None:
    """Send how far the peak of resident bytes is above those before the run; runs in a fresh process."""
    torch.manual_seed(0)
    case = CASES[name](smoke)
    if level == "plain":
        weights = sum(p.numel() * p.element_size() for p in case.model.parameters())
        before = _resident("VmRSS") - weights
        forward(case, torch.device("cpu"))
    else:
        weights = sum(p.numel() * p.element_size() for p in case.model.parameters())
        one = runner(case, level, torch.device("cpu"))
        # importing and tracing do not belong to the run, so peak memory is reset after them
        one.executors.get(case.batch, 0)
        before = _resident("VmRSS") - weights
        _reset_peak()
        one.run(case.batch, 0)
    connection.send(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_of(name: str, *, smoke: bool) -> dict[str, float]:
    """Return the median of peak memory (weights and activations) in bytes, over separate processes."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {"plain": [], "scan": [], "ranges": []}
    for _ in range(1 if smoke else 5):  # what an allocator keeps differs by a fifth
        for level, peaks in found.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=_memory, args=(name, level, smoke, theirs))
            process.start()
            peaks.append(float(ours.recv()))
            process.join()
    return {level: statistics.median(peaks) for level, peaks in found.items()}


def help_seconds(repeats: int) -> float:
    """Return the median wall time of ``ampaudit --help``."""
    command = [sys.executable, "-m", "ampaudit", "--help"]
    run = partial(subprocess.run, command, check=True, capture_output=True)
    return statistics.median(repeated_seconds(run, repeats))


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__, repeats=9)
    words.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = words.parse_args(arguments)
    device = torch.device(options.device)
    keep_freed_memory()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "limits": LIMITS,
        "models": {},
    }
    results["help_seconds"] = help_seconds(1 if options.smoke else 5)
    print(f"ampaudit --help: {results['help_seconds']:.2f} s, limit 0.3 s")
    for name in list(CASES)[:1] if options.smoke else CASES:
        found = time_subject(name, options.repeats, device, smoke=options.smoke)
        print(f"{name}: plain FP32 forward {found['plain_seconds']:.3f} s (the unit of what follows)")
        for level, ratio in found["ratio"].items():
            print(
                f"  {level:7} {ratio['median']:.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f}), "
                f"limit {LIMITS[level]} x; tracing apart {found['trace_seconds'][level]:.2f} s"
            )
        if device.type == "cpu" and Path("/proc/self/clear_refs").exists():
            memory = memory_of(name, smoke=options.smoke)
            found["memory_bytes"] = memory
            for level in ("scan", "ranges"):
                print(f"  {level:7} peak memory {memory[level] / memory['plain']:.2f} x, limit 3.0 x")
        results["models"][name] = found
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
