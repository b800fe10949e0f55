"""Measures what the bound pass costs against a plain FP32 forward, and how much of an encoder it proves.

Forward and bound pass alternate. The pass is also timed on encoders of 1 to 12 layers: it reads each weight
once, so its time grows with the number of weights.

    python -m benchmarks.proofs [--repeats 9] [--json FILE]
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
from torch import fx

from ampaudit.audit.proofs import Search
from ampaudit.bounds import bound
from ampaudit.bounds.analysis import assumptions
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.run.program import compile_program
from ampaudit.trace import Role, TraceConfig, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves
from benchmarks.options import TINY_BERT, parser
from benchmarks.timing import exponent

LIMITS = {"forward multiples": 1.0, "proved share": 0.7}
LAYERS = (1, 3, 6, 12)


def encoder(layers: int, attention: str, smoke: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    size = {**(TINY_BERT if smoke else {}), "num_hidden_layers": layers}
    model = BertModel(BertConfig(attn_implementation=attention, **size)).eval()
    ids = torch.randint(0, 30_000, (4, 128))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure(layers: int, attention: str, policy: str, repeats: int, smoke: bool) -> dict[str, Any]:
    model, inputs = encoder(layers, attention, smoke)
    rules, author = load_policy(policy), load_policy("torch-cuda")
    traced = trace(model, (), inputs, TraceConfig(rules, author, FLOAT16))
    domain = assumptions(traced, [tensor_leaves((), inputs)], [])
    forwards, passes = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        with torch.no_grad():
            model(**inputs)
        forwards.append(time.perf_counter() - started)
        started = time.perf_counter()
        table = bound(traced, domain, FLOAT16)
        passes.append(time.perf_counter() - started)
    ratios = sorted(b / f for b, f in zip(passes, forwards, strict=True))
    return {
        "layers": layers,
        "attention": attention,
        "policy": policy,
        "forward_s": statistics.median(forwards),
        "bound_s": statistics.median(passes),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "sites": len(table.bounds),
        "proved": len(table.proved),
    }


def attack(layers: int, sites: int, steps: int, smoke: bool) -> dict[str, Any]:
    """Search for inputs that exceed the bounds of the proved sites of BERT-base with the largest bounds."""
    model, _ = encoder(layers, "eager", smoke)
    ids = torch.randint(0, 30_000, (1, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    traced = trace(model, (), inputs, TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16))
    leaves = tensor_leaves((), inputs)
    domain = assumptions(traced, [leaves], [])
    table = bound(traced, domain, FLOAT16)
    ends = {name: (assumed.low, assumed.high) for name, assumed in domain.items()}
    search = Search(attach_weights(traced), ends, torch.device("cpu"))
    computed = [s for s in traced.sites if s.role is Role.COMPUTE and s.id in table.proved]
    program = compile_program(traced, torch.device("cpu"))
    constants = {value.name for value in program.free_of(program.data) if isinstance(value, fx.Node)}
    computed = [s for s in computed if s.node not in constants]
    nearest = sorted(computed, key=lambda s: -table.bounds[s.id].peak)[:sites]
    reached = {s.id: search.ascend(s.id, leaves, steps, 0)[1] / table.bounds[s.id].peak for s in nearest}
    return {"sites": len(reached), "steps": steps, "largest_share_of_bound": max(reached.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=9).parse_args(arguments)
    smoke, layers = options.smoke, (1, 1, 2) if options.smoke else LAYERS
    cases = [(kind, policy) for kind in ("sdpa", "eager") for policy in ("ampaudit", "torch-cuda", "half")]
    rows = [measure(layers[-1], *case, options.repeats, smoke) for case in (cases[:1] if smoke else cases)]
    print(f"BERT-base, {layers[-1]} layers, 4 x 128")
    for row in rows:
        share = row["proved"] / row["sites"]
        print(
            f"{row['attention']:6} {row['policy']:11} {row['ratio']:.2f} x "
            f"({row['ratio_low']:.2f} to {row['ratio_high']:.2f})  proved {row['proved']} of {row['sites']} "
            f"({share:.0%})"
        )
    growing = [measure(count, "sdpa", "torch-cuda", options.repeats, smoke) for count in layers]
    power = exponent({row["layers"]: row["bound_s"] for row in growing[1:]})
    print("seconds by layers:", {row["layers"]: round(row["bound_s"], 3) for row in growing}, f"{power:.2f}")
    search = attack(layers[-1], *((1, 2) if smoke else (12, 24)), smoke)
    print(
        f"attacked {search['sites']} proved sites: {search['largest_share_of_bound']:.2g} of a bound reached"
    )
    if options.json:
        data = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "limits": LIMITS,
            "encoders": rows,
            "growing": growing,
            "exponent": power,
            "attack": search,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
