"""Measures what planning costs: loading every shipped policy, and planning graphs of growing size.

Prints the load time of all policies in a fresh process (and checks that torch was not imported), then for
each policy the time to plan graphs of 100 to 10,000 sites and the exponent of the power law through them (1
is linear).

    python -m benchmarks.planning [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ampaudit.policy import Measurement, OpFacts, load_policy, policy_names
from ampaudit.policy.decide import PlanSite, plan_graph
from benchmarks.options import parser
from benchmarks.timing import exponent

LIMITS = {"load all": 0.2, "plan 10000 sites": 1.0}
SIZES = (100, 300, 1000, 3000, 10000)
LOAD = """
import sys, time
from ampaudit.policy import load_policy, policy_names
started = time.perf_counter()
for name in policy_names():
    load_policy(name)
print(time.perf_counter() - started, "torch" in sys.modules)
"""
# one pre-norm transformer block, op by op: name, distance to each producer
BLOCK: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("pow.Tensor_Scalar", (1,)),
    ("mean.dim", (1,)),
    ("add.Tensor", (1,)),
    ("rsqrt", (1,)),
    ("mul.Tensor", (1, 5)),
    ("mul.Tensor", (1,)),
    ("linear", (1,)),
    ("linear", (2,)),
    ("linear", (3,)),
    ("view", (3,)),
    ("transpose.int", (1,)),
    ("matmul", (1, 4)),
    ("div.Tensor", (1,)),
    ("add.Tensor", (1,)),
    ("softmax.int", (1,)),
    ("matmul", (1, 7)),
    ("reshape", (1,)),
    ("linear", (1,)),
    ("add.Tensor", (1, 19)),
    ("layer_norm", (1,)),
    ("linear", (1,)),
    ("gelu", (1,)),
    ("linear", (1,)),
    ("add.Tensor", (1, 5)),
)


def graph(size: int) -> list[PlanSite]:
    sites: list[PlanSite] = []
    for index in range(size):
        op, back = BLOCK[index % len(BLOCK)]
        layer = f"model.layers.{index // len(BLOCK)}.block"
        facts = OpFacts(
            op=op,
            layer=layer,
            dtype="float16",
            site=f"{layer}/{op}#{index}",
            classes=("models.Block", "torch.nn.modules.module.Module"),
            parameters=(f"{layer}.weight",) if op == "linear" else (),
            arguments={"other": 1e-6} if op == "add.Tensor" else {},
            depth=4096 if op in ("linear", "matmul") else None,
            measurement=Measurement(1.0, 100.0, float(index % 2000), 50.0),
        )
        sites.append(PlanSite(facts, tuple(index - b for b in back if index - b >= 0)))
    return sites


def seconds(name: str, sites: list[PlanSite], repeats: int) -> list[float]:
    rules = load_policy(name)
    spent = []
    for _ in range(repeats):
        started = time.perf_counter()
        decisions = plan_graph(rules, sites)
        spent.append(time.perf_counter() - started)
        assert len(decisions) == len(sites)
    return spent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=5).parse_args(arguments)
    sizes = SIZES[:2] if options.smoke else SIZES
    loads = [
        subprocess.run(
            [sys.executable, "-c", LOAD], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(options.repeats)
    ]
    assert not any(imported == "True" for _, imported in loads), "torch was imported"
    times = [float(spent) for spent, _ in loads]
    load = statistics.median(times)
    spread = f"{min(times):.3f} to {max(times):.3f}"
    print(f"loading {len(policy_names())} policies: {load:.3f} s ({spread}), limit 0.2 s")
    graphs = {size: graph(size) for size in sizes}
    rows: dict[str, Any] = {}
    print(f"{'policy':<20}{f'{sizes[-1]:,} sites':>14}{'spread':>20}{'exponent':>10}")
    for name in policy_names():
        spent = {size: seconds(name, graphs[size], options.repeats) for size in sizes}
        medians = {size: statistics.median(values) for size, values in spent.items()}
        largest, power = spent[sizes[-1]], exponent(medians)
        rows[name] = {"medians": medians, "exponent": power}
        spread = f"{min(largest):.3f} to {max(largest):.3f}"
        print(f"{name:<20}{medians[sizes[-1]]:>12.3f} s{spread:>20}{power:>10.2f}")
    if options.json:
        found = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "limits": LIMITS,
            "load_seconds": {"median": load, "all": times},
            "plan": rows,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
