"""torch-cuda and torch-cpu against the dispatcher, op for op, on the lists of torch's own autocast tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.policy import OpFacts, load_policy
from ampaudit.policy.schema import Cast
from ampaudit.trace import TraceConfig, trace
from tests.support.oracle import cuda_autocast

Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
HOMES = {
    "torch": (torch,),
    "nn": (torch._C._nn, torch.nn.functional),
    "linalg": (torch._C._linalg,),
    "methods": (torch.Tensor,),
}
# a comparison of values makes a Python bool, which a trace cannot hold
NOT_TRACEABLE = {"equal"}
# kernels that ask for a CUDA device before autocast has spoken; the class in torch's own list is what is left
SILENT = {
    "gru_cell": torch.float16,
    "grid_sampler": None,  # promotes: the widest of its inputs
}
UNTRACEABLE = ("cudnn_convolution", "cudnn_convolution_transpose")  # they exist with cuDNN only
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def cases(lists: object, names: tuple[str, ...]) -> Iterator[Case]:
    for name in names:
        for op, args, *rest in getattr(lists, name):
            if op == "einsum":  # the list's equation does not fit its operands
                args, rest = ("ij,jk->ik", *rest[0]), []
            if op == "__div__":  # a name of Python 2
                continue
            kwargs = next((r for r in rest if isinstance(r, dict)), {})
            for home in HOMES[name.partition("_")[0]]:
                function = getattr(home, op, None)
                if function is not None:
                    yield f"{name}/{op}", function, tuple(args), dict(kwargs)
                    break
            else:
                raise LookupError(op)


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.function(*args, **self.kwargs)


def dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def ours(case: Case, policy: str, form: NumberFormat) -> list[torch.dtype]:
    _, function, args, kwargs = case
    rules = load_policy(policy)
    traced = trace(
        Calls(function, kwargs).eval(), args, {}, TraceConfig(rules, load_policy("torch-cuda"), form)
    )
    return dtypes([node.meta["val"] for node in traced.graph.output_node().args[0]])


def as_dtype(case: Case, dtype: torch.dtype) -> Case:
    name, function, args, kwargs = case

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return name, function, pytree.tree_map_only(torch.Tensor, cast, args), kwargs


CUDA_LISTS = (
    *("torch_expect_builtin_promote", "methods_expect_builtin_promote", "torch_fp16", "torch_fp32"),
    *("torch_need_autocast_promote", "nn_fp16", "nn_fp32", "linalg_fp16", "methods_fp16", "methods_fp32"),
)
CUDA_CASES = [
    case for case in cases(AutocastTestLists("cpu"), CUDA_LISTS) if case[0].split("/")[1] not in NOT_TRACEABLE
]
CPU_LISTS = (
    *("torch_expect_builtin_promote", "methods_expect_builtin_promote", "torch_16", "torch_fp32"),
    *("torch_need_autocast_promote", "nn_16", "nn_fp32"),
)
CPU_CASES = [
    case
    for case in cases(AutocastCPUTestLists("cpu"), CPU_LISTS)
    if case[0].split("/")[1] not in NOT_TRACEABLE
]


def under_fake_cuda(case: Case, dtype: torch.dtype) -> list[torch.dtype]:
    _, function, args, kwargs = case
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty_like(t, device="cuda", requires_grad=False), args
        )
        with torch.no_grad(), cuda_autocast(dtype):
            return dtypes(function(*fake, **kwargs))


def ids(found: list[Case]) -> list[str]:
    return [f"{name}-{number}" for number, (name, *_) in enumerate(found)]


def test_the_lists_are_walked() -> None:
    assert len(CUDA_CASES) > 110
    assert len(CPU_CASES) > 50


@pytest.mark.parametrize("case", CUDA_CASES, ids=ids(CUDA_CASES))
@pytest.mark.parametrize("inputs", [None, torch.float16, torch.float32], ids=["as listed", "half", "float"])
def test_torch_cuda_equals_the_dispatcher(case: Case, inputs: torch.dtype | None) -> None:
    case = case if inputs is None else as_dtype(case, inputs)
    op = case[0].partition("/")[2]
    if op in UNTRACEABLE:
        assert load_policy("torch-cuda").decide(OpFacts(op, "", "float16")).cast is Cast.LOWER
        return
    if op in SILENT:
        widest = torch.promote_types(*(t.dtype for t in case[2][:2])) if SILENT[op] is None else SILENT[op]
        assert set(ours(case, "torch-cuda", FLOAT16)) == {widest}
        return
    assert ours(case, "torch-cuda", FLOAT16) == under_fake_cuda(case, torch.float16)


@pytest.mark.parametrize("case", CPU_CASES, ids=ids(CPU_CASES))
@pytest.mark.parametrize("inputs", [None, torch.bfloat16, torch.float32], ids=["as listed", "low", "float"])
def test_torch_cpu_equals_real_cpu_autocast(case: Case, inputs: torch.dtype | None) -> None:
    case = case if inputs is None else as_dtype(case, inputs)
    _, function, args, kwargs = case
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = dtypes(function(*args, **kwargs))
    assert ours(case, "torch-cpu", BFLOAT16) == expected
