"""Measures what converting a checkpoint and streaming weights cost, as ratios within one run.

Conversion: its time without that of a bare cast, in multiples of ``cp`` (limit 1.5), with and without the
start of Python and torch, and its peak memory above that of a Python process that has imported torch.
Streaming: scans with and without ``--stream`` of a model whose weights are four times a memory limit.
Memory is the sampled resident set size of the process, which includes file pages.

    python -m benchmarks.checkpoints [--gigabytes 2] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from ampaudit.checkpoint.safetensors import TensorEntry, write_safetensors
from benchmarks.options import parser

WIDTH = 5000  # a weight of 100 MB
LIMITS = {"convert": 1.5, "memory_mb": 300, "stream": 2.0, "limit": 4.0}
MODEL = """
import torch
from torch import nn
LAYERS, WIDTH = {layers}, {width}
def get_model():
    layers = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers)
def example_inputs(): return torch.randn(64, WIDTH)
"""


def make_checkpoint(path: Path, layers: int, width: int = WIDTH) -> None:
    """Write the weights of ``layers`` blocks, holding one tensor at a time."""
    entries: list[TensorEntry] = []
    pieces: list[tuple[str, Iterator[torch.Tensor]]] = []
    for layer in range(layers):
        entries.append(TensorEntry(f"{3 * layer}.weight", "F32", (width, width)))
        pieces.append((entries[-1].name, random_weight(layer, width)))
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            entries.append(TensorEntry(f"{3 * layer + 2}.{name}", "F32", (width,)))
            pieces.append((entries[-1].name, iter([torch.full((width,), value)])))
    write_safetensors(path, entries, {"format": "pt"}, pieces)


def random_weight(seed: int, width: int) -> Iterator[torch.Tensor]:
    """Yield a weight, which is created only when it is written."""
    torch.manual_seed(seed)
    yield torch.randn(width, width).mul_(0.02).view(-1)


def run(command: list[str]) -> tuple[float, float]:
    """Run a command that must succeed; return seconds and peak resident megabytes, file pages included."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
            except psutil.Error:
                break
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        if process.wait() != 0:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode()}")
    return seconds, peak / 1e6


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ampaudit", *map(str, arguments)]


def cast_seconds(source: Path) -> float:
    """Return the seconds of casting as many values, in pieces of the size that the converter uses."""
    piece = torch.randn(1 << 22)
    count = source.stat().st_size // (4 * piece.numel())
    started = time.perf_counter()
    for _ in range(count):
        piece.to(torch.float16)
    return time.perf_counter() - started


def time_conversion(folder: Path, source: Path, repeats: int) -> dict[str, Any]:
    """Time ``cp`` of the checkpoint, the conversion, its start alone, and the bare cast, interleaved."""
    base = run([sys.executable, "-c", "import torch, time; time.sleep(0.5)"])[1]
    started = [sys.executable, "-c", "import ampaudit.export.convert"]
    out, copy = folder / "out", folder / "copy"
    whole, without_start, peaks, seconds = [], [], [], []
    for _ in range(repeats):
        copied = run(["cp", str(source), str(copy)])[0]
        copy.unlink()
        took, peak = run(program("convert", source, "-o", out, "--no-masters"))
        shutil.rmtree(out)
        start, cast = run(started)[0], cast_seconds(source)
        whole.append((took - cast) / copied)
        without_start.append((took - start - cast) / copied)
        peaks.append(peak - base)
        seconds.append({"convert": took, "cp": copied, "cast": cast, "start": start})
    return {
        "ratio_without_start": statistics.median(without_start),
        "spread_without_start": [min(without_start), max(without_start)],
        "ratio": statistics.median(whole),
        "spread": [min(whole), max(whole)],
        "peak_mb_above_torch": max(peaks),
        "seconds": seconds,
    }


def time_streaming(folder: Path, source: Path, layers: int, width: int, repeats: int) -> dict[str, Any]:
    """Scan with and without ``--stream``, interleaved."""
    model = folder / "model.py"
    model.write_text(MODEL.format(layers=layers, width=width))
    limit = source.stat().st_size / 4 / 1e6
    ratios, peaks, resident_peaks = [], [], []
    for _ in range(repeats):
        common = ("scan", model, "--weights", source, "--policy", "torch-cuda", "-q", "--fail-on", "never")
        streamed, peak = run(program(*common, "--stream"))
        resident, whole = run(program(*common))
        ratios.append(streamed / resident)
        peaks.append(peak)
        resident_peaks.append(whole)
    return {
        "ratio_to_resident": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "weights_mb": source.stat().st_size / 1e6,
        "limit_mb": limit,
        "peak_mb": max(peaks),
        "resident_peak_mb": max(resident_peaks),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__, repeats=5)
    words.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    chosen = words.parse_args(arguments)
    width, layers = (50, 2) if chosen.smoke else (WIDTH, round(chosen.gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory(prefix="ampaudit-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "small.safetensors", layers, width)
        conversion = time_conversion(folder, folder / "small.safetensors", chosen.repeats)
        print(f"convert {layers * 0.1:.1f} GB, less the cast: {conversion['ratio']:.2f} x cp", end=" ")
        print(f"({conversion['spread'][0]:.2f} to {conversion['spread'][1]:.2f}); limit {LIMITS['convert']}")
        print(f"  without starting Python and torch: {conversion['ratio_without_start']:.2f} x cp")
        print(f"  peak {conversion['peak_mb_above_torch']:.0f} MB above torch; limit {LIMITS['memory_mb']}")
        make_checkpoint(folder / "large.safetensors", 2 * layers, width)
        repeats = max(1, chosen.repeats // 2)
        streaming = time_streaming(folder, folder / "large.safetensors", 2 * layers, width, repeats)
        ratio = streaming["ratio_to_resident"]
        print(f"scan --stream: {ratio:.2f} x the resident scan; limit {LIMITS['stream']}")
        print(f"  peak {streaming['peak_mb']:.0f} MB, weights {streaming['weights_mb']:.0f} MB;", end=" ")
        print(f"limit {streaming['limit_mb']:.0f} MB; resident {streaming['resident_peak_mb']:.0f} MB")
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cores": psutil.cpu_count(),
        "machine": platform.machine(),
        "conversion": conversion,
        "streaming": streaming,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
