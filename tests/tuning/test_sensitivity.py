"""Sensitivities and mixed runs against the judge: predicted and measured accuracy of float32 sets."""

from __future__ import annotations

import math
import random
import statistics
from functools import partial

import pytest
import torch

from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.core.session import silent
from ampaudit.instruments.sensitivity import outputs
from ampaudit.instruments.sensitivity.measuring import sensitivities_in
from ampaudit.instruments.sensitivity.outputs import SensitivityProbe
from ampaudit.instruments.sensitivity.probe import Sensitivities, ValueKind
from ampaudit.policy import load_policy
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.source import Batch
from ampaudit.trace.values import torch_dtype
from tests.support.tuning import GRAPHS, PlainGraph, sqnr
from tests.support.tuning.graphs import USUAL

FORMATS = (FLOAT16, BFLOAT16)


def probed(name: str, number_format: NumberFormat) -> tuple[SensitivityProbe, Sensitivities, PlainGraph]:
    model, inputs = GRAPHS[name].made()
    batches = [Batch(inputs, {})]
    rules, cpu = load_policy("16-bit"), torch.device("cpu")
    recorders = (partial(SensitivityProbe, batches=batches),)
    config = RunConfig(
        rules, load_policy("torch-cuda"), number_format, cpu, recorders=recorders, functionalize=True
    )
    (audit,) = run_audits(model, batches, [config], silent)
    (probe,) = audit.recorders
    assert isinstance(probe, SensitivityProbe)
    return probe, sensitivities_in(audit), PlainGraph.of(model, *inputs)


def some_subsets(probe: SensitivityProbe, count: int) -> list[frozenset[str]]:
    """Return the empty set and random ones."""
    free = [name for name, value in probe.graph.values.items() if value.free]
    draw = random.Random(1)
    return [frozenset(), *(frozenset(n for n in free if draw.random() < 0.5) for _ in range(count))]


def measured(graph: PlainGraph, chosen: frozenset[str], number_format: NumberFormat) -> list[float]:
    stored = set(graph.weights.values()) - chosen
    outputs = graph.run(chosen, torch_dtype(number_format), stored)
    return [sqnr(reference, value) for reference, value in zip(graph.reference, outputs, strict=True)]


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_mixed_run_computes_what_the_judge_does(name: str, number_format: NumberFormat) -> None:
    probe, _, graph = probed(name, number_format)
    ops = [name for name, value in probe.graph.values.items() if value.kind is ValueKind.OP]
    assert ops == list(graph.names)
    for chosen in some_subsets(probe, 4):
        pairs = probe.batches[0].run(chosen, torch_dtype(number_format)).values()
        ours = [sqnr(reference, value.float()) for reference, value in pairs]
        assert ours == pytest.approx(measured(graph, chosen, number_format), abs=0.01)


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda f: f.name)
def test_predictions_are_near_what_is_measured(
    number_format: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of few numbers hold one draw of each error, so single predictions may be 3 dB off."""
    monkeypatch.setattr(outputs, "SPREAD", 0.03)  # of the probes' mean: 0.13 dB
    differences = []
    for name in USUAL:
        probe, sensitivities, graph = probed(name, number_format)
        for chosen in some_subsets(probe, 6):
            errors = sensitivities.predicted(probe.graph.in_float32(chosen))
            found = measured(graph, chosen, number_format)
            for error, decibels in zip(errors, found, strict=True):
                assert bool(error == 0) is math.isinf(decibels)
                differences += [abs(10 * math.log10(error) + decibels)] if error else []
    assert statistics.median(differences) < 0.4
    assert statistics.quantiles(differences, n=10)[-1] < 1.5
    assert max(differences) < 4.0
