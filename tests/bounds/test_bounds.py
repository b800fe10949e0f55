"""Bounds are sound: whatever a real run computes lies inside, at corners, at random and on hostile inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from ampaudit.bounds import BoundTable, bound
from ampaudit.bounds.analysis import assumptions
from ampaudit.bounds.interval import from_tensor
from ampaudit.bounds.transfers import TRANSFERS, DuplicateTransfer, transfer
from ampaudit.core.assumptions import parse_assumption
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import FLOAT16, format_named
from ampaudit.policy import load_policy
from ampaudit.run.low_precision import differs_from_one_rounding
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.functional import overload_of
from ampaudit.trace.values import fake_arguments, tensors_in
from tests.support.soundness.check import check, contains
from tests.support.soundness.inputs import extreme_values
from tests.support.zoo import ZOO

Function = Callable[..., Any]


class Call(nn.Module):
    """One expression, with a few weights at hand."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(6, 8) * 0.7)
        self.square = nn.Parameter(torch.randn(8, 8))
        self.b, self.g = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(8))
        self.k1, self.k2 = nn.Parameter(torch.randn(4, 3, 3)), nn.Parameter(torch.randn(4, 3, 3, 3))
        self.k3 = nn.Parameter(torch.randn(2, 3, 2, 2, 2))
        self.norm, self.batch, self.group = nn.LayerNorm(8), nn.BatchNorm2d(3), nn.GroupNorm(3, 6)
        self.table, self.rms = nn.Embedding(11, 8), nn.RMSNorm(8, eps=1e-5)
        with torch.no_grad():
            for norm in (self.norm, self.batch, self.group):
                norm.weight.normal_()
                norm.bias.normal_()
            self.batch.running_var.uniform_(1e-6, 3)
            self.batch.running_mean.normal_()

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


