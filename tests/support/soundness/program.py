"""Random programs as text: branches of a few lines, each with inputs and weights of its own.

A branch is Python that can be printed, run, traced and cut down line by line. Many branches are traced as
one model, since most of the time of a trace is its start.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

aten = torch.ops.aten


@contextlib.contextmanager
def torchs_own_kernels() -> Iterator[None]:
    """Without oneDNN, which crashes on some convolutions in 16 bits (one column, stride and dilation 2)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns about Intel's GPUs
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def normal(seed: int, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """Normal numbers of a seed, for the weights of a branch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + shift


def uniform(seed: int, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Uniform numbers of a seed."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * (high - low) + low


def whole(seed: int, *shape: int, low: int = 0, high: int = 2) -> torch.Tensor:
    """Whole numbers of a seed, ``high`` excluded."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


NAMESPACE: dict[str, Any] = {
    "torch": torch, "F": F, "aten": aten, "normal": normal, "uniform": uniform, "whole": whole,
}  # fmt: skip

# how an input of a shape lies in memory, from a dense tensor
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "expanded": lambda t: t[:1].expand(t.shape) if t.ndim and t.shape[0] else t,
    "sliced": lambda t: torch.stack([t, t], -1)[..., 1],
}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor with other strides; of an expanded one, only the first row counts."""
    return LAYOUTS[layout](tensor)


@dataclass(frozen=True)
class Input:
    """One input of a branch, and the range that is stated for it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float
    layout: str = "dense"

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Values within the range, in the dtype and the strides of the input."""
        values = values.double().clamp(self.low, self.high)
        if not self.dtype.is_floating_point:
            values = values.round()
        return laid_out(values.reshape(self.shape).to(self.dtype), self.layout)


@dataclass(frozen=True)
class Stored:
    """One parameter or buffer of a branch, or a plain tensor that its module holds."""

    name: str
    kind: str  # parameter, buffer or attribute
    text: str

    def tensor(self) -> torch.Tensor:
        """Its values, from its text."""
        made: torch.Tensor = eval(self.text, NAMESPACE)
        return made


@dataclass(frozen=True)
class Branch:
    """A small program: inputs, weights, and lines that each give a value a name or change one in place."""

    inputs: tuple[Input, ...]
    stored: tuple[Stored, ...]
    lines: tuple[str, ...]

    @property
    def made(self) -> list[str]:
        """Names of the values that its lines make."""
        return [match[1] for line in self.lines if (match := re.match(r"(v\d+) = ", line))]

    @property
    def source(self) -> str:
        """Its function: every value that no other line reads is returned."""
        read = {name for line in self.lines for name in names_in(line.split(" = ", 1)[-1])}
        results = [name for name in self.made if name not in read] or self.made[-1:]
        head = ", ".join(item.name for item in (*self.inputs, *self.stored))
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def branch({head}):\n{body}    return [{', '.join(results)}]\n"

    def __str__(self) -> str:
        given = [
            f"{i.name}: {i.layout} {str(i.dtype)[6:]} {list(i.shape)} in [{i.low!r}, {i.high!r}]"
            for i in self.inputs
        ]
        return "\n".join([*given, *(f"{s.name}: {s.kind} {s.text}" for s in self.stored), *self.lines])

    def function(self) -> Callable[..., Any]:
        """The branch, compiled."""
        scope = dict(NAMESPACE)
        exec(compile(self.source, "<branch>", "exec"), scope)
        function: Callable[..., Any] = scope["branch"]
        return function

    def pruned(self) -> Branch:
        """The same without inputs and weights that no line reads."""
        read = {name for line in self.lines for name in names_in(line)}
        inputs = tuple(i for i in self.inputs if i.name in read)
        stored = tuple(s for s in self.stored if s.name in read)
        return replace(self, inputs=inputs, stored=stored)

    def simpler(self) -> Iterator[Branch]:
        """Branches of one line fewer: the last is cut, or one whose readers take another value instead."""
        if len(self.lines) > 1:
            yield replace(self, lines=self.lines[:-1]).pruned()
        for index, line in enumerate(self.lines):
            rest = self.lines[:index] + self.lines[index + 1 :]
            match = re.match(r"(v\d+) = ", line)
            if not rest:
                continue
            if match is None:
                yield replace(self, lines=rest).pruned()
                continue
            for other in names_in(line[match.end() :]):
                swapped = tuple(re.sub(rf"\b{match[1]}\b", other, later) for later in rest)
                yield replace(self, lines=swapped).pruned()


def names_in(text: str) -> list[str]:
    """Names of values, inputs and weights in a text, once each, in order."""
    return list(dict.fromkeys(re.findall(r"\b[vxp]\d+\b", text)))


class BranchModel(nn.Module):
    """Branches side by side, as one model; its inputs are theirs, one after another."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = tuple(branches)
        self.functions = [branch.function() for branch in branches]
        self.failed: set[int] = set()  # branches that cannot be traced
        for index, branch in enumerate(branches):
            for item in branch.stored:
                self._hold(f"b{index}_{item.name}", item.kind, item.tensor())

    def _hold(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        if kind == "parameter" and tensor.is_floating_point():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        elif kind == "attribute":
            setattr(self, name, tensor)
        else:
            self.register_buffer(name, tensor)

    @property
    def inputs(self) -> list[Input]:
        """The inputs of all branches."""
        return [item for branch in self.branches for item in branch.inputs]

    def forward(self, *given: torch.Tensor) -> list[Any]:
        """What each branch returns."""
        remaining = iter(given)
        results = []
        for index, (branch, function) in enumerate(zip(self.branches, self.functions, strict=True)):
            own = [next(remaining) for _ in branch.inputs]
            weights = [getattr(self, f"b{index}_{item.name}") for item in branch.stored]
            try:
                results.append(function(*own, *weights))
            except Exception:  # the other branches can be traced all the same
                self.failed.add(index)
        return results
