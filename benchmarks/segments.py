"""Measures what a scan by segment costs, for a model whose weights are four times the memory limit.

All batches pass one segment of the model before the next is read, so each weight should be moved once; the
scanning process counts the moves. The same scan with all weights in memory alternates with it. Memory is the
sampled resident set size, file pages included, less that of the same scan of a model of two layers.

    python -m benchmarks.segments [--gigabytes 1] [--batches 16] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.checkpoints import MODEL, make_checkpoint, run
from benchmarks.options import parser

WIDTH = 2000  # a weight of 16 MB

LIMITS = {"ratio": 1.3, "moves": 1}
BATCHES = "\ndef batches():\n    for _ in range({batches}): yield torch.randn(64, WIDTH)\n"


def scan_and_count(counts: Path, words: list[str]) -> None:
    """Scan in this process, and write how often each weight was moved to a file."""
    from ampaudit.cli.program import main
    from ampaudit.run.lockstep import MasterWeights

    moved: Counter[str] = Counter()
    hold = MasterWeights.hold

    def counted(self: MasterWeights, names: Iterable[str], pool: dict[int, torch.Tensor]) -> None:
        known, wanted = set(pool), set(names)
        hold(self, wanted, pool)
        for name in wanted:
            key = id(self.all[name])
            if key not in known:
                known.add(key)
                moved[name] += 1

    MasterWeights.hold = counted  # type: ignore[method-assign]
    code = main.main(words, standalone_mode=False)
    counts.write_text(json.dumps(moved))
    sys.exit(code if isinstance(code, int) else 0)


def command(folder: Path, counts: Path, layers: int, width: int, batches: int) -> list[str]:
    """Write a model, and return the command that scans it and counts moves of weights."""
    model, weights = folder / f"{layers}.py", folder / f"{layers}.safetensors"
    make_checkpoint(weights, layers, width)
    model.write_text(MODEL.format(layers=layers, width=width) + BATCHES.format(batches=batches))
    words = ["scan", str(model), "--weights", str(weights), "--policy", "torch-cuda", "-q"]
    words += ["--batches", str(batches), "--fail-on", "never"]
    return [sys.executable, "-m", "benchmarks.segments", "--count", str(counts), *words]


def measure(folder: Path, layers: int, width: int, batches: int, repeats: int) -> dict[str, Any]:
    """Scan by segment and with all weights in memory, interleaved."""
    counts = folder / "counts.json"
    child = command(folder, counts, layers, width, batches)
    size = (folder / f"{layers}.safetensors").stat().st_size
    memory = max(size // 4, 10_000_000)  # a smoke run's ops are run as one group
    base = run([*command(folder, counts, 2, width, 2), "--stream"])[1]
    ratios, seconds, peaks, whole = [], [], [], []
    for _ in range(repeats):
        by_segment, peak = run([*child, "--stream", "--memory", str(memory)])
        moves = json.loads(counts.read_text())
        resident, resident_peak = run(child)
        ratios.append(by_segment / resident)
        seconds.append([by_segment, resident])
        peaks.append(peak - base)
        whole.append(resident_peak - base)
    return {
        "batches": batches,
        "weights_mb": size / 1e6,
        "memory_mb": memory / 1e6,
        "ratio_to_resident": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "seconds": seconds,
        "moves_of_a_weight": sorted(set(moves.values())),
        "weights_moved": len(moves),
        "peak_mb_above_small": max(peaks),
        "resident_peak_mb_above_small": max(whole),
        "small_mb": base,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__, repeats=3)
    words.add_argument("--gigabytes", type=float, default=1.0)
    words.add_argument("--batches", type=int, default=16)
    words.add_argument("--count", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = words.parse_args(arguments)
    if chosen.count:
        scan_and_count(Path(chosen.count[0]), chosen.count[1:])
    width, layers = (50, 4) if chosen.smoke else (WIDTH, round(chosen.gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
    batches = 2 if chosen.smoke else chosen.batches
    with tempfile.TemporaryDirectory(prefix="ampaudit-bench-") as name:
        found = measure(Path(name), layers, width, batches, chosen.repeats)
    print(f"{found['batches']} batches by segment: {found['ratio_to_resident']:.2f} x the scan", end=" ")
    print(f"with all weights in memory ({found['spread'][0]:.2f} to {found['spread'][1]:.2f});", end=" ")
    print(f"limit {LIMITS['ratio']}")
    print(f"  each of {found['weights_moved']} weights moved {found['moves_of_a_weight']} times")
    print(f"  weights {found['weights_mb']:.0f} MB, --memory {found['memory_mb']:.0f} MB;", end=" ")
    print(f"peak above a small model {found['peak_mb_above_small']:.0f} MB,", end=" ")
    print(f"with all weights in memory {found['resident_peak_mb_above_small']:.0f} MB")
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cores": psutil.cpu_count(),
        "machine": platform.machine(),
        "limits": LIMITS,
        "segments": found,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