ROWS, IMAGE, VOLUME, LINE = (2, 5, 8), (2, 3, 6, 6), (1, 3, 4, 4, 4), (2, 3, 9)
CASES: dict[str, tuple[Function, tuple[int, ...]]] = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), ROWS),
    "a number to a power": (lambda m, x: (torch.pow(1.0007, x), torch.pow(0.9999, x)), ROWS),
    "a power": (lambda m, x: (x.abs().pow(2.7013), (x.abs() + 1).pow(-0.3001)), ROWS),
    "linear of a linear": (lambda m, x: F.linear(F.linear(x, m.w, m.b), m.w.t()), ROWS),
    "linear of a norm": (lambda m, x: F.linear(m.norm(x), m.w), ROWS),
    "norms in a row": (lambda m, x: m.norm(F.linear(m.norm(x * 100), m.square) + x), ROWS),
    "norm with a tiny eps": (lambda m, x: F.layer_norm(F.linear(x, m.square), (8,), eps=1e-12), ROWS),
    "addmm": (lambda m, x: torch.addmm(m.b, x[0], m.w.t()), ROWS),
    "matmul": (lambda m, x: torch.matmul(x, x.transpose(-1, -2)), ROWS),
    "matmul with a weight": (lambda m, x: x @ m.square, ROWS),
    "zero times": (lambda m, x: (x * 0.0, torch.zeros(5, 5, dtype=x.dtype) @ x), ROWS),
    "mm": (lambda m, x: torch.mm(x[0], x[1].t()), ROWS),
    "bmm": (lambda m, x: torch.bmm(x, x.mT), ROWS),
    "attention": (
        lambda m, x: torch.softmax((m.norm(x) @ m.norm(x).transpose(1, 2)) * 0.3, -1) @ F.linear(x, m.square),
        ROWS,
    ),
    "heads": (
        lambda m, x: F.linear(m.norm(x), m.square).view(2, 5, 2, 4).transpose(1, 2).contiguous(),
        ROWS,
    ),
    "heads and back": (
        lambda m, x: (
            m.norm(x).view(2, 5, 2, 4).transpose(1, 2).reshape(4, 5, 4).flatten(1).unflatten(1, [5, 4])
        ),
        ROWS,
    ),
    "fused attention": (lambda m, x: F.scaled_dot_product_attention(*[m.norm(x)[:, None]] * 3), ROWS),
    "conv1d": (lambda m, x: F.conv1d(x, m.k1, padding=1), LINE),
    "conv2d": (lambda m, x: F.conv2d(x, m.k2, m.b[:4], stride=2, padding=1), IMAGE),
    "conv2d in groups": (lambda m, x: F.conv2d(x, m.k2[:3, :1], groups=3), IMAGE),
    "conv2d of channels": (lambda m, x: F.conv2d(F.relu(m.batch(x)), m.k2, m.b[:4], padding=1), IMAGE),
    "conv3d": (lambda m, x: F.conv3d(x, m.k3), VOLUME),
    "batch norm": (lambda m, x: m.batch(x), IMAGE),
    "batch norm in training": (lambda m, x: F.batch_norm(x, None, None, training=True), IMAGE),
    "group norm": (lambda m, x: m.group(torch.cat([x, x * 2], 1)), IMAGE),
    "rms norm": (lambda m, x: m.rms(x), ROWS),
    "rms norm by hand": (lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), ROWS),
    "rms norm in float32": (lambda m, x: upcast_norm(x), ROWS),
    "softmax": (lambda m, x: torch.softmax(x, 1), ROWS),
    "softmax by hand": (lambda m, x: torch.exp(x - x.amax(-1, keepdim=True)), ROWS),
    "log_softmax": (lambda m, x: torch.log_softmax(x, -1), ROWS),
    "casts": (
        lambda m, x: (
            x.long() * 1.0,
            x.to(torch.int8) + x,
            x.bool() * x,
            x.int().float() * 0.5,
            x.double() * 3,
        ),
        ROWS,
    ),
    "embedding": (lambda m, x: m.table((x.abs() * 3).long().clamp(0, 10)), (2, 5)),
    "sums": (lambda m, x: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True), m.norm(x).sum(-1)), ROWS),
    "sum of a softmax": (lambda m, x: torch.softmax(x, -1).sum(-1), ROWS),
    "means": (lambda m, x: (x.mean(), x.mean(1), m.norm(x).mean((0, 1))), ROWS),
    "extremes": (lambda m, x: (x.amax(-1), x.amin((0, 1), keepdim=True), m.norm(x).amax(1)), ROWS),
    "cumsum": (lambda m, x: torch.cumsum(x, 1), ROWS),
    "vector norm": (lambda m, x: (torch.linalg.vector_norm(x, dim=-1), x.norm(dim=1, keepdim=True)), ROWS),
    "norm function": (lambda m, x: torch.norm(x.float(), dim=1), ROWS),
    "variance": (lambda m, x: (x.var(-1), x.std((0, 1)), x.var(1, correction=0)), ROWS),
    "pools": (
        lambda m, x: (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 3, padding=1),
            F.adaptive_avg_pool2d(x, 2),
            F.adaptive_max_pool2d(x, 2),
        ),
        IMAGE,
    ),
    "pools of one dimension": (
        lambda m, x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 3), F.adaptive_avg_pool1d(x, 2)),
        LINE,
    ),
    "pools of three": (
        lambda m, x: (F.avg_pool3d(x.float(), 2), F.max_pool3d(x, 2), F.adaptive_avg_pool3d(x.float(), 1)),
        VOLUME,
    ),
    "arithmetic": (lambda m, x: (x + m.g, 3 - x, x - m.g, x * m.g, x * x, x.add(m.g, alpha=-2), -x), ROWS),
    "residual": (lambda m, x: m.norm(x) + F.linear(m.norm(x), m.square) * 0.5, ROWS),
    "division": (lambda m, x: (x / 7, m.norm(x) / (x.abs() + 1), x / m.g, 1 / (x * x + 0.5)), ROWS),
    "powers": (lambda m, x: (x**2, x**3, x.square(), (x.abs() + 0.1) ** -0.5, x.abs() ** 1.5), ROWS),
    "roots": (lambda m, x: (x.abs().sqrt(), torch.rsqrt(x.abs() + 0.25), (x * x + 1).reciprocal()), ROWS),
    "exponentials": (lambda m, x: (x.exp(), torch.expm1(x), torch.exp2(x), F.softplus(x), x.sinh()), ROWS),
    "logarithms": (
        lambda m, x: ((x.abs() + 1e-3).log(), x.abs().log1p(), (x.abs() + 1).log2(), (x.abs() + 1).log10()),
        ROWS,
    ),
    "bounded": (lambda m, x: (x.sigmoid(), x.tanh(), x.erf(), x.atan(), x.sin(), x.cos(), x.asinh()), ROWS),
    "gates": (lambda m, x: (F.gelu(x), F.silu(x), F.mish(x), F.hardswish(x), F.hardsigmoid(x)), ROWS),
    "gates of norms": (lambda m, x: F.gelu(F.linear(m.norm(x), m.square), approximate="tanh"), ROWS),
    "rectified": (lambda m, x: (x.relu(), F.relu6(x), F.hardtanh(x), F.logsigmoid(x)), ROWS),
    "leaky": (
        lambda m, x: (F.leaky_relu(x, -0.3), F.elu(x, 2.0), F.celu(x), F.selu(x), F.prelu(x, m.g[:1])),
        ROWS,
    ),
    "steps": (lambda m, x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.sign(), x.abs()), ROWS),
    "limits": (
        lambda m, x: (
            x.clamp(-1, 2),
            x.clamp(min=0.5),
            x.clamp_max(1),
            torch.maximum(x, m.g),
            torch.minimum(x, m.g),
        ),
        ROWS,
    ),
    "choice": (lambda m, x: (torch.where(x > 0, x, m.g), x.masked_fill(x < 0, -7.0), (x > 0) * x), ROWS),
    "shapes": (
        lambda m, x: (
            x.permute(2, 0, 1),
            m.norm(x).transpose(0, 2),
            x[0].t(),
            x.unsqueeze(1).expand(2, 3, 5, 8),
            m.norm(x)[:, :, 2:5],
            m.norm(x).select(1, 2),
            x.roll(1, 0),
            x.flip(0),
        ),
        ROWS,
    ),
    "parts": (
        lambda m, x: [p * 2 for p in (*m.norm(x).chunk(2, -1), *x.split(2, 1), *m.norm(x).unbind(1))],
        ROWS,
    ),
    "joined": (
        lambda m, x: (torch.cat([x, m.norm(x)], 1), torch.stack([x, -x]), F.pad(x, (1, 2), value=9.0)),
        ROWS,
    ),
    "made": (
        lambda m, x: (
            x + torch.arange(8).to(x.dtype),
            torch.full_like(x, 3.0) * x,
            x + x.new_zeros(8),
            x * torch.ones_like(x),
            torch.zeros_like(x) - x,
        ),
        ROWS,
    ),
    "picked": (
        lambda m, x: (
            x.index_select(1, torch.tensor([0, 3])),
            x.gather(1, torch.zeros(2, 1, 8, dtype=torch.long)),
            x[:, [1, 2]],
            x.repeat(1, 2, 1),
            x.tril(),
            x.repeat_interleave(2, 0),
        ),
        ROWS,
    ),
    "upsampled": (lambda m, x: F.interpolate(x, scale_factor=2), IMAGE),
    "shuffled": (lambda m, x: F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2), IMAGE),
    "in place": (lambda m, x: in_place(m, x), ROWS),
    "in place, read later": (lambda m, x: in_place_and_read(x), ROWS),
    "extremes of rows": (lambda m, x: (x.max(-1).values, x.min(-1).values, x.argmax(-1) * 1.5), ROWS),
    "sorted": (lambda m, x: (x.sort(-1).values, x.topk(3).values), ROWS),
    "moments": (lambda m, x: (torch.var_mean(x, -1), torch.std_mean(x, -1)), ROWS),
    "uneven pieces": (lambda m, x: torch.tensor_split(x, [3], -1), ROWS),
    "dropout that is off": (lambda m, x: F.dropout(x * 2, 0.5, training=False), ROWS),
    "copied": (lambda m, x: torch.zeros_like(x).copy_(x), ROWS),
}


