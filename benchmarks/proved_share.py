"""Counts the proved sites of BERT, LLaMA, ViT, T5 and ResNet, and times the bound pass against the trace.

    python -m benchmarks.proved_share [--repeats 5] [--json FILE]

Models have random weights: the tiny configurations of ``tests/support/zoo.py``, and the default ones of
Transformers (of LLaMA, four narrower layers). Token ids range over the vocabulary, pixels over those of
the batch.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from ampaudit.bounds import bound
from ampaudit.bounds.analysis import assumptions
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.entry import tensor_leaves
from benchmarks.options import parser
from tests.support.zoo import ZOO, ZooModel

MODELS = ("bert", "llama", "vit", "t5", "resnet")
POLICIES = ("half", "torch-cuda")


def full_size(name: str) -> ZooModel:
    """Return BERT-base, ViT-base, T5-small, ResNet-50, or a narrow LLaMA."""
    import transformers as t

    ids = torch.randint(3, 30_000, (1, 64))
    pixels = {"pixel_values": torch.randn(1, 3, 224, 224)}
    layers = {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
    }
    match name:
        case "bert":
            return ZooModel(
                t.BertModel(t.BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            )
        case "llama":
            return ZooModel(t.LlamaForCausalLM(t.LlamaConfig(**layers)), {"input_ids": ids})
        case "vit":
            return ZooModel(t.ViTModel(t.ViTConfig()), pixels)
        case "t5":
            model = t.T5ForConditionalGeneration(t.T5Config())
            return ZooModel(model, {"input_ids": ids, "decoder_input_ids": ids})
        case _:
            return ZooModel(t.ResNetForImageClassification(t.ResNetConfig()), pixels)


def measure(name: str, size: str, policy: str, repeats: int) -> dict[str, Any]:
    """Count the proved sites of one model under one policy, and time its trace and bound pass."""
    torch.manual_seed(0)
    zoo = ZOO[name]() if size == "tiny" else full_size(name)
    rules, author = load_policy(policy), load_policy("torch-cuda")
    traces, passes = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        traced = trace(zoo.model.eval(), (), zoo.kwargs, TraceConfig(rules, author, FLOAT16))
        traces.append(time.perf_counter() - started)
        domain = assumptions(traced, [tensor_leaves((), zoo.kwargs)], [])
        started = time.perf_counter()
        table = bound(traced, domain, FLOAT16)
        passes.append(time.perf_counter() - started)
    ratios = sorted(b / t for b, t in zip(passes, traces, strict=True))
    ops = {site.id: site.op.removeprefix("aten.") for site in traced.sites}
    unproved = Counter(ops[site] for site in table.bounds if site not in table.proved)
    return {
        "model": name,
        "size": size,
        "policy": policy,
        "sites": len(table.bounds),
        "proved": len(table.proved),
        "unproved": dict(unproved.most_common()),
        "uncovered": list(table.uncovered),
        "trace_s": round(statistics.median(traces), 4),
        "bound_s": round(statistics.median(passes), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=5).parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [(name, size, policy) for size in ("tiny", "full") for name in MODELS for policy in POLICIES]
    rows = [measure(*case, options.repeats) for case in (cases[:1] if options.smoke else cases)]
    for row in rows:
        share = row["proved"] / row["sites"]
        unproved = ", ".join(f"{op} {count}" for op, count in row["unproved"].items())
        print(
            f"{row['size']} {row['model']:7} {row['policy']:11} "
            f"proved {row['proved']:3} of {row['sites']:3} ({share:.1%})  "
            f"bound pass {row['ratio']:.3f} x the trace, {row['bound_s']:.3f} s\n"
            f"        unproved: {unproved or 'none'}\n"
            f"        uncovered: {', '.join(row['uncovered']) or 'none'}"
        )
    if options.json:
        data = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
