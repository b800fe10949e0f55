"""What a silent failure is, and where its culprit stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Silent:
    """One failure.

    Attributes:
        name: of the function that builds it.
        policy: the policy under which it fails.
        dtype: the format.
        codes: the finding's code, one of these.
        build: ``build(True)`` is the failing model with its inputs, ``build(False)`` its twin.
    """

    name: str
    policy: str
    dtype: str
    codes: tuple[str, ...]
    build: Callable[[bool], Built]


CASES: dict[str, Silent] = {}


def silent(
    policy: str, dtype: str, codes: str
) -> Callable[[Callable[[bool], Built]], Callable[[bool], Built]]:
    """Register a case under its function's name."""

    def register(build: Callable[[bool], Built]) -> Callable[[bool], Built]:
        name = build.__name__
        assert name not in CASES, name
        CASES[name] = Silent(name, policy, dtype, tuple(codes.split()), build)
        return build

    return register


def culprit_lines(case: Silent) -> set[int]:
    """Line numbers of the marked lines."""
    lines, first = inspect.getsourcelines(case.build)
    return {first + index for index, line in enumerate(lines) if line.rstrip().endswith("# culprit")}


class Net(nn.Module):
    """Named layers, buffers, and a function of them."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                self.register_buffer(name, member)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)