def upcast_norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype)


def in_place(m: Call, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, m.w)
    y.add_(m.b)
    return F.relu_(y).mul_(2.0)


def in_place_and_read(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[0]
    y.mul_(100.0)
    return z + y


@functools.cache
def traced_case(name: str, policy: str, dtype: str) -> tuple[TracedModel, tuple[int, ...]]:
    function, shape = CASES[name]
    form = format_named(dtype)
    torch.manual_seed(3)
    model = Call(function).eval()
    made = trace(
        model, (torch.zeros(shape),), {}, TraceConfig(load_policy(policy), load_policy("torch-cuda"), form)
    )
    return made, shape


def table_of(traced: TracedModel, shape: tuple[int, ...], low: float, high: float, dtype: str) -> BoundTable:
    domain = assumptions(traced, [[torch.zeros(shape)]], [f"input={low}:{high}"])
    return bound(traced, domain, format_named(dtype))


@pytest.mark.parametrize(
    ("policy", "dtype"), [("half", "float16"), ("half", "bfloat16"), ("torch-cuda", "float16")]
)
@pytest.mark.parametrize("name", CASES)
def test_what_a_run_computes_is_inside(name: str, policy: str, dtype: str) -> None:
    traced, shape = traced_case(name, policy, dtype)
    for low, high in ((-1.0, 1.0), (-300.0, 20.0), (5.0, 5.0), (0.0, 6e4)):
        table = table_of(traced, shape, low, high, dtype)
        check(traced, table, ([x] for x in extreme_values(shape, low, high, 7)))


@pytest.mark.parametrize("name", CASES)
def test_every_op_of_a_case_has_a_bound(name: str) -> None:
    """Otherwise, any result would be inside."""
    table = table_of(*traced_case(name, "half", "float16"), 0.25, 1.0, "float16")
    assert not table.failed
    assert not table.uncovered, "no transfer function, or one that has not read the arguments after 'with'"
    assert not [site for site, limit in table.bounds.items() if not math.isfinite(limit.peak)]


def test_every_transfer_function_has_a_case() -> None:
    reached = {
        overload_of(node.target)
        for name in CASES
        for node in traced_case(name, "half", "float16")[0].graph.nodes
        if node.op == "call_function"
    }
    functions = {TRANSFERS[op].function for op in reached & TRANSFERS.keys()}
    without = {str(op) for op, entry in TRANSFERS.items() if entry.function not in functions}
    assert not without, "add a case to CASES"


# ops that round between their parts, and whose transfer functions bound the parts
BOUNDS_PARTS: frozenset[str] = frozenset()


@pytest.mark.parametrize("name", CASES)
def test_ops_that_round_inside_are_bounded_inside(name: str) -> None:
    """``logsumexp`` overflows in float16 from 65,520 equal elements on, although its result is small."""
    traced, _ = traced_case(name, "half", "float16")
    calls = ((overload_of(node.target), *fake_arguments(node)) for node in traced.graph.nodes)
    inside = {str(op) for op, *args in calls if op is not None and differs_from_one_rounding(op, *args)}
    assert inside <= BOUNDS_PARTS, (
        "bound what its kernel rounds to 16 bits inside, with a case that reaches it; then list it here"
    )


@pytest.mark.parametrize("groups", [1, 3])
def test_a_convolution_reaches_its_bound(groups: int) -> None:
    """Its largest value is there where each input has the sign of its weight."""
    torch.manual_seed(0)
    layer, shape = nn.Conv2d(3, 6, 3, groups=groups), (1, 3, 5, 5)
    rules = load_policy("half"), load_policy("torch-cuda")
    traced = trace(layer, (torch.zeros(shape),), {}, TraceConfig(*rules, FLOAT16))
    (found,) = (b for s, b in table_of(traced, shape, -1.0, 1.0, "float16").bounds.items() if "conv" in s)
    assert layer.bias is not None
    reached = float((layer.weight.abs().sum((1, 2, 3)) + layer.bias.abs()).detach().max())
    assert reached * 0.999 <= found.peak <= reached * 1.001


ENDS = st.floats(-1e4, 1e4, width=16)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    st.sampled_from(sorted(CASES)),
    st.sampled_from([("half", "float16"), ("half", "bfloat16"), ("torch-cuda", "float16")]),
    ENDS,
    ENDS,
    st.integers(0, 1 << 20),
    st.sampled_from([1, 5]),
)
def test_what_a_run_computes_is_inside_for_any_domain(
    name: str, how: tuple[str, str], a: float, b: float, seed: int, grow: int
) -> None:
    traced, shape = traced_case(name, *how)
    low, high = min(a, b), max(a, b) * grow if max(a, b) > 0 else max(a, b)
    table = table_of(traced, shape, low, high, how[1])
    check(traced, table, ([x] for x in extreme_values(shape, low, high, seed)))


