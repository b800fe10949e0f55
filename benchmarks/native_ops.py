"""Compares native 16-bit kernels and real CPU autocast with the audit, on torch's samples of every op.

Compares the dtype of each output, its verdict (finite, inf, NaN), and the largest difference in units of the
format's eps times the peak. ``--scale`` multiplies the inputs, which exposes overflow inside an op.

    python -m benchmarks.native_ops [--samples 4] [--scale 1 200] [--json FILE] [OP ...]
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.options import parser
from tests.support.native import Comparison, compared, sample_calls

RUNS = (("half", torch.float16), ("half", torch.bfloat16), ("torch-cpu", torch.bfloat16))


def rows(names: list[str], samples: int, scales: list[float]) -> list[dict[str, Any]]:
    """Return the worst comparison of each op, policy, format and scale."""
    found = []
    for info in op_db:
        if names and info.name not in names:
            continue
        for policy, dtype in RUNS:
            for scale in scales if policy == "half" else [1.0]:
                calls = sample_calls(info, samples, scale, dtype if policy == "half" else None)
                results = [compared(call, dtype, policy) for call in calls]
                if results:
                    worst = max(results, key=Comparison.rank)
                    row = {"op": info.formatted_name, "policy": policy, "dtype": str(dtype).partition(".")[2]}
                    found.append(row | {"scale": scale, "kind": worst.kind, "detail": worst.detail})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return counts by policy, format and scale, then a line for each op that differs."""
    counts: Counter[tuple[str, str, float, str]] = Counter(
        (row["policy"], row["dtype"], row["scale"], row["kind"]) for row in found
    )
    lines = [
        f"{policy:10} {dtype:9} x{scale:<5g} {kind:16} {count}"
        for (policy, dtype, scale, kind), count in sorted(counts.items())
    ]
    for row in found:
        if row["kind"] not in ("same", "native raises"):
            run = f"{row['policy']:10} {row['dtype']:9} x{row['scale']:<5g}"
            lines.append(f"{row['op']:44} {run} {row['kind']}: {row['detail']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("ops", nargs="*", help="names in torch's op_db (default: all)")
    words.add_argument("--samples", type=int, default=4, help="samples of each op")
    words.add_argument("--scale", type=float, nargs="+", default=[1.0, 200.0], help="factors for the inputs")
    options = words.parse_args(arguments)
    if options.smoke:
        options.ops, options.samples, options.scale = ["add"], 1, [1.0]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = rows(options.ops, options.samples, options.scale)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
