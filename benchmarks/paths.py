"""Measures what a trace along the path of given inputs costs, against the general trace and a forward pass.

The two models compute the same, but in each layer one of them tests whether its values are too large.
Layers are added to show that the cost grows linearly.

    python -m benchmarks.paths [--json FILE]
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
from torch import nn

from ampaudit.core.formats import low_precision_format
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.path.recorder import PathTracing
from benchmarks.options import parser
from benchmarks.timing import repeated_seconds

LAYERS = (12, 24, 48, 96)


class Plain(nn.Module):
    """Residual blocks."""

    asks = False

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, norm in zip(self.up, self.down, self.norm, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
            largest = x.abs().max()
            if self.asks and largest > 1e9:
                x = x / largest
        return x


class Asking(Plain):
    asks = True


def measure(layers: int, width: int, rows: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    plain, asking = Plain(layers, width).eval(), Asking(layers, width).eval()
    setting = (load_policy("half"), load_policy("torch-cuda"), low_precision_format("float16"))

    def traced(model: nn.Module, path: PathTracing) -> None:
        assert (trace(model, (x,), {}, TraceConfig(*setting, seed=0, path=path)).path is None) is (
            path is PathTracing.OFF
        )

    with torch.no_grad():
        forward = statistics.median(repeated_seconds(lambda: asking(x), repeats))
    general = statistics.median(repeated_seconds(lambda: traced(plain, PathTracing.OFF), repeats))
    path = statistics.median(repeated_seconds(lambda: traced(asking, PathTracing.ON), repeats))
    return {
        "layers": layers,
        "width": width,
        "rows": rows,
        "forward_s": round(forward, 4),
        "general_trace_s": round(general, 3),
        "path_trace_s": round(path, 3),
        "beyond_in_forwards": round((path - general) / forward, 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=3).parse_args(arguments)
    sizes = [(n, 64, 8) for n in LAYERS] + [(n, 768, 512) for n in LAYERS[:2]]
    rows = [measure(*size, options.repeats) for size in ([(1, 8, 2)] if options.smoke else sizes)]
    for row in rows:
        print(row, flush=True)
    if options.json is not None:
        result = {
            "made": datetime.now(UTC).date().isoformat(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
