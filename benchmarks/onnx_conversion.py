"""Compares converters of ONNX models to float16 on generated models: time, memory, correctness.

Each converter runs in its own process. Its file is compared with the float32 model in a run that rounds
every 16-bit value (`tests/support/onnx_strict.py`), and read by ONNX's checker and ONNX Runtime.

    python -m benchmarks.onnx_conversion [--models bert,t5] [--tools autocast,ampaudit] [--python PATH]
        [--repeats 3] [--limit 300] [--json FILE]

``--python`` is the interpreter that the other converters are installed for (the extra ``onnx-peers``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.onnx_peers import PEERS
from benchmarks.options import parser
from tests.support.onnx_models import GENERATED, build
from tests.support.onnx_strict import float_types, run_fp32, run_strict, subgraphs

SLOW_SECONDS = 30.0  # a run that takes longer is not repeated
TOLERANCE = {TensorProto.FLOAT16: 1e-2, TensorProto.BFLOAT16: 6e-2}  # of the largest value of an output
PACKAGES = ("nvidia-modelopt", "onnxconverter-common", "onnxruntime", "onnx", "torch")
AMPAUDIT = ("-m", "ampaudit", "convert", "{model}", "--inputs", "{inputs}", "-o", "{folder}")
PEER = (str(Path(__file__).with_name("onnx_peers.py")), "{name}", "{model}", "{inputs}", "{output}")
COMMANDS = {"ampaudit": AMPAUDIT, **dict.fromkeys(PEERS, PEER)}


@dataclass(frozen=True)
class Run:
    """The exit status of a process (``None`` if it reached the time limit), and what it cost."""

    status: int | None
    seconds: float
    peak_bytes: int
    error: str


# a small process starts the converter, because on Linux a child's peak memory begins at that of its parent
LAUNCHER = """
import json, os, sys, time
limit, started = float(sys.argv[1]), time.perf_counter()
pid, status = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ), None
while True:
    ended, code, usage = os.wait4(pid, os.WNOHANG)
    if ended:
        status = os.waitstatus_to_exitcode(code)
        break
    if time.perf_counter() - started > limit:
        os.kill(pid, 9)
        usage = os.wait4(pid, 0)[2]
        break
    time.sleep(0.01)
print(json.dumps([status, time.perf_counter() - started, usage.ru_maxrss * 1024]), file=sys.stderr)
"""


def run(command: list[str], limit: float) -> Run:
    launcher = [sys.executable, "-S", "-c", LAUNCHER, str(limit), *command]
    done = subprocess.run(launcher, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    *lines, figures = done.stderr.decode(errors="replace").strip().splitlines()
    messages = [line for line in lines if line.strip()]
    return Run(*json.loads(figures), without_folders(messages[-1]) if messages else "")


def convert(name: str, python: str, model: Path, folder: Path, options: argparse.Namespace) -> list[Run]:
    """Run a converter ``options.repeats`` times; stop early if it fails or is slow."""
    places = {
        "name": name,
        "model": str(model),
        "inputs": str(model.with_name("inputs.npz")),
        "folder": str(folder),
        "output": str(folder / "model.onnx"),
    }
    command = [python, *(part.format(**places) for part in COMMANDS[name])]
    runs: list[Run] = []
    while len(runs) < options.repeats:
        shutil.rmtree(folder, ignore_errors=True)
        if name != "ampaudit":
            folder.mkdir(exist_ok=True)
        runs.append(run(command, options.limit))
        if runs[-1].status != 0 or runs[-1].seconds > SLOW_SECONDS:
            break
    return runs


def judge(path: Path, inputs: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return whether a converted file loads and computes what the float32 model does."""
    model = onnx.load(path, load_external_data=False)
    kinds, float32_ops, casts = count_ops(model)
    found: dict[str, Any] = {
        "float32_ops": float32_ops,
        "casts": casts,
        "megabytes": round(sum(f.stat().st_size for f in path.parent.iterdir()) / 1e6, 2),
        "checker": failure(lambda: onnx.checker.check_model(str(path), full_check=True)),
    }
    wide = TensorProto.BFLOAT16 in kinds
    if not wide:  # ONNX Runtime has no kernels for bfloat16 on a CPU
        refused = failure(lambda: run_fp32(path, inputs))
        if refused:
            return {**found, "verdict": "refused", "reason": refused}
    try:
        outputs = run_strict(path, inputs)
    except Exception as error:  # whatever a broken file raises is its verdict
        return {**found, "verdict": "failed to run", "reason": first_line(error)}
    kind = TensorProto.BFLOAT16 if wide else TensorProto.FLOAT16
    return {**found, **verdict(outputs, reference, TOLERANCE[kind])}


def verdict(outputs: dict[str, Any], reference: dict[str, Any], tolerance: float) -> dict[str, Any]:
    floats = {n: a.astype(np.float64) for n, a in reference.items() if a.dtype.kind == "f"}
    ours = {n: outputs[n].astype(np.float64) for n in floats}
    if any(not np.isfinite(a[np.isfinite(floats[n])]).all() for n, a in ours.items()):
        return {"verdict": "NaN" if any(np.isnan(a).any() for a in ours.values()) else "Inf", "error": None}
    if any(not a.any() and floats[n].any() for n, a in ours.items()):
        return {"verdict": "zeros", "error": 1.0}
    error = max(float(np.abs(a - floats[n]).max() / np.abs(floats[n]).max()) for n, a in ours.items())
    return {"verdict": "ok" if error <= tolerance else "wrong", "error": error}