class Origins(fx.Interpreter):
    """A run in the graph's dtypes that lists ops which make inf or NaN of inputs or of finite operands."""

    def __init__(self, traced: TracedModel) -> None:
        super().__init__(fx.GraphModule({}, traced.graph))
        self.broken: set[fx.Node] = set()
        self.nodes: list[str] = []

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        floats = [each for each in tensors_in(result) if each.is_floating_point()]
        if node.op == "call_function" and not all(bool(each.isfinite().all()) for each in floats):
            if self.broken.isdisjoint(node.all_input_nodes):
                self.nodes.append(node.name)
            self.broken.add(node)
        return result


@pytest.mark.parametrize("name", CASES)
def test_what_breaks_on_an_input_beyond_the_format_is_not_proved(name: str) -> None:
    """The conversion of an input is no site, so that the ops which read it are at fault."""
    traced, shape = traced_case(name, "half", "float16")
    weights = attach_weights(traced).masters
    for low, high in ((-1e6, 1e6), (7e4, 8e4), (-8e4, -7e4)):
        table = table_of(traced, shape, low, high, "float16")
        assert not table.failed
        for values in extreme_values(shape, low, high, 7):
            run = Origins(traced)
            places = [
                (weights.get(place.node, values).detach(), place.dtype) for place in traced.placeholders
            ]
            run.run(*(value.clone().to(dtype) for value, dtype in places))
            sites = {traced.site_of_node[node].id for node in run.nodes if node in traced.site_of_node}
            wrong = sorted(sites & table.proved)
            assert not wrong, (
                "these make inf or NaN of an input beyond the format: return unbounded(call.shape)"
            )


