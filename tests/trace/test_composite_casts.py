"""Casts inside ops: real CPU autocast is the oracle for what a kernel's own calls are cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampaudit.core.formats import BFLOAT16, FLOAT16
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace

Function = Callable[..., Any]
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
THETA = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    def __init__(self, function: Function, *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(*self.inner, x)


def traced(model: nn.Module, x: torch.Tensor, policy: str = "torch-cpu") -> TracedModel:
    form = BFLOAT16 if policy == "torch-cpu" else FLOAT16
    return trace(model.eval(), (x,), {}, TraceConfig(load_policy(policy), load_policy("torch-cuda"), form))


def output_dtype(model: TracedModel) -> torch.dtype:
    outputs: Any = model.graph.output_node().args[0]
    dtype: torch.dtype = outputs[0].meta["val"].dtype
    return dtype


def affine_grid(theta: torch.Tensor) -> torch.Tensor:
    return F.affine_grid(theta, [2, 1, 4, 4], align_corners=False)


CASES: dict[str, tuple[Function, torch.Tensor]] = {
    "einsum that contracts": (lambda x: torch.einsum("bij,bkj->bik", x, x), X),
    "einsum of a product of three": (lambda x: torch.einsum("bij,bkj,bkl->bil", x, x, x), X),
    "einsum that sums": (lambda x: torch.einsum("bij,bij->b", x, x), X),
    "einsum that multiplies": (lambda x: torch.einsum("bij,bij->bij", x, x), X),
    "einsum that permutes": (lambda x: torch.einsum("bij->bji", x), X),
    "pinv": (torch.linalg.pinv, X),
    "affine_grid": (affine_grid, THETA),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([2], [2])), X),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x[0], x[0].T, x[0]]), X),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(5, 4, 4)), X),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x[..., :3], 3), X),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x.flip(0)), X),
    "reflecting pad": (lambda x: F.pad(x.bfloat16(), (1, 1), mode="reflect"), X),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_cpu_casts_inside_ops_as_real_autocast(name: str) -> None:
    function, x = CASES[name]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = function(x).dtype
    assert output_dtype(traced(Calls(function), x)) == expected


def test_an_lstm_runs_in_bfloat16_as_onednn_runs_it() -> None:
    lstm = nn.LSTM(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        try:
            expected = lstm(X)[0].dtype
        except RuntimeError as error:  # there is no such primitive on some CPUs that have bfloat16
            pytest.skip(f"oneDNN on this CPU: {str(error)[:80]}")
    if expected is torch.float32:
        pytest.skip("this CPU, or this build, has no bfloat16 in oneDNN")
    assert output_dtype(traced(Calls(lambda layer, x: layer(x)[0], lstm), X)) == expected


def test_cuda_autocast_sees_the_product_inside_affine_grid() -> None:
    """One kernel for every device: what CPU autocast casts in it, CUDA's does, whose list has bmm as well."""
    model = traced(Calls(affine_grid), THETA, "torch-cuda")
    assert output_dtype(model) is torch.float16
    assert {s.op: s.dtype for s in model.sites}["aten.bmm.default"] is torch.float16


def test_nothing_is_split_where_autocast_is_off() -> None:
    assert [s.op for s in traced(Calls(affine_grid), THETA, "half").sites] == [
        "aten.affine_grid_generator.default"
    ]

    def alone(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.einsum("bij,bkj->bik", x, x)

    assert output_dtype(traced(Calls(alone), X)) is torch.float32
