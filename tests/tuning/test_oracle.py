"""The judge of tuned policies: it computes what audits and 16-bit kernels compute, on other ways."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
import torch

import ampaudit
from ampaudit.policy import RuleSet
from ampaudit.policy.schema import RuleFile
from tests.support.tuning import GRAPHS, MOVES, FewestOps, PlainGraph, sqnr

DTYPES = (torch.float16, torch.bfloat16)
MIN_GRAPHS, MAX_SITES, MAX_NEEDED = 24, 14, 8
# sums of a kernel in another order than float32's; and a sigmoid of one number per row, less almost as much
KERNELS_DB = {"two_outputs": 1.0}


def policy(float32: Collection[str], stored_in_float32: Collection[str]) -> RuleSet:
    """Make a policy that keeps some sites and weights in float32, and nothing else."""
    told = {"reason": "precision", "why": "w", "source": "s"}
    kept = {"id": "kept", "match": {"site": list(float32)}, "cast": "float32", **told}
    names = [f"{name}.*" for name in sorted(MOVES - {"getitem"})]
    moves = {"id": "moves", "match": {"op": names}, "cast": "follow", **told}
    keep = [{"parameter": list(stored_in_float32)}] if stored_in_float32 else []
    return RuleSet(
        RuleFile.model_validate(
            {
                "name": "x",
                "title": "t",
                "weights": {"storage": "lower", "outputs": "float32", "keep": keep},
                "defaults": {"cast": "lower", "why": "w"},
                "rules": [kept, moves] if float32 else [moves],
            }
        )
    )


def some(names: Collection[str], seed: str) -> list[str]:
    return [name for name in names if random.Random(name + seed).random() < 0.5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_it_computes_what_an_audit_computes(name: str, dtype: torch.dtype) -> None:
    model, inputs = GRAPHS[name].made()
    graph = PlainGraph.of(model, *inputs)
    for seed in ("first", "second"):
        float32, kept = some(graph.names, seed), some(graph.weights.values(), seed)
        outputs = {}
        report = ampaudit.scan(
            model,
            inputs,
            policy=policy(float32, kept),
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            session=ampaudit.Session(keep_outputs=lambda _, found, into=outputs: into.update(found)),
        )
        low = {site.site for site in report.low_precision_sites if site.role == "compute"}
        assert low == set(graph.names) - set(float32)
        stored = set(graph.weights.values()) - set(kept)
        ours = graph.run(float32, dtype, stored)
        for reference, mine, (_, theirs) in zip(graph.reference, ours, outputs.values(), strict=True):
            expected = sqnr(reference, theirs.float())
            assert sqnr(reference, mine) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_it_computes_what_16_bit_kernels_compute(name: str, dtype: torch.dtype) -> None:
    model, inputs = GRAPHS[name].made()
    graph = PlainGraph.of(model, *inputs)
    for float32 in ((), some(graph.names, "first"), some(graph.names, "second")):
        pairs = zip(graph.run(float32, dtype), graph.run(float32, dtype, real=True), strict=True)
        for reference, (ours, real) in zip(graph.reference, pairs, strict=True):
            expected = sqnr(reference, real)
            assert sqnr(reference, ours) == pytest.approx(expected, abs=KERNELS_DB.get(name, 0.7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_targets_need_some_ops_but_not_all(name: str, dtype: torch.dtype) -> None:
    model, inputs = GRAPHS[name].made()
    graph = PlainGraph.of(model, *inputs)
    fewest = FewestOps(graph, dtype)
    assert len(graph.names) <= MAX_SITES
    for size in GRAPHS[name].needs:
        assert 1 <= size <= MAX_NEEDED
        target = fewest.asking_for(size)
        assert fewest.needed(target) == size
        smallest = fewest.smallest(target)
        assert len(smallest) == size
        assert graph.accuracy(smallest, dtype) >= target


def test_all_subsets_are_what_runs_one_by_one_give() -> None:
    assert len(GRAPHS) >= MIN_GRAPHS
    model, inputs = GRAPHS["contrastive"].made()
    graph = PlainGraph.of(model, *inputs)
    stored = ["fc0.weight", "fc1.bias"]
    found = dict(graph.all_subsets(torch.bfloat16, stored))
    assert len(found) == 2 ** len(graph.names)
    for mask in range(0, len(found), 17):
        float32 = [name for bit, name in enumerate(graph.names) if mask >> bit & 1]
        assert found[mask] == graph.accuracy(float32, torch.bfloat16, stored)
