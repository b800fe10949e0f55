"""Dtypes that a kernel does not take together raise in a real ``.half()`` model, and are said to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.audit.checks.mixed_dtypes import refused_sites
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.context import context_of
from ampaudit.audit.inputs import as_source
from ampaudit.audit.scan import audit_policies
from ampaudit.core.errors import AuditError
from ampaudit.core.formats import FLOAT16

Body = Callable[[torch.Tensor], torch.Tensor]
BODIES: dict[str, Body] = {
    "matmul": lambda x: x @ torch.eye(8),
    "matmul, agreeing": lambda x: x @ torch.eye(8, dtype=x.dtype),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 8, 8)),
    "mv": lambda x: torch.mv(x, torch.ones(8)),
    "addmm": lambda x: torch.addmm(torch.zeros(8), x, torch.eye(8)),
    "linear": lambda x: nn.functional.linear(x, torch.eye(8)),
    "index_add": lambda x: torch.zeros(4, 8).index_add(0, torch.tensor([0, 1, 2, 3]), x),
    "index_copy": lambda x: torch.zeros(4, 8).index_copy(0, torch.tensor([0, 1, 2, 3]), x),
    "scatter": lambda x: torch.zeros(4, 8).scatter(0, torch.zeros(4, 8, dtype=torch.long), x),
    "scatter_add": lambda x: torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.long), x),
    "index_put": lambda x: torch.zeros(4, 8).index_put((torch.arange(4),), x),
    "masked_scatter": lambda x: torch.zeros(4, 8).masked_scatter(torch.ones(4, 8, dtype=torch.bool), x),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], torch.ones(1, 4, 8), x[None]),
    "conv1d": lambda x: nn.functional.conv1d(x[None], torch.ones(2, 4, 3)),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (8,), torch.ones(8)),
    "add": lambda x: x + torch.ones(8),
    "where": lambda x: torch.where(x > 0, x, torch.ones(8)),
    "cat": lambda x: torch.cat([x, torch.ones(4, 8)]),
    "lerp": lambda x: torch.lerp(x, torch.ones(4, 8), 0.5),
    "dot": lambda x: torch.dot(x[0], torch.ones(8)),
    "cdist": lambda x: torch.cdist(x, torch.ones(4, 8)),
}


class Body16(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(8, 8), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.inner(x))


@pytest.mark.parametrize("name", BODIES)
def test_what_raises_in_a_half_model_is_an_error(name: str) -> None:
    model = Body16(BODIES[name])
    x = torch.randn(4, 8)
    try:
        copy.deepcopy(model).half()(x.half())
        raises = False
    except RuntimeError as error:
        raises = "not implemented" not in str(error)
    try:
        report = scan(model, x, policy="half")
    except AuditError as error:
        refused = error
    else:
        said = [f for f in report.findings if f.severity == "error"]
        assert bool(said) == raises, said
        assert all(f.code == "AMP307" for f in said)
        assert report.exit_code == int(raises)
        return
    # torch refuses the trace or the run, too: the line is named
    assert raises
    assert "test_mixed_dtypes.py:" in str(refused)
    assert refused.exit_code == 3


@pytest.mark.parametrize("returns", [False, True])
def test_a_policy_that_mixes_dtypes_is_told_from_one_that_torch_runs(returns: bool, tmp_path: Path) -> None:
    """Advice asks this of the rules that it proposes; the check keeps quiet about policies."""
    rule = "- {{id: {0}, match: {{site: [{1}]}}, cast: {2}, reason: range, why: w, source: s}}\n"
    rules = rule.format("keep", "'0/linear'", "float32")
    rules += rule.format("return", "'1/layer_norm'", "lower") if returns else ""
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\ntitle: mine\nextends: [half]\nrules:\n{rules}")
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    source = as_source(model, batches=[torch.randn(4, 8)])
    (made,) = audit_policies(source, [str(path)], ScanConfig())
    context = context_of(made.audit, FLOAT16, ScanConfig())
    assert refused_sites(context) == (set() if returns else {"1/layer_norm"})
    assert all(f.code != "AMP307" for f in made.report.findings)
