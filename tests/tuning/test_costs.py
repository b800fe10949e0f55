"""What float32 costs: against torch's own counter run eagerly, bytes counted by hand, and invariants."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ampaudit.core.errors import UsageError
from ampaudit.core.formats import FLOAT16
from ampaudit.core.sites import SiteId
from ampaudit.devices.catalogue import Rates, device_named
from ampaudit.devices.host import Host, HostDevice
from ampaudit.policy import load_policy
from ampaudit.trace import TraceConfig, TracedModel, trace
from ampaudit.tuning import trials
from ampaudit.tuning.trials import CostKind, costs_of, default_device
from tests.support.zoo import ZOO

# one flop a second in float32, and no time for anything else: seconds are flops
COUNTING = replace(
    device_named("v100"), bandwidth_gbs=1e30, fp32=1e-12, fp16=1e12, tensor=Rates(1e12, None, None, None)
)


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args, *self.weights)


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    rules = load_policy("half")
    return trace(model.eval(), args, kwargs, TraceConfig(rules, rules, FLOAT16))


def eager_flops(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    # torch's table lacks the CPU kernel for attention: the same as products of matrices
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return int(counter.get_total_flops())


PRODUCTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(4, 5, 8), (16, 8), (16,)]),
    "linear-no-bias": (F.linear, [(4, 8), (16, 8)]),
    "linear-vector": (F.linear, [(8,), (16, 8)]),
    "mm": (torch.mm, [(4, 8), (8, 3)]),
    "bmm": (torch.bmm, [(2, 4, 8), (2, 8, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 3), (2, 4, 8), (2, 8, 3)]),
    "matmul": (torch.matmul, [(2, 3, 4, 8), (2, 3, 8, 5)]),
    "matmul-broadcast": (torch.matmul, [(2, 3, 4, 8), (3, 8, 5)]),
    "conv1d": (F.conv1d, [(2, 4, 10), (6, 4, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), [(2, 4, 9, 7), (6, 4, 3, 3), (6,)]),
    "conv2d-grouped": (lambda x, w: F.conv2d(x, w, groups=4), [(2, 4, 9, 7), (8, 1, 3, 3)]),
    "conv2d-unbatched": (F.conv2d, [(4, 9, 7), (6, 4, 3, 3)]),
    "conv3d": (F.conv3d, [(1, 2, 5, 5, 5), (3, 2, 3, 3, 3)]),
    "conv-transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 4, 5, 5), (4, 6, 3, 3)]),
    "einsum": (lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), [(2, 3, 4, 8), (2, 3, 5, 8)]),
    "einsum-three": (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), [(3, 4), (4, 5), (5, 6)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)]),
    "attention-mask": (F.scaled_dot_product_attention, [*[(2, 3, 4, 8)] * 3, (4, 4)]),
    "attention-causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 3, 4, 8)] * 3,
    ),
    "attention-grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)],
    ),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 2), [(3, 4, 5), (4, 5, 6)]),
}


@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_arithmetic_is_what_torch_counts(case: tuple[Callable[..., Any], list[tuple[int, ...]]]) -> None:
    function, shapes = case
    args = [torch.randn(shape) for shape in shapes]
    expected = eager_flops(Call(function), *args)
    assert expected > 0
    found = costs_of(traced(Call(function), *args), "time", COUNTING)
    assert sum(found.ops.values()) == pytest.approx(expected)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "lstm": (nn.LSTM(4, 6, num_layers=2, bidirectional=True), (3, 5, 4)),
    "gru": (nn.GRU(4, 6), (3, 5, 4)),
    "lstm-cell": (nn.LSTMCell(4, 6), (5, 4)),
    "encoder": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (3, 5, 4)),
}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_several_ops_add_up(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    layer, shape = case
    x = torch.randn(shape)
    # in float64, for which there is no fused kernel that torch's table lacks
    expected = eager_flops(copy.deepcopy(layer).double().eval(), x.double())
    assert expected > 0
    assert sum(costs_of(traced(layer, x), "time", COUNTING).ops.values()) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["t5", "resnet", "mixtral"])
def test_whole_models_add_up(name: str) -> None:
    zoo = ZOO[name]()
    expected = eager_flops(zoo.model.eval(), **zoo.kwargs)
    found = costs_of(traced(zoo.model, **zoo.kwargs), "time", COUNTING)
    assert sum(found.ops.values()) == pytest.approx(expected)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


# a function of one op, and the 16-bit elements that it reads and writes
MOVED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "add": (torch.add, [(4, 8), (4, 8)], 3 * 32),
    "add-broadcast": (torch.add, [(4, 8), (8,)], 32 + 8 + 32),
    "add-itself": (lambda x: x + x, [(4, 8)], 32 + 32),
    "in-place": (in_place, [(4, 8), (4, 8)], 3 * 32),
    "linear": (F.linear, [(4, 5, 8), (16, 8), (16,)], 160 + 128 + 16 + 320),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 4, 8)] * 3, 4 * 192),
    "convolution": (F.conv2d, [(1, 2, 5, 5), (3, 2, 3, 3)], 50 + 54 + 27),
    "layer-norm": (lambda x, w: F.layer_norm(x, (8,), w), [(4, 8), (8,)], 32 + 8 + 32),
    "softmax": (lambda x: x.softmax(-1), [(4, 8)], 64),
    "cat": (lambda x, y: torch.cat([x, y]), [(4, 8), (2, 8)], 2 * 48),
    "max": (lambda x: x.max(-1), [(4, 8)], 32 + 4),  # and its indices, which no format changes
    "var-mean": (lambda x: torch.var_mean(x, -1), [(4, 8)], 32 + 4 + 4),
    "greater": (lambda x: x > 0, [(4, 8)], 32),
    "slice": (lambda x: x[1:3].neg(), [(4, 8)], 16 + 16),
    "rows": (lambda x: x[torch.tensor([0, 2, 2])], [(40, 8)], 24 + 24),  # reads three rows of forty
    "more-rows": (lambda x: x[torch.tensor([0] * 9)], [(4, 8)], 32 + 72),  # no row is read twice
    "empty": (lambda x: x * 2, [(0, 8)], 0),
    "view": (lambda x: x.transpose(0, 1), [(4, 8)], 0),
}


@pytest.mark.parametrize("case", MOVED.values(), ids=MOVED.keys())
def test_bytes_are_those_read_and_written(
    case: tuple[Callable[..., Any], list[tuple[int, ...]], int],
) -> None:
    function, shapes, elements = case
    model = traced(Call(function), *map(torch.randn, shapes))
    found = costs_of(model, "bytes")
    assert sum(found.ops.values()) == 2 * elements
    # each value that is cast is read in one format and written in the other
    assert found.casts["tensors_0"] == 6 * torch.Size(shapes[0]).numel()
    device = replace(COUNTING, fp32=1e30, bandwidth_gbs=1e-9)  # a byte a second
    assert costs_of(model, "time", device).casts == pytest.approx(dict(found.casts))
    assert sum(costs_of(model, "time", device).ops.values()) == pytest.approx(2 * elements)


def unchecked_sizes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x[x > 0], x[x > 1]])
    return torch.mm(both[None], w)  # where one size is known, and the other a sum of two that are not


def checked_size(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = x.nonzero().to(x.dtype)
    return torch.mm(rows.t(), w)  # so there are as many as w has rows


UNUSUAL: dict[str, Callable[..., Any]] = {
    "unchecked sizes": unchecked_sizes,
    "checked size": checked_size,
    "complex": lambda x, w: torch.fft.rfft(w).abs(),
    "spectrogram": lambda x, w: torch.stft(w.flatten(), 8, window=x.new_ones(8), return_complex=True),
    "sparse": lambda x, w: torch.sparse.mm(w.to_sparse(), w),
    "scalar read": lambda x, w: w * x.sum().item(),
    "no result": lambda x, w: torch._foreach_add_([y := x.clone(), z := w.clone()], 1.0) or (y, z),
    "in place": lambda x, w: w.clone().index_put_((torch.tensor([0]),), x),
    "higher order": lambda x, w: torch.cond(x.sum() > 0, torch.sin, torch.cos, (w,)),
    "random": lambda x, w: F.dropout(w, 0.5, training=True) + torch.randn_like(w),
    "integers": lambda x, w: torch.arange(3) + x.long(),
    "float64": lambda x, w: w.double() * 2,
    "empty": lambda x, w: w[:0] @ w,
    "input": lambda x, w: x,
}


@pytest.mark.parametrize("function", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.parametrize("kind", ["ops", "bytes", "time"])
def test_unusual_ops_have_a_cost(function: Callable[..., Any], kind: CostKind) -> None:
    model = traced(Call(function), torch.tensor([1.0, 2.0, 3.0]), torch.rand(3, 3))
    found = costs_of(model, kind)
    assert found.ops.keys() == {site.id for site in model.sites}
    for prices in (found.ops, found.casts, found.weights):
        assert all(0 <= price < float("inf") for price in prices.values())


def test_a_size_that_is_known_later_counts() -> None:
    model = traced(Call(checked_size), torch.ones(5), torch.rand(5, 3))
    assert costs_of(model, "time", COUNTING).ops[SiteId("(top)/mm")] == pytest.approx(2 * 5 * 3)


def test_reading_a_size_is_free() -> None:
    model = traced(Call(lambda x: x[x > 0].new_ones(x[x > 0].shape[0] // 2)), torch.ones(5))
    assert costs_of(model, "ops").ops[SiteId("(top)/sym_size")] == 0


def test_dynamic_sizes_count_as_in_the_trace() -> None:
    rules, x, weight = load_policy("half"), torch.randn(4, 8), torch.randn(16, 8)
    axes = ({0: torch.export.Dim("n", min=2, max=64)}, None)
    model = trace(Call(F.linear), (x, weight), {}, TraceConfig(rules, rules, FLOAT16, dynamic=axes))
    values = [node.meta["val"] for node in model.graph.nodes if "val" in node.meta]
    assert any(isinstance(size, torch.SymInt) for value in values for size in value.shape)
    assert sum(costs_of(model, "bytes").ops.values()) == 2 * (4 * 8 + 16 * 8 + 4 * 16)
    assert sum(costs_of(model, "time", COUNTING).ops.values()) == pytest.approx(2 * 4 * 8 * 16)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_tied_weights_are_stored_once() -> None:
    tokens = torch.randint(0, 50, (2, 6))
    tied, apart = (traced(Tied(tied=tied), tokens) for tied in (True, False))
    once, twice = costs_of(tied, "bytes"), costs_of(apart, "bytes")
    assert sum(once.weights.values()) == 2 * (50 * 8 + 50)
    assert sum(twice.weights.values()) == 2 * (2 * 50 * 8 + 50)
    assert len(once.weights) == len(twice.weights) == 3
    read = {node.name for node in tied.graph.nodes if node.users}
    assert {node for node, price in once.weights.items() if price} <= read
    # the table is read row by row, whatever its length, and a cast converts all of it
    assert once.ops[SiteId("embed/embedding")] == 2 * (2 * 6 * 8 + 2 * 6 * 8)
    assert 6 * 50 * 8 in once.casts.values()


@pytest.mark.parametrize("kind", ["bytes", "time"])
def test_more_costs_more(kind: CostKind) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Softmax(-1))
    steps = [costs_of(traced(layer, torch.randn(size, 64)), kind) for size in (1, 8, 64, 512)]
    for less, more in itertools.pairwise(steps):
        assert less.weights == more.weights
        assert all(less.ops[site] < more.ops[site] for site in less.ops)
        assert all(less.casts[node] <= more.casts[node] for node in less.casts)
        assert sum(less.casts.values()) < sum(more.casts.values())


def test_ops_are_counted_and_the_rest_breaks_ties() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float().transpose(0, 1).relu()  # all in float32 as it is
        return torch.cat([y.half() @ weight, x.half()]) > 0  # three ops

    model = traced(Call(function, torch.randn(4, 8)), torch.randn(4, 8))
    found = costs_of(model, "ops")
    counted = {site for site, price in found.ops.items() if price}
    assert counted == {"(top)/matmul", "(top)/cat", "(top)/gt"}
    assert set(found.ops.values()) == {0.0, 1.0}
    assert 0 < sum(found.casts.values()) < 1
    assert 0 < sum(found.weights.values()) < min(found.casts.values())


def test_time_is_never_saved_by_float32() -> None:
    slow = device_named("gtx1080ti")  # 16-bit arithmetic at 1/64 of the rate
    found = costs_of(traced(nn.Linear(512, 512), torch.randn(512, 512)), "time", slow)
    assert set(found.ops.values()) == {0.0}
    assert found.device is slow


def test_time_is_the_longer_of_arithmetic_and_bytes() -> None:
    device = device_named("a100")
    found = costs_of(traced(nn.Linear(1024, 1024, bias=False), torch.randn(4096, 1024)), "time", device)
    flops, elements = 2 * 4096 * 1024 * 1024, 2 * 4096 * 1024 + 1024 * 1024
    low = max(flops / 312e12, 2 * elements / 2039e9)
    assert sum(found.ops.values()) == pytest.approx(flops / 19.5e12 - low)
    found = costs_of(traced(nn.Linear(1024, 1024, bias=False), torch.randn(1, 1024)), "time", device)
    assert sum(found.ops.values()) == pytest.approx(2 * (2 * 1024 + 1024 * 1024) / 2039e9)


@pytest.mark.parametrize(
    ("kind", "entry", "expected"),
    [("cuda", "h200", "h200"), ("mps", "m2", "m2"), ("cuda", None, "a100"), ("cpu", "spr", "a100")],
)
def test_the_default_device_is_the_gpu_here(
    monkeypatch: pytest.MonkeyPatch, kind: str, entry: str | None, expected: str
) -> None:
    host = Host("2", (HostDevice(kind, "x", None, (), entry), HostDevice("cpu", "y", None, (), "cpu")), {})
    monkeypatch.setattr(trials, "this_machine", lambda: host)
    assert default_device().id == expected
    model = traced(nn.Linear(4, 4), torch.randn(2, 4))
    assert costs_of(model, "time").device == default_device()
    assert costs_of(model, "bytes", device_named("cpu")).device is None


def test_a_device_without_rates_is_refused() -> None:
    model = traced(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(UsageError, match="no rates for cpu"):
        costs_of(model, "time", device_named("cpu"))
