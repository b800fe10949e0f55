"""Small models of usual shapes, each with at most 14 ops that may be in 16 bits or in float32.

``needs`` are two numbers of float32 ops: a test asks for the accuracy that so many reach and fewer do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.wrap import Wrap

Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class SmallGraph:
    """How to build a model and its inputs, and how many float32 ops its two targets need."""

    name: str
    build: Callable[[], Built]
    needs: tuple[int, int]

    def made(self) -> Built:
        torch.manual_seed(sum(map(ord, self.name)))
        model, inputs = self.build()
        return model.eval(), inputs


GRAPHS: dict[str, SmallGraph] = {}


def small_graph(first: int, second: int) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register a graph whose targets need so many float32 ops."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        GRAPHS[build.__name__] = SmallGraph(build.__name__, build, (first, second))
        return build

    return register


def linears(count: int, size: int = 32, gain: float = 1.0) -> dict[str, nn.Module]:
    layers = {f"fc{i}": nn.Linear(size, size) for i in range(count)}
    for layer in layers.values():
        layer.weight.data.mul_(gain)
    return dict(layers)


def tokens(size: int = 32, scale: float = 1.0) -> Tensor:
    return torch.randn(4, 12, size) * scale


@small_graph(1, 3)
def mlp() -> Built:
    parts = (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return nn.Sequential(*parts), (torch.randn(24, 32),)


@small_graph(2, 6)
def deep_mlp() -> Built:
    parts = [part for layer in linears(6, gain=1.5).values() for part in (layer, nn.Tanh())]
    return nn.Sequential(*parts), (tokens(),)


@small_graph(1, 4)
def growing_stream() -> Built:
    """Each layer writes more into the residual stream than the one before."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for i in range(3):
            x = x + torch.tanh(m.get_submodule(f"fc{i}")(x)) * 3.0**i
        return x

    return Wrap(forward, **linears(3)), (tokens(),)


@small_graph(2, 5)
def pre_norm_blocks() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        for i in range(2):
            h = m.get_submodule(f"norm{i}")(x)
            x = x + m.get_submodule(f"fc{2 * i + 1}")(F.gelu(m.get_submodule(f"fc{2 * i}")(h)))
        return m.head(m.norm(x))

    norms = {f"norm{i}": nn.LayerNorm(32) for i in range(2)}
    parts = {**norms, "norm": nn.LayerNorm(32), "head": nn.Linear(32, 16)}
    return Wrap(forward, **linears(4, gain=2.0), **parts), (tokens(),)


@small_graph(2, 4)
def post_norm_block() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm0(x + m.fc1(F.relu(m.fc0(x))))
        return m.norm1(x + m.fc3(F.silu(m.fc2(x))))

    return Wrap(forward, **linears(4), norm0=nn.LayerNorm(32), norm1=nn.LayerNorm(32)), (tokens(),)


@small_graph(2, 6)
def rms_norm_by_hand() -> Built:
    """The square, mean and root of T5 and LLaMA, and a gated feed-forward layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = h * m.norm.weight
        return x + m.fc2(F.silu(m.fc0(h)) * m.fc1(h))

    return Wrap(forward, **linears(3, gain=1.5), norm=nn.LayerNorm(32, bias=False)), (tokens(scale=5.0),)


@small_graph(1, 4)
def attention_by_hand() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.fc0(x), m.fc1(x), m.fc2(x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(32)
        return x + m.fc3(torch.softmax(scores, -1) @ v)

    return Wrap(forward, **linears(4, gain=2.0)), (tokens(scale=2.0),)


@small_graph(1, 3)
def fused_attention() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(4, 12, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + m.out(mixed.transpose(1, 2).reshape(4, 12, 32))

    return Wrap(forward, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32)), (tokens(),)


@small_graph(1, 4)
def conv_net() -> Built:
    parts = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    more = (nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    model = nn.Sequential(*parts, *more, nn.Flatten(), nn.Linear(64, 10))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + (0.5 if "var" in name else -0.5))
    return model, (torch.randn(4, 3, 16, 16),)


@small_graph(2, 5)
def residual_conv_net() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.norm0(m.stem(x)))
        x = x + m.norm2(m.conv2(F.relu(m.norm1(m.conv1(x)))))
        return m.head(F.relu(x).mean((2, 3)))

    convs = {f"conv{i}": nn.Conv2d(8, 8, 3, padding=1, bias=False) for i in (1, 2)}
    norms = {f"norm{i}": nn.BatchNorm2d(8) for i in range(3)}
    parts = {"stem": nn.Conv2d(3, 8, 3, padding=1), "head": nn.Linear(8, 10), **convs, **norms}
    return Wrap(forward, **parts), (torch.randn(4, 3, 12, 12),)


@small_graph(1, 4)
def depthwise_conv() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.depth(x).transpose(1, 2))
        return x + (m.scale(F.gelu(m.up(h)))).transpose(1, 2)

    depth = nn.Conv1d(16, 16, 7, padding=3, groups=16)
    parts = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 64), "scale": nn.Linear(64, 16)}
    return Wrap(forward, depth=depth, **parts), (torch.randn(4, 16, 24),)


@small_graph(1, 4)
def embeddings() -> Built:
    def forward(m: Any, words: Tensor, places: Tensor) -> Tensor:
        x = m.norm(m.words(words) + m.places(places))
        return m.fc1(F.gelu(m.fc0(x)))

    tables = {"words": nn.Embedding(100, 32), "places": nn.Embedding(12, 32)}
    words, places = torch.randint(100, (4, 12)), torch.arange(12).expand(4, 12)
    return Wrap(forward, **tables, norm=nn.LayerNorm(32), **linears(2)), (words, places)


@small_graph(2, 4)
def tied_embedding() -> Built:
    """One table is read as words and as the weight of the last product."""

    def forward(m: Any, words: Tensor) -> Tensor:
        x = m.words(words)
        return F.linear(m.norm(x + m.fc0(x)), m.words.weight)

    return Wrap(forward, words=nn.Embedding(60, 32), norm=nn.LayerNorm(32), **linears(1)), (
        torch.randint(60, (4, 12)),
    )


@small_graph(2, 4)
def shared_layer() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(m.fc0(x))
        return x

    return Wrap(forward, **linears(1, gain=2.0)), (tokens(),)


@small_graph(2, 4)
def two_outputs() -> Built:
    """Each output has to be accurate, and one is small."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(m.fc0(x))
        return m.fc1(h), torch.sigmoid(m.fc2(h).mean(-1) * 0.1) - 0.49

    return Wrap(forward, **linears(3)), (tokens(),)


@small_graph(2, 5)
def recurrent_cell() -> Built:
    def forward(m: Any, x: Tensor, h: Tensor) -> Tensor:
        for i in range(2):
            h = h * torch.sigmoid(m.fc0(h)) + torch.tanh(m.fc1(x[:, i]))
        return h

    return Wrap(forward, **linears(2)), (torch.randn(16, 2, 32), torch.randn(16, 32))


@small_graph(2, 4)
def gated_linear_unit() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        value, gate = m.fc0(x).chunk(2, -1)
        return m.out(value * torch.sigmoid(gate)) + m.skip(x)

    parts = {"out": nn.Linear(16, 8), "skip": nn.Linear(32, 8)}
    return Wrap(forward, **linears(1, gain=3.0), **parts), (tokens(),)


@small_graph(1, 3)
def log_probabilities() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.log_softmax(m.fc1(F.gelu(m.fc0(x))), -1)

    return Wrap(forward, **linears(2, gain=3.0)), (tokens(),)


USUAL = tuple(GRAPHS)
