"""What a reported failure is: a model, its healthy twin, where it breaks and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]
# policy and format, by the names that cases use
COMBINATIONS = {
    "half16": ("half", "float16"),
    "cuda16": ("torch-cuda", "float16"),
    "halfbf": ("half", "bfloat16"),
    "cudabf": ("torch-cuda", "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One failure.

    Attributes:
        name: a few words.
        source: where it was reported, or the paper that describes it.
        layer: the layer that must be named.
        codes: the finding's code, one of these.
        breaks: the combinations under which it shows.
        wrong: the combinations under which all is finite, and the output is wrong.
        build: ``build(True)`` is the failing model with its inputs, ``build(False)`` the healthy twin.
    """

    name: str
    source: str
    layer: str
    codes: tuple[str, ...]
    breaks: tuple[str, ...]
    wrong: tuple[str, ...]
    build: Callable[[bool], Built]


CASES: dict[str, Case] = {}


def failure(
    source: str, layer: str, codes: str, breaks: str, wrong: str = ""
) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    """Register a case under its function's name."""

    def register(build: Callable[[bool], Built]) -> Callable[[bool], Built]:
        name = build.__name__
        assert name not in CASES, name
        assert {*breaks.split(), *wrong.split()} <= set(COMBINATIONS), name
        shows = tuple(breaks.split()), tuple(wrong.split())
        CASES[name] = Case(name, source, layer, tuple(codes.split()), *shows, build)
        return build

    return register


class Net(nn.Module):
    """Named layers and a function of them."""

    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)
            else:
                self.register_buffer(name, layer)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def linear(inner: int, outer: int, gain: float = 1.0, shift: float = 0.0) -> nn.Linear:
    """A linear layer with ``gain`` times the usual weights, and a constant bias."""
    layer = nn.Linear(inner, outer)
    with torch.no_grad():
        layer.weight.mul_(gain)
        layer.bias.fill_(shift)
    return layer
