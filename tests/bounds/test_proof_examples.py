"""Programs that were once proved wrongly, each with the value that left its bound, and a correct twin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from ampaudit.bounds import BoundTable, Interval
from ampaudit.trace import TracedModel
from tests.support.soundness.check import Runs, check
from tests.support.soundness.fuzz import Setting, table_of, traced_branches
from tests.support.soundness.inputs import extreme_values
from tests.support.soundness.program import NAMESPACE, Branch, BranchModel, Input, Stored

FP16, BF16, FP32 = Setting("half", "float16"), Setting("half", "bfloat16"), Setting("as-is", "float16")
AUTOCAST = Setting("torch-cuda", "float16")


@dataclass(frozen=True)
class Example:
    """A program, an input at which a value is extreme, and what that value is.

    Attributes:
        lines: of the program, on ``x0`` and the weights ``p0``, ...
        at: the input, as text.
        low: of the range that is stated.
        high: of it.
        observed: the largest magnitude of what the last line makes there; ``nan`` if it is not a number.
        weights: texts of the parameters.
        setting: policy and format.
    """

    lines: str
    at: str
    low: float
    high: float
    observed: float
    weights: tuple[str, ...] = ()
    setting: Setting = FP32
    buffers: tuple[str, ...] = field(default=())

    @property
    def value(self) -> torch.Tensor:
        made: torch.Tensor = eval(self.at, NAMESPACE)
        return made

    @property
    def branch(self) -> Branch:
        x, lower = self.value, self.setting.lower
        dtype = lower if lower is not None and x.dtype is torch.float32 else x.dtype
        given = Input("x0", tuple(x.shape), dtype, self.low, self.high)
        kinds = [("parameter", text) for text in self.weights] + [("buffer", text) for text in self.buffers]
        stored = tuple(Stored(f"p{i}", kind, text) for i, (kind, text) in enumerate(kinds))
        return Branch((given,), stored, tuple(line.strip() for line in self.lines.split("; ")))


# exp(x - max): a row of -1 beside a 1, so that exp(2) = 7.39
ROWS = "torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])"
# x * rsqrt(mean(x^2) + eps): 6e4 where the mean is taken of zeros: 6e4 / sqrt(1e-5) = 1.9e7
HALVES = "torch.tensor([[6e4] * 6 + [0.0] * 6] * 2)"
SQUARE = "torch.tensor([[6e4] * 6] + [[0.0] * 6] * 5)"
MEAN = "rsqrt(v0.float().pow(2).mean"

UNSOUND: dict[str, Example] = {
    # "softmax" recognised though axis, slice or factor differ
    "maximum without keepdim": Example("v0 = torch.exp(x0 - x0.amax(-1))", ROWS, -1, 1, math.exp(2)),
    "maximum without keepdim in float16": Example(
        "v0 = torch.exp(x0 - x0.amax(-1))", ROWS, -1, 1, math.exp(2), setting=FP16
    ),
    "maximum of a slice": Example("v0 = torch.exp(x0 - x0[1:].amax())", ROWS, -1, 1, math.exp(2)),
    "maximum of a part of the axis": Example(
        "v0 = torch.exp(x0 - x0[:, :1].amax(-1, keepdim=True))",
        "torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])", -1, 1, math.exp(2),
    ),
    "maximum of a transpose": Example(
        "v0 = torch.exp(x0 - x0.mT.amax(-1, keepdim=True))", "torch.tensor([[-1.0, 1.0, 1.0]] * 3)", -1, 1,
        math.exp(2),
    ),
    "maximum subtracted with alpha": Example(
        "v0 = torch.exp(torch.sub(x0, x0.amax(-1, keepdim=True), alpha=-1.0))", "torch.ones(2, 3)", -1, 1,
        math.exp(2),
    ),
    "half of the maximum": Example(
        "v0 = torch.exp(torch.sub(x0, x0.amax(-1, keepdim=True), alpha=0.5))", "torch.ones(2, 3)", -1, 1,
        math.exp(0.5),
    ),
    "maximum minus x, as rsub": Example(
        "v0 = torch.exp(torch.rsub(x0, x0.amax(-1, keepdim=True)))",
        "torch.tensor([[-1.0, 1.0, 1.0]])", -1, 1, math.exp(2),
    ),
    "maximum of a later version": Example(
        "v0 = x0 * 1; v1 = v0.amax(-1, keepdim=True); v0.mul_(3.0); v2 = torch.exp(v0 - v1)",
        "torch.ones(2, 3)", -1, 1, math.exp(2),
    ),
    "indices of the maximum": Example(
        "v0 = torch.exp(x0 - torch.max(x0, -1, keepdim=True)[1])", "torch.ones(2, 3)", -1, 1, math.exp(1)
    ),
    # norms written by hand, recognised by their roots only
    "norm of another half": Example(
        f"v1 = x0.chunk(2, -1); v0 = v1[1]; v2 = v1[0] * torch.{MEAN}(-1, keepdim=True) + 1e-5)",
        HALVES, 0, 6e4, 6e4 / math.sqrt(1e-5),
    ),
    "norm of a transpose": Example(
        f"v0 = x0; v2 = v0 * torch.{MEAN}(-1, keepdim=True) + 1e-5).mT", SQUARE, 0, 6e4, 0.0
    ),
    "norm by a transpose": Example(
        f"v0 = x0.mT; v2 = x0 * torch.{MEAN}(-1, keepdim=True) + 1e-5)",
        "torch.tensor([[6e4] + [0.0] * 5] + [[0.0] * 6] * 5).roll(1, -1)", 0, 6e4, 6e4 / math.sqrt(1e-5),
    ),
    "norm without keepdim": Example(
        f"v0 = x0; v2 = v0 * torch.{MEAN}(-1) + 1e-5)", SQUARE, 0, 6e4, 6e4 / math.sqrt(1e-5)
    ),
    "norm along another axis": Example(
        f"v0 = x0; v2 = v0.roll(1, -1) * torch.{MEAN}(0, keepdim=True) + 1e-5)",
        "torch.tensor([[6e4] + [0.0] * 5] * 6)", 0, 6e4, 6e4 / math.sqrt(1e-5),
    ),
    "norm of a flipped value": Example(
        f"v0 = x0; v2 = v0.flip(0) * torch.{MEAN}(-1, keepdim=True) + 1e-5)", SQUARE, 0, 6e4,
        6e4 / math.sqrt(1e-5),
    ),
    "norm of the first column": Example(
        f"v0 = x0[:, :1]; v2 = x0 * torch.{MEAN}(-1, keepdim=True) + 1e-5)",
        "torch.tensor([[0.0] + [6e4] * 5] * 2)", 0, 6e4, 6e4 / math.sqrt(1e-5),
    ),
    "norm with eps subtracted": Example(
        "v0 = torch.rsqrt(torch.sub(x0.pow(2).mean(-1, keepdim=True), 1e-5)); v1 = x0 * v0",
        "torch.full((2, 6), 0.0031623)", 0, 1, 0.0,
    ),
    # functions outside their domain, and arguments that were not looked at
    "sqrt below zero": Example("v0 = torch.sqrt(x0)", "torch.full((3,), -1.0)", -1, 1, math.nan),
    "sqrt below zero in float16": Example(
        "v0 = torch.sqrt(x0)", "torch.full((3,), -1.0)", -1, 1, math.nan, setting=FP16
    ),
    "logarithm below zero": Example("v0 = torch.log(x0)", "torch.full((3,), -1.0)", -1, 1, math.nan),
    "celu with negative alpha": Example(
        "v0 = F.celu(x0, alpha=-1.0)", "torch.full((3,), -5.0)", -5, 1, math.exp(5) - 1
    ),
    "elu with negative alpha": Example(
        "v0 = F.elu(x0, alpha=-3.0)", "torch.full((3,), -5.0)", -5, 1, 3 * (1 - math.exp(-5))
    ),
    "leaky_relu with negative slope": Example(
        "v0 = F.leaky_relu(x0, -3.0)", "torch.full((3,), -5.0)", -5, 1, 15.0
    ),
    "prelu with a negative weight": Example(
        "v0 = F.prelu(x0, p0)", "torch.full((3,), -5.0)", -5, 1, 15.0, ("torch.tensor([-3.0])",)
    ),
    "var with correction": Example(
        "v0 = torch.var(x0, -1, correction=7)", "torch.tensor([[1.0, -1.0] * 4])", -1, 1, 8.0
    ),
    "std with correction": Example(
        "v0 = torch.std(x0, -1, correction=7)", "torch.tensor([[1.0, -1.0] * 4])", -1, 1, math.sqrt(8.0)
    ),
    "var with as much correction as elements": Example(
        "v0 = torch.var(x0, -1, correction=8)", "torch.tensor([[1.0, -1.0] * 4])", -1, 1, math.inf
    ),
    "softplus with another beta": Example(
        "v0 = F.softplus(x0, beta=0.01)", "torch.zeros(3)", -1, 1, math.log(2) / 0.01
    ),
    # casts of weights
    "weight as bool": Example(
        "v0 = x0 * p0.bool()", "torch.ones(3)", -1, 1, 1.0, ("torch.tensor([0.25, 1e-3, 0.0])",)
    ),
    "weight as int in a divisor": Example(
        "v0 = x0 / (p0.int() + 1e-4)", "torch.ones(3)", -1, 1, 1e4, ("torch.tensor([0.9, 0.5, -0.5])",)
    ),
    "weight through float16 in a divisor": Example(
        "v0 = 1 / p0.half().float()", "torch.ones(3)", -1, 1, math.inf, ("torch.tensor([1.0, 2.0, 1e-8])",)
    ),
    "weight through bfloat16": Example(
        "v0 = x0 * (p0.bfloat16().float() - p0)", "torch.ones(1)", -1, 1, 1 / 256,
        ("torch.tensor([1 + 1 / 256])",)
    ),
    "weight as int8": Example(
        "v0 = x0 * p0.to(torch.int32).to(torch.int8)", "torch.ones(1)", -1, 1, 56.0,
        ("torch.tensor([200.0])",)
    ),
    # integers
    "uint8 that wraps around": Example(
        "v0 = x0 - 3", "torch.zeros(3, dtype=torch.uint8)", 0, 2, 253.0
    ),
    "uint8 multiplied": Example("v0 = x0 * 3", "torch.full((3,), 85, dtype=torch.uint8)", 0, 86, 255.0),
    "int8 that wraps around": Example("v0 = x0 + x0", "torch.full((3,), 64, dtype=torch.int8)", 0, 64, 128.0),
    "int16 that wraps around": Example(
        "v0 = x0 * 300 + 268", "torch.full((3,), 109, dtype=torch.int16)", 0, 109, 32568.0
    ),
    "complement of integers": Example("v0 = ~x0", "torch.full((3,), 7, dtype=torch.int32)", 0, 7, 8.0),
    "negative of uint8": Example("v0 = -x0", "torch.full((3,), 1, dtype=torch.uint8)", 0, 1, 255.0),
    "negative of the least int8": Example("v0 = -x0", "torch.full((3,), -128, dtype=torch.int8)", -128,
    0, 128.0),
    "sum in uint8": Example(
        "v0 = x0.sum(0, dtype=torch.uint8)", "torch.full((3,), 85, dtype=torch.uint8)", 0, 86, 255.0
    ),
    "bits of floats": Example(
        "v0 = x0.view(torch.int32) * 1.0", "torch.ones(3)", 0, 1, float(0x3F800000)
    ),
    "bits of half floats": Example(
        "v0 = x0.view(torch.int16) * 1.0", "torch.ones(3)", 0, 1, float(0x3C00), setting=FP16
    ),
    "indices of a pool": Example(
        "v0 = F.max_pool1d(x0, 4, return_indices=True); v1 = v0[1] * 1.0",
        "torch.arange(8.0).reshape(1, 1, 8) / 8", -1, 1, 7.0,
    ),
    "indices of an adaptive pool": Example(
        "v0 = F.adaptive_max_pool2d(x0, 1, return_indices=True); v1 = v0[1] * 1.0",
        "torch.arange(9.0).reshape(1, 1, 3, 3) / 9", -1, 1, 8.0,
    ),
    "indices of topk": Example(
        "v0 = x0.topk(1, -1); v1 = v0[1] * 1.0", "torch.arange(8.0) / 8", -1, 1, 7.0
    ),
    # what is written in place, or hidden from the schema
    "running mean after training": Example(
        "v0 = F.batch_norm(x0, p0, p1, training=True, momentum=1.0); v1 = p0 * 1",
        "torch.full((2, 3, 4), 1000.0)", 0, 1000, 1000.0, buffers=("torch.zeros(3)", "torch.ones(3)"),
    ),
    "running variance after training": Example(
        "v0 = F.batch_norm(x0, p0, p1, training=True, momentum=1.0); v1 = p1 * 1",
        "torch.tensor([[[-100.0, 100.0]]])", -100, 100, 20000.0, buffers=("torch.zeros(1)", "torch.ones(1)"),
    ),
    "running variance of instance norm": Example(
        "v0 = F.instance_norm(x0, p0, p1, use_input_stats=True, momentum=1.0); v1 = p1 * 1",
        "torch.tensor([[[-100.0, 100.0]]])", -100, 100, 20000.0, buffers=("torch.zeros(1)", "torch.ones(1)"),
    ),
    "add_ through atleast_3d": Example(
        "v0 = x0 * 1; v1 = torch.atleast_3d(v0).add_(100.0); v2 = v0 * 1", "torch.ones(2, 3)", -1, 1, 101.0
    ),
    "add_ through contiguous": Example(
        "v0 = x0 * 1; v1 = v0.contiguous().add_(100.0); v2 = v0 * 1", "torch.ones(2, 3)", -1, 1, 101.0
    ),
    "add_ through a parameter's view": Example(
        "v0 = torch.atleast_3d(p0).add_(255.0); v1 = p0 * x0", "torch.ones(2, 1, 1)", -1, 1, 256.0,
        ("torch.ones(2, 1, 1)",),
    ),
    "uninitialized memory": Example(
        "v0 = x0 * 0 + torch.empty(3)", "torch.ones(3)", -1, 1, 0.0
    ),
    "uninitialized memory like a constant's": Example(
        "v0 = x0 * 0 + torch.empty_like(p0)", "torch.ones(3)", -1, 1, 0.0, ("torch.ones(3)",)
    ),
    "uninitialized memory that is filled": Example(
        "v0 = torch.empty(3); v0.copy_(x0 * 100); v1 = v0 * 1", "torch.ones(3)", -1, 1, 100.0
    ),
    "uninitialized memory as out": Example(
        "v0 = torch.empty(3); torch.mul(x0, 100.0, out=v0); v1 = v0 * 1", "torch.ones(3)", -1, 1, 100.0
    ),
    "zeros written to": Example(
        "v0 = torch.zeros(3); v0[1:] = x0[1:] * 100; v1 = v0 * 1", "torch.ones(3)", -1, 1, 100.0
    ),
    # what is proved of nothing
    "mean of nothing": Example("v0 = x0.mean(-1)", "torch.zeros(2, 0)", -1, 1, math.nan),
    "maximum of padding alone": Example(
        "v0 = aten.max_pool2d.default(x0, [2], [2], [1], [3], True)", "torch.ones(3, 2, 1)", 0, 1, math.inf
    ),
    "attention with every key masked": Example(
        "v0 = F.scaled_dot_product_attention(x0, x0, x0, scale=-2.0)", "torch.ones(1, 2, 8)", -1, 1, 1.0
    ),
}  # fmt: skip


def made(example: Example) -> tuple[TracedModel, BoundTable]:
    traced, model = traced_branches([example.branch], example.setting, 0)
    assert isinstance(model, BranchModel)
    assert traced is not None
    assert not model.failed, example.branch
    return traced, table_of(traced, model, example.setting)


def last_span(traced: TracedModel, table: BoundTable) -> Interval:
    node = traced.graph.output_node().all_input_nodes[-1]
    found = table.intervals[node.name]
    assert isinstance(found, Interval)
    return found


def values_at(example: Example) -> torch.Tensor:
    """The last value of the program, computed by torch itself, without any of our tracing."""
    x, scope = example.value, dict(NAMESPACE)
    branch = example.branch
    lower = example.setting.lower
    stored = [item.tensor().to(lower) if lower is not None else item.tensor() for item in branch.stored]
    scope |= {
        "x0": x.to(branch.inputs[0].dtype),
        **{s.name: t for s, t in zip(branch.stored, stored, strict=True)},
    }
    for line in branch.lines:
        exec(line, scope)
    result: torch.Tensor = scope[branch.made[-1]]
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNSOUND)
def test_an_example_of_the_issue_stays_inside(name: str) -> None:
    example = UNSOUND[name]
    value = values_at(example).double()
    largest = float(value.abs().amax())
    if example.observed:  # the number that the issue quotes, or that follows from the text
        assert largest == pytest.approx(example.observed, rel=0.01, nan_ok=True)
    traced, table = made(example)
    inputs = [example.branch.inputs[0].tensor(example.value)]
    shape, low, high = tuple(example.value.shape), example.low, example.high
    more = [example.branch.inputs[0].tensor(t) for t in extreme_values(shape, low, high, 5)]
    check(traced, table, ([given] for given in (inputs[0], *more)))


CRASHES = {
    "transposed scalar": "v0 = x0.sum().transpose(0, 0)",
    "swapped scalar": "v0 = aten.swapdims.default(x0.sum(), 0, 0)",
    "sum of a scalar": "v0 = x0.sum().sum(0)",
    "mean of a scalar": "v0 = x0.sum().mean(-1)",
    "norm of a scalar": "v0 = torch.linalg.vector_norm(x0.sum(), dim=0)",
    "softmax of a scalar": "v0 = torch.softmax(x0.sum(), 0)",
    "log_softmax of a scalar": "v0 = torch.log_softmax(x0.sum(), 0)",
    "cumsum of a scalar": "v0 = torch.cumsum(x0.sum(), 0)",
    "extreme of a scalar": "v0 = x0.sum().amax(0)",
    "variance of a scalar": "v0 = x0.sum().var(0, correction=0)",
    "no axes to permute": "v0 = x0.sum().permute([])",
    "T of a scalar": "v0 = aten.numpy_T.default(x0.sum())",
    "tensor_split at indices": "v0 = x0.tensor_split([1, 3], -1); v1 = v0[1] * 2",
    "tensor_split at a tensor": "v0 = x0.tensor_split(torch.tensor([1, 3]), -1); v1 = v0[1] * 2",
    "tensor_split in parts of two sizes": "v0 = x0.tensor_split(3, -1); v1 = v0[0] + 1",
    "cosine_similarity": "v0 = F.cosine_similarity(x0, x0 * 2, dim=-1)",
    "cosine_similarity that broadcasts": "v0 = F.cosine_similarity(x0, x0[:1], dim=0)",
    "pool without values": "v0 = F.avg_pool1d(x0[:, :0], 2)",
    "slice of nothing": "v0 = x0[:0].amax(-1)",
    "cat of nothing": "v0 = torch.cat([x0[:0], x0])",
    "atleast_2d of a list": "v0 = torch.atleast_2d([x0, x0]); v1 = v0[1] * 2",
    "expand of a scalar": "v0 = x0.sum().expand(2, 3)",
    "linear of one row": "v0 = F.linear(x0[0], p0)",
    "linear of a float32 value and a float16 weight": "v0 = F.linear(x0.sum(0).float(), p0.float())",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", [FP16, AUTOCAST], ids=str)
@pytest.mark.parametrize("name", CRASHES)
def test_an_odd_shape_is_no_crash(name: str, setting: Setting) -> None:
    example = Example(CRASHES[name], "torch.ones(2, 6)", -1, 1, 0.0, ("torch.ones(3, 6)",), setting)
    traced, table = made(example)
    runs = Runs(traced)  # float16 has no native kernel for all of them
    for value in extreme_values((2, 6), -1.0, 1.0, 3):
        found = runs.checked(table, [example.branch.inputs[0].tensor(value)], native=False)
        assert not found.escapes, "\n".join(map(str, found.escapes))


# what is right must stay proved: the bound, and what the program reaches
SOUND: dict[str, tuple[Example, float]] = {
    "stable exponential": (
        Example("v0 = torch.exp(x0 - x0.amax(-1, keepdim=True))", ROWS, -1, 1, 1.0), 1.001
    ),
    "norm by hand": (
        Example(
            f"v0 = x0; v2 = v0 * torch.{MEAN}(-1, keepdim=True) + 1e-5)",
            "torch.tensor([[6e4] + [0.0] * 5] * 2)", 0, 6e4, math.sqrt(6),
        ),
        2.51,
    ),
    "norm by hand along the first axis": (
        Example(
            f"v0 = x0; v2 = v0 * torch.{MEAN}(0, keepdim=True) + 1e-5)",
            "torch.tensor([[6e4] * 2] + [[0.0] * 2] * 5)", 0, 6e4, math.sqrt(6),
        ),
        2.51,
    ),
    "sqrt from zero": (Example("v0 = torch.sqrt(x0)", "torch.full((3,), 4.0)", 0, 4, 2.0), 2.001),
    "variance": (
        Example("v0 = torch.var(x0, -1)", "torch.tensor([[1.0, -1.0] * 4])", -1, 1, 8 / 7), 1.15
    ),
    "variance without correction": (
        Example("v0 = torch.var(x0, -1, correction=0)", "torch.tensor([[1.0, -1.0] * 4])", -1, 1, 1.0), 1.15
    ),
    "celu": (Example("v0 = F.celu(x0, alpha=2.0)", "torch.full((3,), -5.0)", -5, 1,
    2 - 2 * math.exp(-2.5)), 10.01),
    "weight through float16": (
        Example("v0 = x0 * p0.half().float()", "torch.ones(3)", -1, 1, 3.0,
        ("torch.tensor([1.0, -2.0, 3.0])",)), 3.01
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOUND)
def test_what_is_right_stays_proved(name: str) -> None:
    example, limit = SOUND[name]
    assert float(values_at(example).abs().amax()) == pytest.approx(example.observed, rel=0.01)
    interval = last_span(*made(example))
    assert example.observed * 0.999 <= interval.peak <= limit


@torch.library.custom_op("ampaudit_soundness::relu", mutates_args=())
def custom_relu(x: torch.Tensor) -> torch.Tensor:
    """Shares nothing with ATen's relu but its name."""
    return x * 1e3 - 5


@custom_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ampaudit_soundness::var_max_sub", mutates_args=())
def custom_name(x: torch.Tensor) -> torch.Tensor:
    """Its name holds names of others."""
    return x * 1e3


@custom_name.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("op", ["relu", "var_max_sub"])
def test_an_op_of_another_library_is_known_by_its_whole_name(op: str) -> None:
    text = f"v0 = torch.ops.ampaudit_soundness.{op}(x0)"
    traced, table = made(Example(text, "torch.ones(3)", -1, 1, 0.0))
    check(traced, table, [[torch.ones(3)]])
    assert any(op in name for name in table.uncovered)