def test_inputs_without_a_stated_range_are_finite() -> None:
    traced, shape = traced_case("linear", "half", "float16")
    for value in (torch.nan, torch.inf):
        batch = torch.zeros(shape)
        batch.flatten()[-1] = value
        with pytest.raises(InputError, match=r"input\[0\] holds NaN or infinity"):
            assumptions(traced, [[torch.zeros(shape)], [batch]], [])
        (stated,) = assumptions(traced, [[batch]], ["input=-1:1"]).values()
        assert (stated.low, stated.high) == (-1.0, 1.0)


def test_an_op_whose_operand_is_unbounded_is_covered() -> None:
    """Only an op or argument that no transfer function handles is listed as uncovered."""
    traced, shape = traced_case("linear of a norm", "half", "float16")
    table = table_of(traced, shape, -1e6, 1e6, "float16")
    assert math.inf in [each.peak for each in table.bounds.values()]
    assert not table.uncovered


def test_a_second_transfer_for_an_op_is_refused() -> None:
    with pytest.raises(DuplicateTransfer):
        transfer("add.Tensor")(lambda call: call.interval("self"))


def test_an_op_without_a_transfer_is_unbounded_and_counted() -> None:
    model = Call(lambda m, x: torch.special.i0(x) + 1)
    made = trace(
        model, (torch.zeros(ROWS),), {}, TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16)
    )
    table = table_of(made, ROWS, -1, 1, "float16")
    assert any("i0" in op for op in table.uncovered)
    assert not any("i0" in site for site in table.proved)


