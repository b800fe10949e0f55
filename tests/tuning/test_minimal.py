"""Sets that `tune` finds on small models, beside the smallest of all subsets, which a judge ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.render.render import as_file
from tests.support.tuning import GRAPHS, FewestOps, PlainGraph
from tests.support.wrap import Wrap

CASES = [
    pytest.param(name, dtype, size, id=f"{name}-{dtype}-{size}")
    for name, graph in GRAPHS.items()
    for dtype in ("float16", "bfloat16")
    for size in graph.needs
]


@cache
def judge(name: str, dtype: str) -> FewestOps:
    model, inputs = GRAPHS[name].made()
    return FewestOps(PlainGraph.of(model, *inputs), getattr(torch, dtype))


def tuned(name: str, dtype: Any, target: float, *, exhaustive: bool) -> ampaudit.TuningReport:
    model, inputs = GRAPHS[name].made()
    return ampaudit.tune(model, inputs, dtype=dtype, min_sqnr=target, exhaustive=exhaustive)


def accuracy(report: ampaudit.TuningReport, judged: FewestOps, without: str = "") -> float:
    """Return what the judge measures of a report's ops and weights, all of them or all but one op."""
    graph = judged.graph
    stored = set(graph.weights.values()) - {weight.name for weight in report.weights}
    kept = {op.site for op in report.kept} - {without}
    return graph.accuracy(kept, getattr(torch, report.dtype), stored)


@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_it_keeps_at_most_one_op_more_than_the_fewest(name: str, dtype: str, size: int) -> None:
    judged = judge(name, dtype)
    target = judged.asking_for(size)
    report = tuned(name, dtype, target, exhaustive=False)
    assert report.reached
    assert report.ops == len(judged.graph.names)
    assert accuracy(report, judged) >= target
    assert len(report.kept) <= size + 1


@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_no_op_of_an_exhaustive_search_may_go(name: str, dtype: str, size: int) -> None:
    judged = judge(name, dtype)
    target = judged.asking_for(size)
    report = tuned(name, dtype, target, exhaustive=True)
    assert report.reached
    assert report.minimal
    assert accuracy(report, judged) >= target
    assert len(report.kept) <= size + 1
    for kept in report.kept:
        assert accuracy(report, judged, without=kept.site) < target


@pytest.mark.parametrize("name", ["pre_norm_blocks", "long_exact_chain", "tied_embedding"])
def test_the_policy_keeps_what_the_report_says(name: str, tmp_path: Path) -> None:
    judged = judge(name, "bfloat16")
    target = judged.asking_for(GRAPHS[name].needs[1])
    report = tuned(name, "bfloat16", target, exhaustive=False)
    model, inputs = GRAPHS[name].made()
    path = tmp_path / "policy.yaml"
    path.write_text(report.policy, encoding="utf-8")
    audit = ampaudit.scan(model, inputs, policy=path, dtype="bfloat16", min_sqnr=target)
    low = {site.site for site in audit.low_precision_sites if site.role == "compute"}
    assert low == set(judged.graph.names) - {op.site for op in report.kept}
    assert audit.worst_output is not None
    assert audit.worst_output.accuracy_db == pytest.approx(accuracy(report, judged), abs=0.01)
    assert audit.exit_code == 0


SCALES = (1.0, 0.1, 8.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_batch_has_the_accuracy(dtype: str, model_file: Callable[[str], Path]) -> None:
    """The fewest ops are those that all batches need together."""
    name, size = "rms_norm_by_hand", 4
    model, (x,) = GRAPHS[name].made()
    graphs = [PlainGraph.of(model, x * scale) for scale in SCALES]
    tables = [dict(graph.all_subsets(getattr(torch, dtype))) for graph in graphs]
    worst = {mask: min(table[mask] for table in tables) for mask in tables[0]}
    best = [max(db for mask, db in worst.items() if mask.bit_count() == n) for n in range(size + 1)]
    assert max(best[:size]) < best[size]
    target = (max(best[:size]) + best[size]) / 2
    body = f"""
from tests.support.tuning import GRAPHS
def get_model(): return GRAPHS[{name!r}].made()[0]
def batches(): return [(GRAPHS[{name!r}].made()[1][0] * scale,) for scale in {SCALES}]
"""
    source = ampaudit.SourceConfig(batches=len(SCALES))
    report = ampaudit.tune(model_file(body), source=source, dtype=dtype, min_sqnr=target)  # type: ignore[arg-type]
    assert report.reached
    assert len(report.kept) <= size + 1
    stored = set(graphs[0].weights.values()) - {weight.name for weight in report.weights}
    kept = {op.site for op in report.kept}
    assert min(graph.accuracy(kept, getattr(torch, dtype), stored) for graph in graphs) >= target


def test_values_near_the_limit_stay_in_float32_whatever_the_accuracy() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    x = torch.randn(4, 12, 32)
    factor = 52_000 / layer(x).abs().max().item()
    model = Wrap(lambda m, x: m.norm(m.fc0(x) * factor), fc0=layer, norm=nn.LayerNorm(32)).eval()
    graph = PlainGraph.of(model, x)
    assert graph.accuracy((), torch.float16) > 60
    report = ampaudit.tune(model, x, min_sqnr=50.0, exhaustive=True)
    assert [(op.site, op.why) for op in report.kept] == [("(top)/mul", "range"), ("norm/layer_norm", "range")]
    assert "falls short" not in as_file(report, "text")
