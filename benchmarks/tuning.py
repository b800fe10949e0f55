"""Measures `ampaudit tune`: predicted against measured accuracy, its runs, and AutoCast in comparison.

python -m benchmarks.tuning [--parts predictions] [--models bert,t5,cnn,minilm] [--json FILE]
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ampaudit
from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.core.session import silent
from ampaudit.instruments.sensitivity.measuring import sensitivities_in
from ampaudit.instruments.sensitivity.outputs import SensitivityProbe
from ampaudit.instruments.sensitivity.probe import Sensitivities
from ampaudit.policy import load_policy
from ampaudit.run.audit import RunConfig, run_audits
from ampaudit.source import Batch
from ampaudit.trace.values import torch_dtype
from benchmarks.options import parser
from benchmarks.tuning_models import TuningModel, build
from benchmarks.tuning_peers import HIGHEST, OnnxCase
from tests.support.tuning import sqnr

FORMATS = (FLOAT16, BFLOAT16)
SUBSETS = 40
SHARES = (0.25, 0.5, 0.75)  # of ops and weights in float32
GAINS = (3.0, 6.0, 10.0)  # dB over everything in 16 bits
PEER_TARGETS = (60.0, 62.0, 64.0)  # dB; AutoCast's default gives the T5 58.5

Row = dict[str, Any]


def probe_model(model: TuningModel, number_format: NumberFormat) -> tuple[SensitivityProbe, Sensitivities]:
    """Run a model in 16 bits once, and probe its outputs."""
    batches = [Batch((), dict(model.inputs))]
    rules, cpu = load_policy("16-bit"), torch.device("cpu")
    recorders = (partial(SensitivityProbe, batches=batches),)
    config = RunConfig(
        rules, load_policy("torch-cuda"), number_format, cpu, recorders=recorders, functionalize=True
    )
    (audit,) = run_audits(model.model, batches, [config], silent)
    (probe,) = audit.recorders
    assert isinstance(probe, SensitivityProbe)
    return probe, sensitivities_in(audit)


def predictions(model: TuningModel, number_format: NumberFormat, subsets: int) -> Row:
    """Compare the predicted and measured accuracy of the worst output, for random sets of float32 values."""
    started = time.perf_counter()
    probe, sensitivities = probe_model(model, number_format)
    seconds = time.perf_counter() - started
    free = [name for name, value in probe.graph.values.items() if value.free]
    draw = random.Random(0)
    sets = [frozenset(n for n in free if draw.random() < share) for share in SHARES * (subsets // 3 + 1)]
    started = time.perf_counter()
    pairs = [
        predicted_and_measured(probe, sensitivities, chosen, number_format)
        for chosen in (frozenset(), *sets[:subsets])
    ]
    differences = sorted(abs(p - m) for p, m in pairs[1:])
    return {
        "ops": sum(value.kind == "op" for value in probe.graph.values.values()),
        "weights": sum(value.kind == "weight" for value in probe.graph.values.values()),
        "all_16_bit_db": {"predicted": round(pairs[0][0], 2), "measured": round(pairs[0][1], 2)},
        "subsets": subsets,
        "difference_db": {
            "median": round(statistics.median(differences), 2),
            "p90": round(statistics.quantiles(differences, n=10)[-1], 2),
            "max": round(differences[-1], 2),
        },
        "probe_s": round(seconds, 2),
        "run_s": round((time.perf_counter() - started) / len(pairs), 3),
    }


def predicted_and_measured(
    probe: SensitivityProbe, sensitivities: Sensitivities, chosen: frozenset[str], number_format: NumberFormat
) -> tuple[float, float]:
    """Return the dB of the worst output with the chosen values in float32: predicted, and measured."""
    outputs = probe.batches[0].run(chosen, torch_dtype(number_format)).values()
    errors = sensitivities.predicted(probe.graph.in_float32(chosen))
    measured = min(sqnr(reference, value.float()) for reference, value in outputs)
    return -10 * math.log10(errors.max()), measured


def tunings(model: TuningModel, number_format: NumberFormat, gains: Sequence[float]) -> list[Row]:
    """Tune for each gain in dB over everything in 16 bits."""
    start = predicted_and_measured(*probe_model(model, number_format), frozenset(), number_format)[1]
    return [tuning(model, number_format, round(start + gain, 1)) for gain in gains]


def tuning(model: TuningModel, number_format: NumberFormat, target: float) -> Row:
    started = time.perf_counter()
    report = ampaudit.tune(model.model, dict(model.inputs), dtype=number_format.name, min_sqnr=target)
    return {
        "target_db": target,
        "reached": report.reached,
        "measured_db": report.measured_db,
        "float32_ops": len(report.kept),
        "lower_bound": report.lower_bound,
        "ops": report.ops,
        "float32_weights": len(report.weights),
        "bytes": [report.bytes_before, report.bytes_after],
        "casts": report.casts,
        "runs": report.runs,
        "seconds": round(time.perf_counter() - started, 1),
    }


def peers(model: TuningModel, python: str) -> list[Row]:
    """Convert to float16 with AutoCast and with `convert --tune`, for the same accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        case = OnnxCase.of(model, Path(folder), python)
        default = {"autocast": case.autocast(HIGHEST)}
        return [default, *({"target_db": db, **case.compared(db)} for db in PEER_TARGETS)]


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--parts", default="predictions,runs,peers", help="comma-separated")
    words.add_argument("--models", default="bert,t5,cnn,minilm", help="comma-separated")
    words.add_argument("--python", default=sys.executable, help="interpreter that AutoCast is installed for")
    options = words.parse_args(arguments)
    subsets, gains, formats = SUBSETS, GAINS, FORMATS
    if options.smoke:
        options.models, options.parts = "tiny", "predictions,runs"
        subsets, gains, formats = 2, GAINS[:1], FORMATS[:1]
        print("without the part peers: it needs the extra onnx-peers")
    torch.set_num_threads(1)
    found: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "scipy")},
    }
    if options.json is not None and options.json.exists():  # figures of other runs stay
        found = json.loads(options.json.read_text(encoding="utf-8")) | found
    for name in options.models.split(","):
        model = build(name)
        found.setdefault("trained", {})[name] = model.trained
        for part in options.parts.split(","):
            rows: Row = {}
            if part == "peers":
                rows = {"t5": peers(model, options.python)} if name == "t5" else {}
            else:
                measures: dict[str, Callable[[NumberFormat], Any]] = {
                    "predictions": lambda form, model=model: predictions(model, form, subsets),
                    "runs": lambda form, model=model: tunings(model, form, gains),
                }
                rows = {name: {form.name: measures[part](form) for form in formats}}
            found.setdefault(part, {}).update(rows)
            print(json.dumps({part: rows}, indent=1), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