def count_ops(model: onnx.ModelProto) -> tuple[set[int], int, int]:
    """Return all element types, and count float32 ops and casts, subgraphs included."""
    with suppress(Exception):  # if types contradict each other, the declared ones count
        model = onnx.shape_inference.infer_shapes(model)
    found, ops, casts = set(), 0, 0
    for graph, known in scopes(model.graph, {}):
        found |= set(known.values())
        for node in graph.node:
            casts += node.op_type == "Cast"
            outputs = {known.get(n) for n in node.output}
            inputs = {known.get(n) for n in node.input} if not outputs & FLOATS else set()
            ops += node.op_type not in ("Cast", "Constant") and TensorProto.FLOAT in outputs | inputs
    return found, ops, casts


FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}


def scopes(graph: onnx.GraphProto, outer: dict[str, int]) -> Iterator[tuple[onnx.GraphProto, dict[str, int]]]:
    known = float_types(graph, outer)
    yield graph, known
    for node in graph.node:
        for inner in subgraphs(node):
            yield from scopes(inner, known)


def failure(call: Any) -> str | None:
    try:
        call()
    except Exception as error:  # any failure is a verdict about the file
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    return without_folders(f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")


def without_folders(text: str) -> str:
    """Shorten absolute paths to file names, so that results do not depend on the machine."""
    return re.sub(r"(?<!\S)/\S*/", "", text)[:300]


def measure(
    tool: str, model: Path, inputs: Any, reference: Any, options: argparse.Namespace
) -> dict[str, Any]:
    python = sys.executable if tool == "ampaudit" else options.python
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        folder = Path(parent) / "out"
        runs = convert(tool, python, model, folder, options)
        row: dict[str, Any] = {
            "seconds": [round(r.seconds, 3) for r in runs],
            "median_s": round(statistics.median(r.seconds for r in runs), 3),
            "peak_mb": round(max(r.peak_bytes for r in runs) / 1e6),
        }
        output = folder / "model.onnx"
        if runs[-1].status is None:
            return {**row, "verdict": "timeout"}
        # ampaudit's exit code 1 says that there are findings
        if not output.exists() or runs[-1].status not in (0, *([1] if tool == "ampaudit" else [])):
            return {**row, "verdict": "crash", "reason": runs[-1].error}
        return {**row, **judge(output, inputs, reference)}


def versions(python: str) -> dict[str, str]:
    code = "from importlib.metadata import version; import sys; print(version(sys.argv[1]))"
    found = {}
    for package in PACKAGES:
        done = subprocess.run([python, "-c", code, package], capture_output=True, text=True, check=False)
        found[package] = done.stdout.strip() or "not installed"
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__, repeats=3)
    words.add_argument("--models", default=",".join(GENERATED))
    words.add_argument("--tools", default=",".join(COMMANDS))
    words.add_argument("--size", choices=("full", "small"), default="full")
    words.add_argument("--python", default=sys.executable, help="the interpreter of the other converters")
    words.add_argument("--limit", type=float, default=300, help="seconds that one conversion may take")
    words.add_argument("--folder", type=Path, help="where models and conversions are written")
    options = words.parse_args(arguments)
    if options.smoke:
        options.models, options.size, options.tools = "mixed", "small", "onnxruntime-float16"
        print("only ONNX Runtime's converter: others need the extra onnx-peers, or start slowly")
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": versions(options.python),
        "models": {},
    }
    if options.json is not None and options.json.exists():  # figures of other runs stay
        found["models"] = json.loads(options.json.read_text(encoding="utf-8"))["models"]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.models.split(","):
            figures = compare(name, Path(folder) / name, options)
            earlier = found["models"].get(name, {"tools": {}})["tools"]
            found["models"][name] = {**figures, "tools": {**earlier, **figures["tools"]}}
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compare(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path, inputs = build(name, folder, options.size)
    np.savez(folder / "inputs.npz", **inputs)
    reference = run_fp32(path, inputs)
    nodes = len(onnx.load(path, load_external_data=False).graph.node)
    size = sum(f.stat().st_size for f in folder.glob("model.*"))
    print(f"{name}: {nodes} nodes, {size / 1e6:.1f} MB", flush=True)
    rows: dict[str, Any] = {}
    for tool in options.tools.split(","):
        rows[tool] = row = measure(tool, path, inputs, reference, options)
        shown = (
            f"  {tool:22} {row['verdict']:14} {row.get('float32_ops', '-')}/{row.get('casts', '-')} "
            f"{row['median_s']:.1f} s {row['peak_mb']:,} MB {row.get('error') or row.get('reason', '')}"
        )
        print(shown[:150], flush=True)
    for file in folder.iterdir():
        file.unlink()
    return {"nodes": nodes, "megabytes": round(size / 1e6, 2), "tools": rows}


if __name__ == "__main__":
    main()
