"""Measures the seconds and traces of an audit of N steps; seconds must grow linearly with N.

python -m benchmarks.steps [--json FILE]
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

import ampaudit
from benchmarks.options import parser

COUNTS = (1, 2, 4, 8, 16, 32, 64)


def recurrent(length: int = 16) -> tuple[nn.Module, Any]:
    """An LSTM of 512 units on 16 time steps of 4 rows."""
    state = (torch.zeros(1, 4, 512), torch.zeros(1, 4, 512))
    return nn.LSTM(512, 512), (torch.randn(length, 4, 512), state)


def decoder() -> tuple[nn.Module, Any]:
    """A GPT-2 of 4 layers of 256, decoding 2 prompts of 8 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 1000, (2, 8))}


def measure(case: Any, count: int, repeats: int) -> dict[str, Any]:
    """Audit ``count`` steps; return the number of traces, and the median seconds of tracing and running."""
    runs, traces = [], []
    for _ in range(repeats):
        torch.manual_seed(0)
        model, inputs = case()
        started = time.perf_counter()
        report = ampaudit.scan(model, inputs, steps=count, policy="half")
        whole = time.perf_counter() - started
        runs.append(whole - report.timings["trace"])
        traces.append(report.timings["trace"])
        assert report.steps is not None
    return {
        "steps": count,
        "run_s": round(statistics.median(runs), 3),
        "trace_s": round(statistics.median(traces), 3),
        "per_step_ms": round(1000 * statistics.median(runs) / count, 2),
        "traces": report.steps.traces,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=3).parse_args(arguments)
    cases: dict[str, Any] = {"recurrent": recurrent, "decoder": decoder}
    counts: tuple[int, ...] = COUNTS
    if options.smoke:
        cases, counts = {"recurrent": lambda: recurrent(2)}, (1, 2)
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, case in cases.items():
        measure(case, 2, 1)  # warm
        found[name] = [measure(case, count, options.repeats) for count in counts]
        for row in found[name]:
            print(f"{name:10} {row}")
    if options.json is not None:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": 1,
        }
        options.json.write_text(json.dumps({**about, "cases": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
