"""Folding casts into stored weights changes where they are rounded, and no bit of what is computed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ampaudit.core.formats import low_precision_format
from ampaudit.export.config import Mode
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.program import GraphModel, as_structure, export_program
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.opnames import converts
from ampaudit.trace.stack import is_tool_file
from tests.support import zoo

AUTHOR = load_policy("torch-cuda")


def traced(model: nn.Module, kwargs: dict[str, torch.Tensor], policy: str, dtype: str) -> TracedModel:
    return trace(model, (), kwargs, TraceConfig(load_policy(policy), AUTHOR, low_precision_format(dtype)))


def outputs(made: TracedModel, kwargs: dict[str, torch.Tensor], mode: Mode) -> dict[str, torch.Tensor]:
    converted = attach_weights(made)
    deployed = fold_casts(converted, mode)
    names = {f"output.{i}": i for i in range(len(made.outputs))}
    model = GraphModel(deployed, folded_weights(converted, deployed, {}), names, train=mode == "train")
    with torch.no_grad():
        return dict(model(**kwargs))


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "keep-fp32-modules", "tensorflow"])
@pytest.mark.parametrize("architecture", ["bert", "t5", "llama", "resnet", "mamba"])
def test_folding_changes_no_bit(architecture: str, policy: str) -> None:
    torch.manual_seed(0)
    subject = zoo.ZOO[architecture]()
    subject.model.eval()
    for dtype in ("float16", "bfloat16"):
        made = traced(subject.model, subject.kwargs, policy, dtype)
        folded, cast = (outputs(made, subject.kwargs, mode) for mode in ("inference", "train"))
        for name, value in folded.items():
            assert value.dtype == cast[name].dtype
            assert torch.equal(value, cast[name])
            assert value.isfinite().all()


class Shared(nn.Module):
    """One weight, used in 16 bits by a product and in float32 by a sum; another by products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.product = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.both + x @ self.product + torch.cumsum(self.both, 0)


def test_only_a_weight_that_every_use_casts_is_stored_in_16_bits() -> None:
    made = traced(Shared(), {"x": torch.randn(8, 8)}, "torch-cuda", "float16")
    deployed = fold_casts(attach_weights(made), "inference")
    assert {p.name: p.dtype for p in deployed.placeholders} == {
        "both": torch.float32,
        "product": torch.float16,
        "x": torch.float32,
    }
    names = {p.node: p.name for p in deployed.placeholders}
    casts = [node for node in deployed.graph.nodes if node.op == "call_function" and converts(node.target)]
    assert sorted(names[node.args[0].name] for node in casts) == ["both", "x"]


class Viewed(nn.Module):
    """Weights that products read through views, of which a sum in float32 reads one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.cut, self.both = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.turned[0], self.cut.view(2, 2, 8, 8)[1].flip(0)
        x = x @ first.T + x @ first.expand(8, 8) + (x @ self.both[1].mT) @ second[0]
        return x + torch.cumsum(self.both[2].T, 0)


def test_a_weight_that_products_read_through_views_is_stored_in_16_bits() -> None:
    inputs = {"x": torch.randn(8, 8)}
    for policy, stored in (("torch-cuda", {"turned"}), ("half", {"turned", "cut", "both"})):
        made = traced(Viewed(), inputs, policy, "bfloat16")
        deployed = fold_casts(attach_weights(made), "inference")
        assert {p.name for p in deployed.placeholders if p.dtype is torch.bfloat16} - {"x"} == stored
        folded, cast = (outputs(made, inputs, mode) for mode in ("inference", "train"))
        assert all(torch.equal(value, cast[name]) for name, value in folded.items())


class Reference(nn.Module):
    """A weight that only gives its shape, its dtype or its device to the input."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.other, self.product = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        like: torch.Tensor = getattr(x, self.method)(self.other)
        return like @ self.product


@pytest.mark.parametrize("method", ["view_as", "expand_as", "reshape_as", "to", "type_as"])
def test_casts_of_what_is_made_like_a_weight_are_none_of_it(method: str) -> None:
    inputs = {"x": torch.randn(8, 8)}
    made = traced(Reference(method), inputs, "torch-cuda", "bfloat16")
    deployed = fold_casts(attach_weights(made), "inference")
    assert {p.name: p.dtype for p in deployed.placeholders} == {
        "other": torch.float32,
        "product": torch.bfloat16,
        "x": torch.float32,
    }
    folded, cast = (outputs(made, inputs, mode) for mode in ("inference", "train"))
    assert all(torch.equal(value, cast[name]) for name, value in folded.items())


class Counted(nn.Module):
    """A float weight that the author uses as whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Parameter(torch.arange(4.0) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sizes.to(torch.int8).sum()


def test_a_weight_is_never_stored_as_integers() -> None:
    made = traced(Counted(), {"x": torch.randn(4)}, "torch-cuda", "float16")
    deployed = fold_casts(attach_weights(made), "inference")
    assert {p.name: p.dtype for p in deployed.placeholders}["sizes"] is torch.float32


class TiedApart(nn.Module):
    """Two layers with one weight, of which an author's region keeps one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cuda", enabled=False):
            return self.second(x.float())


def test_tied_weights_are_stored_alike() -> None:
    made = traced(TiedApart(), {"x": torch.randn(2, 8)}, "torch-cuda", "float16")
    deployed = fold_casts(attach_weights(made), "inference")
    weights = {p.name: p.dtype for p in deployed.placeholders if p.name.endswith("weight")}
    assert set(weights.values()) == {torch.float32}


def test_layers_and_lines_are_on_the_exported_ops() -> None:
    subject = zoo.bert()
    made = traced(subject.model.eval(), subject.kwargs, "torch-cuda", "float16")
    converted = attach_weights(made)
    deployed = fold_casts(converted, "inference")
    values = folded_weights(converted, deployed, {})
    program = export_program(deployed, values, made.paths, (), subject.kwargs)
    linears = [node for node in program.graph.nodes if str(node.target) == "aten.linear.default"]
    stacks = [str(list(node.meta["nn_module_stack"].values())[-1][0]) for node in linears]
    assert stacks[0].endswith("encoder.layer.0.attention.self.query")
    assert all("modeling_bert" in node.meta["stack_trace"] for node in linears)
    traces = "".join(node.meta.get("stack_trace", "") for node in program.graph.nodes)
    assert not [file for file in re.findall('File "([^"]+)"', traces) if is_tool_file(file)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("output",), 1),
        (("output[0]", "output[1]"), (1, 2)),
        (("output.a", "output.b[0]"), {"a": 1, "b[0]": 2}),
        (("output[0]", "output[1].x"), {"[0]": 1, "[1].x": 2}),
        (("output[1]", "output[0]"), {"[1]": 1, "[0]": 2}),
    ],
)
def test_outputs_have_a_plain_structure(names: tuple[str, ...], expected: object) -> None:
    assert as_structure(names, (1, 2)[: len(names)]) == expected