def test_most_of_an_encoder_is_proved() -> None:
    zoo = ZOO["bert"]()
    made = trace(
        zoo.model.eval(), (), zoo.kwargs, TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16)
    )
    domain = assumptions(made, [tensor_leaves((), zoo.kwargs)], [])
    table = bound(made, domain, FLOAT16)
    assert len(table.proved) >= 0.9 * len(table.bounds)
    assert {a.source for a in table.assumed} <= {"embedding table", "batches"}


@pytest.mark.parametrize("function", ["norm", "rms", "group", "var"])
def test_the_inside_of_a_norm_has_a_bound_of_its_own(function: str) -> None:
    calls: dict[str, Function] = {
        "norm": lambda m, x: m.norm(x),
        "rms": lambda m, x: m.rms(x),
        "group": lambda m, x: m.group(x.reshape(2, 5, 8)[:, :, :6].transpose(1, 2)),
        "var": lambda m, x: x.var(-1),
    }
    made = trace(
        Call(calls[function]).eval(),
        (torch.zeros(ROWS),),
        {},
        TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16),
    )
    table = table_of(made, ROWS, -300.0, 500.0, "float16")
    (inside,) = [b.inside for b in table.bounds.values() if b.inside is not None]
    for x in extreme_values(ROWS, -300.0, 500.0, 1):
        centre = x if function == "rms" else x - x.mean(-1, keepdim=True)
        assert inside >= float(centre.half().double().square().amax())
    assert inside <= 1.02 * (500.0**2 if function == "rms" else 800.0**2)


def test_a_weight_that_overflows_is_not_proved() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    made = trace(
        model,
        (torch.zeros(1, 4),),
        {},
        TraceConfig(load_policy("torch-cuda"), load_policy("torch-cuda"), FLOAT16),
    )
    table = bound(made, assumptions(made, [[torch.zeros(1, 4)]], []), FLOAT16)
    assert not any("cast(weight)" in site for site in table.proved)
    assert any("cast(bias)" in site for site in table.proved)


def test_assumptions_are_stated_per_input_or_for_all() -> None:
    assert parse_assumption("input[0]=-1:2.5") == ("input[0]", -1.0, 2.5)
    for wrong in ("input", "input=1", "=0:1", "x=2:1", "x=nan:1", "x=0:inf", "x=a:b"):
        with pytest.raises(UsageError, match="is not a valid range"):
            parse_assumption(wrong)
    traced, shape = traced_case("linear", "half", "float16")
    with pytest.raises(UsageError, match="no such input"):
        assumptions(traced, [[torch.zeros(shape)]], ["inptu=0:1"])
    (calibrated,) = assumptions(traced, [[torch.ones(shape)], [torch.zeros(shape)]], []).values()
    assert (calibrated.low, calibrated.high, calibrated.source) == (0.0, 1.0, "batches")


