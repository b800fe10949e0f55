"""Small models in which the most sensitive ops, taken one by one, are not the ones to keep in float32."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.tuning.graphs import Built, linears, small_graph, tokens
from tests.support.wrap import Wrap


@small_graph(2, 3)
def cancelling_branches() -> Built:
    """The difference of two close values: one of them in float32 alone gains 3 dB."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc2(torch.tanh((m.fc0(x) - m.fc1(x)) * 20.0))

    layers = linears(3)
    layers["fc1"] = copy.deepcopy(layers["fc0"])
    layers["fc1"].weight.data += 0.01 * torch.randn(32, 32)
    return Wrap(forward, **layers), (tokens(),)


@small_graph(2, 4)
def mean_of_large_values() -> Built:
    """Values far from zero, less their mean."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.fc0(x) + 30.0
        return m.fc1(h - h.mean(-1, keepdim=True))

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(2, 5)
def layer_norm_by_hand() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.fc0(x)
        centred = h - h.mean(-1, keepdim=True)
        return m.fc1(centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5))

    layers = linears(2)
    layers["fc0"].bias.data += 4.0
    return Wrap(forward, **layers), (tokens(),)


@small_graph(2, 3)
def exact_ops_in_a_row() -> Built:
    """A negation, a doubling and an absolute value round nothing: keeping one of them helps nobody."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.abs(torch.neg(m.fc0(x)) * 2.0) + m.fc1(x)

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(2, 7)
def long_exact_chain() -> Built:
    """A float32 result reaches the output only if all ops after it are in float32."""

    def forward(m: Any, x: Tensor) -> Tensor:
        large = torch.neg(torch.neg(m.fc0(x) * 0.5)) * 16.0
        return torch.neg(large) + torch.tanh(m.fc1(x))

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(2, 4)
def diamond() -> Built:
    """One value has four readers; casting it down hurts one of them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.fc0(x)
        return torch.tanh(h) * torch.sigmoid(h) + m.fc1(h) * 0.05 + (h * 4.0)

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(1, 3)
def one_reader_needs_it() -> Built:
    """A large value feeds a sine, which needs its last digits, and a layer that does not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        phase = m.fc0(x) * 20.0
        return torch.sin(phase) + m.fc1(torch.tanh(phase))

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(1, 3)
def long_sum() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights = F.softplus(m.fc0(x))
        total = (weights * x.abs()).sum(-1)
        return total / weights.sum(-1)

    return Wrap(forward, fc0=nn.Linear(512, 512)), (torch.randn(8, 12, 512),)


@small_graph(1, 4)
def large_logits() -> Built:
    """A softmax of logits near 60: an error of a sixteenth is one of six percent."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.fc0(x) @ m.fc1(x).transpose(-1, -2)
        return m.fc3(torch.softmax(scores, -1) @ m.fc2(x))

    return Wrap(forward, **linears(4, gain=2.5)), (tokens(scale=1.5),)


@small_graph(2, 4)
def softmax_by_hand() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        logits = m.fc0(x)
        grown = torch.exp(logits - logits.amax(-1, keepdim=True))
        return m.fc1(grown / grown.sum(-1, keepdim=True)) + m.fc1.bias

    return Wrap(forward, **linears(2, gain=6.0)), (tokens(),)


@small_graph(2, 5)
def contrastive() -> Built:
    """CLIP's cosines times a temperature of 100."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = m.fc0(x), m.fc1(y)
        a = a / torch.linalg.vector_norm(a, dim=-1, keepdim=True)
        b = b / torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        return torch.softmax(a @ b.t() * 100.0, -1)

    return Wrap(forward, **linears(2)), (torch.randn(24, 32), torch.randn(24, 32))


@small_graph(3, 5)
def overflowing_square() -> Built:
    """A sum of squares that leaves float16, and its root that does not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.fc0(x) * 40.0
        length = torch.sqrt((h * h).sum(-1, keepdim=True))
        return m.fc1(h / length)

    return Wrap(forward, **linears(2, gain=2.0)), (tokens(scale=3.0),)


@small_graph(2, 4)
def overflowing_layer() -> Built:
    """T5's second feed-forward product: its output leaves float16 before a norm brings it back."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc2(m.norm(m.fc1(F.relu(m.fc0(x)) * 300.0) * 30.0))

    return Wrap(forward, **linears(3, gain=3.0), norm=nn.LayerNorm(32)), (tokens(scale=3.0),)


@small_graph(2, 5)
def common_factor() -> Built:
    """A few numbers multiply everything: their errors do not average out."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scale = torch.exp(m.gate(x.mean((1, 2), keepdim=True)) * 2.0)
        return m.fc1(torch.tanh(m.fc0(x))) * scale

    return Wrap(forward, **linears(2), gate=nn.Linear(1, 1)), (torch.randn(6, 24, 32) + 1.0,)


@small_graph(2, 4)
def opposite_errors() -> Built:
    """The error of one value reaches the output twice, with opposite signs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.fc0(x) * 8.0
        return m.fc1(h * 1.01 - h) + torch.tanh(h)

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(3, 6)
def repeated_addition() -> Built:
    """The same small number is added again and again: every step rounds the same way."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.fc0(x)
        for _ in range(6):
            y = y + 0.03
        return y * m.fc1(x)

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(2, 5)
def horner() -> Built:
    """A polynomial whose terms cancel near its root."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.fc0(x)) * 0.1 + 0.9
        y = x - 3.0
        for coefficient in (3.0, -1.0):
            y = y * x + coefficient
        return m.fc1(y * 50.0)

    return Wrap(forward, **linears(2)), (tokens(),)


@small_graph(3, 8)
def wide_parallel() -> Built:
    """Branches of equal weight: almost every op is needed as much as another."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a, b, c = (torch.tanh(m.get_submodule(f"fc{i}")(x)) for i in range(3))
        return torch.cat([a + b, b * c, m.fc3(c)], -1)

    return Wrap(forward, **linears(4)), (tokens(),)
