"""Runs the tests, benchmarks and examples for CUDA, and writes one dated JSON document.

    python -m benchmarks.gpu [--json FILE] [--parts tests,verdicts] [--seconds 480]

Each part runs under its own time limit, and a part that fails does not stop the others. Parts that would
start after ``--seconds`` are left out and listed. The exit code is 1 if any part failed or was left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parser

ROOT = Path(__file__).resolve().parents[1]
TAIL = 6000  # characters of a part's output that are kept


@dataclass(frozen=True)
class Part:
    """Commands, and the seconds that each may take; ``{json}`` stands for the file of a command's result."""

    commands: tuple[tuple[str, ...], ...]
    limit: float = 120.0


def _ampaudit(*words: str) -> tuple[str, ...]:
    return ("-m", "ampaudit", *words)


def _bench(example: str, *words: str) -> Part:
    output = ("--device", "cuda", "--format", "json", "--force", "-o", "{json}")
    return Part((_ampaudit("bench", f"examples/{example}.py", *words, *output),), 150)


def _scan(example: str, *words: str) -> Part:
    common = ("--device", "cuda", "--fail-on", "never", "--format", "json", "--force", "-o", "{json}")
    return Part((_ampaudit("scan", f"examples/{example}.py", *words, *common),), 90)


def _script(module: str, *words: str, limit: float = 150) -> Part:
    return Part((("-m", f"benchmarks.{module}", *words, "--json", "{json}"),), limit)


_TRAINED = ("--policy", "apex-o1,apex-o2,apex-o3", "--fail-on", "never", "--format", "json", "--force")

PARTS: dict[str, Part] = {
    "tests": Part(
        (
            (
                *("-m", "pytest", "-m", "gpu", "-q", "-n", "4", "--tb=short", "-p", "no:benchmark"),
                *("-W", "ignore::DeprecationWarning"),  # of what else such a machine has installed
                *sorted(
                    str(path.relative_to(ROOT))
                    for path in (ROOT / "tests").rglob("test_*.py")
                    if "mark.gpu" in path.read_text(encoding="utf-8")
                ),
            ),
        ),
        240,
    ),
    "verdicts": _script("gpu_verdicts", limit=240),
    "overhead": _script("scan_overhead", "--device", "cuda"),
    "efficientnet": _bench(
        *("efficientnet_b0", "--train", "--batch-size", "8,32"),
        *("--modes", "fp32,tf32,autocast,half,bf16,converted"),
    ),
    "sentence": _bench(
        *("sentence_encoder", "--batch-size", "8,64"),
        *("--modes", "fp32,tf32,autocast,half,bf16,converted,converted+compile"),
    ),
    "training": _script("training", "--device", "cuda"),
    "memory": _scan("sentence_encoder", "--memory", "150MB"),
    "scans": Part(
        tuple(
            _scan(name, "--batches", "2").commands[0]
            for name in ("attention_scores", "digits_cnn", "mean_pooling", "t5_feed_forward")
        )
    ),
    "tune": Part(
        (
            _ampaudit(
                *("tune", "examples/sentence_encoder.py", "--min-sqnr", "60", "--device", "cuda"),
                *("--force", "-o", "{json}"),
            ),
        ),
        150,
    ),
    "convert": Part(
        (
            _ampaudit(
                "convert", "examples/sentence_encoder.py", "--device", "cuda", "-o", "{folder}/converted"
            ),
            _ampaudit("verify", "{folder}/converted"),
        )
    ),
    "train": Part(
        tuple(
            _ampaudit("train", f"examples/training/{name}.py", "--device", "cuda", *_TRAINED, "-o", "{json}")
            for name in ("digits", "text")
        )
    ),
    "loops": Part(
        tuple(
            (f"examples/training/{name}.py",)
            for name in ("accumulation", "checkpointing", "clipping", "evaluation", "gan", "gradient_penalty")
        )
    ),
    "checkpoints": _script("checkpoints", "--repeats", "3"),
    "devices": Part((_ampaudit("devices", "--format", "json"),)),
}


def _take_result(path: Path) -> Any:
    """Return the content of a result file, parsed if it is JSON, and delete the file."""
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    path.unlink()
    try:
        return json.loads(text)
    except ValueError:
        return text


def run_part(part: Part) -> list[dict[str, Any]]:
    """Run the commands of a part; return exit code, seconds, last output and result file of each."""
    found = []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    }
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        written = Path(folder) / "result.json"
        for command in part.commands:
            words = [word.format(json=written, folder=folder) for word in command]
            started = time.perf_counter()
            log = Path(folder) / "log"
            with log.open("wb") as stream:
                try:
                    ended: int | str = subprocess.run(
                        [sys.executable, *words],
                        cwd=ROOT,
                        env=environment,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        timeout=part.limit,
                    ).returncode
                except subprocess.TimeoutExpired:
                    ended = f"took more than {part.limit:.0f} s"
            output = log.read_text(encoding="utf-8", errors="replace")
            found.append(
                {
                    "command": " ".join(["python", *command]),
                    "ended": ended,
                    "seconds": round(time.perf_counter() - started, 2),
                    "output": output.replace(f"{ROOT}/", "")[-TAIL:],
                    "result": _take_result(written),
                }
            )
    return found


def _machine() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "memory_bytes": device.total_memory,
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "processors": os.cpu_count(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--parts", help=f"run these only; comma-separated, of {', '.join(PARTS)}")
    words.add_argument("--seconds", type=float, default=480.0, help="start no part after this time")
    options = words.parse_args(arguments)
    names = options.parts.split(",") if options.parts else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        words.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        words.exit(2, "this machine has no CUDA device\n")
    started = time.perf_counter()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(),
        "left_out": [],
        "parts": {},
    }
    failed = False
    for name in names:
        if time.perf_counter() - started > options.seconds:
            results["left_out"].append(name)
            print(f"{name}: left out after {options.seconds:.0f} s")
            continue
        found = run_part(PARTS[name])
        results["parts"][name] = found
        bad = [one for one in found if one["ended"] != 0]
        failed = failed or bool(bad)
        seconds = sum(one["seconds"] for one in found)
        print(f"{name}: {len(found) - len(bad)} of {len(found)} commands in {seconds:.1f} s", flush=True)
        for one in bad:
            print(f"  {one['command']}: {one['ended']}\n{one['output'][-1500:]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failed or results["left_out"] else 0)


if __name__ == "__main__":
    main()