def test_inputs_are_named_as_they_are_passed() -> None:
    class Sum(nn.Module):
        def forward(
            self, x: torch.Tensor, shift: torch.Tensor, more: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            return x + shift + more["bias"]

    args, kwargs = (torch.zeros(3),), {"more": {"bias": torch.zeros(3)}, "shift": torch.ones(3)}
    made = trace(Sum(), args, kwargs, TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16))
    domain = assumptions(made, [tensor_leaves(args, kwargs)], ["shift=2:3", "more['bias']=4:5"])
    ranges = {each.name: (each.low, each.high) for each in domain.values()}
    assert ranges == {"input[0]": (0.0, 0.0), "shift": (2.0, 3.0), "more['bias']": (4.0, 5.0)}


def test_a_large_known_tensor_keeps_the_ends_of_its_rows() -> None:
    tensor = torch.randn(300, 400)
    interval = from_tensor(tensor)
    assert interval.low.shape == (1, 400)
    assert contains(interval, tensor)
    assert not contains(interval, tensor * 2)


# where float32 itself ends, or a kernel rounds once more than the formula says
EDGES: dict[str, tuple[Function, torch.Tensor, str, str]] = {
    "a mean pool adds up beyond float32": (
        lambda m, x: F.avg_pool2d(x, 2), torch.full((1, 1, 4, 4), 2e38), "half", "bfloat16",
    ),
    "scores beyond float32": (
        lambda m, x: F.scaled_dot_product_attention(x, x, torch.tanh(x)), torch.randn(2, 4, 8) * 1e25, "half",
        "bfloat16",
    ),
    "scores that a scale takes beyond float32": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x, scale=1e38), torch.randn(2, 4, 8) * 100, "half",
        "float16",
    ),
    "a cast to float8": (
        lambda m, x: x.to(torch.float8_e5m2).float() * 1.0, torch.tensor([430.0, 1.9]), "half", "float16",
    ),
    "a cast to complex numbers of 16 bits": (
        lambda m, x: x.chalf(), torch.full((4,), 1e5), "torch-cuda", "bfloat16",
    ),
    "an eps that is zero in float32": (
        lambda m, x: F.rms_norm(x, (4,), eps=1e-50), torch.zeros(2, 4), "half", "float16",
    ),
    "zero times a number beyond float32": (
        lambda m, x: (x * 0.0) * 1e39, torch.ones(4), "half", "float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_what_float32_cannot_hold_is_not_proved(name: str) -> None:
    function, x, policy, dtype = EDGES[name]
    form = format_named(dtype)
    torch.manual_seed(3)
    traced = trace(
        Call(function).eval(), (x,), {}, TraceConfig(load_policy(policy), load_policy("torch-cuda"), form)
    )
    domain = assumptions(traced, [[x]], [])
    check(traced, bound(traced, domain, form), [[x]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norm_by_hand_reaches_the_root_of_its_length(dtype: str) -> None:
    """Its factor is rounded to 16 bits before it scales; 500 is much more than the root of 8."""

    def by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
        squares = x.float().square().mean(-1, keepdim=True)
        return x * torch.rsqrt(squares + 1e-6).to(x.dtype)

    rules, form = load_policy("half"), format_named(dtype)
    made = trace(
        Call(by_hand).eval(), (torch.zeros(ROWS),), {}, TraceConfig(rules, load_policy("torch-cuda"), form)
    )
    table = table_of(made, ROWS, -500.0, 500.0, dtype)
    (peak,) = (bound.peak for site, bound in table.bounds.items() if "/mul" in site)
    assert 8**0.5 <= peak <= 1.03 * 8**0.5  # three roundings of 2^-8


def test_constants_are_followed_through_several_ops() -> None:
    """A mask that is computed from positions is known: what it leaves out is in no bound."""
    made = trace(
        *(Call(lambda m, x: x * torch.where(torch.arange(8) < 8, 2.0, 1e3)).eval(), (torch.zeros(ROWS),), {}),
        TraceConfig(load_policy("half"), load_policy("torch-cuda"), FLOAT16),
    )
    table = table_of(made, ROWS, -500.0, 500.0, "float16")
    (peak,) = (bound.peak for site, bound in table.bounds.items() if "/mul" in site)
    assert 1000.0 <= peak <= 1001.0
