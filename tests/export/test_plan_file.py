"""``plan.yaml``: the decisions as a rule file of their own, which makes the same graph again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit.core.formats import FLOAT16
from ampaudit.core.session import silent
from ampaudit.export.plan_file import plan_rules
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.load import load_file, policy_names
from ampaudit.run.audit import measure
from ampaudit.run.config import RunConfig
from ampaudit.source import Batch
from ampaudit.trace import TraceConfig, TracedModel, trace
from tests.support import zoo

AUTHOR = load_policy("torch-cuda")


def traced(made: zoo.ZooModel, rules: RuleSet) -> TracedModel:
    seen = {}
    if rules.measured:
        plan = RunConfig(rules, AUTHOR, FLOAT16, torch.device("cpu"), reference_only=True)
        seen, _ = measure(made.model, [Batch((), made.kwargs)], plan, silent)
    return trace(made.model, (), made.kwargs, TraceConfig(rules, AUTHOR, FLOAT16, seen))


def graph_of(model: TracedModel) -> list[tuple[str, str, torch.dtype | None]]:
    return [(site.id, site.op, site.dtype) for site in model.sites]


CASES: list[Any] = [("t5", policy) for policy in policy_names()]
CASES += [
    (name, policy) for name in ("deberta_v2", "resnet") for policy in ("ampaudit", "tensorflow", "half")
]


@pytest.mark.parametrize(("architecture", "policy"), CASES)
def test_the_plan_file_makes_the_same_graph(architecture: str, policy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = getattr(zoo, architecture)()
    made.model.eval()
    rules = load_policy(policy)
    first = traced(made, rules)
    path = tmp_path / "plan.yaml"
    path.write_text(plan_rules(first, rules, "model"))
    loaded = load_file(str(path))
    assert not loaded.rules.measured
    assert not loaded.file.extends
    again = traced(made, loaded.rules)
    assert graph_of(again) == graph_of(first)
    assert [p.dtype for p in again.placeholders] == [p.dtype for p in first.placeholders]


def test_layers_of_a_stack_share_a_line() -> None:
    torch.manual_seed(0)
    made = zoo.bert()
    rules = load_policy("torch-cuda")
    text = plan_rules(traced(made, rules), rules, "model")
    assert "encoder.layer.*.intermediate.dense/linear" in text
    assert "encoder.layer.0" not in text


CONDITIONAL = """
name: conditional
title: a composite op is whole only because a rule names it, in a layer that is not there
weights: {storage: lower, inputs: lower}
rules:
  - id: norm
    match: {op: [instance_norm], layer: [elsewhere]}
    cast: float32
    reason: precision
    why: some other norm is in float32.
    source: this test
"""


def test_an_op_that_a_rule_names_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(CONDITIONAL)
    made = zoo.ZooModel(nn.Sequential(nn.InstanceNorm1d(4, affine=True)), {"input": torch.randn(2, 4, 8)})
    rules = load_policy(str(tmp_path / "rules.yaml"))
    first = traced(made, rules)
    assert "aten.instance_norm.default" in {site.op for site in first.sites}
    assert "aten.instance_norm.default" not in {s.op for s in traced(made, load_policy("half")).sites}
    (tmp_path / "plan.yaml").write_text(plan_rules(first, rules, "model"))
    again = traced(made, load_policy(str(tmp_path / "plan.yaml")))
    assert graph_of(again) == graph_of(first)
