"""Makes random inputs from descriptions such as ``8x3x32x32`` and ``ids=2x77:int64@49408``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ampaudit.core.errors import UsageError
from ampaudit.core.text import format_number
from ampaudit.core.untrusted import describe
from ampaudit.report.inputs import InputsInfo
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch

__all__ = ["InputDescription", "described_batches", "read_description"]

_HINT = "write SIZES, NAME=SIZES or NAME=SIZES:DTYPE@RANGE, such as 8x3x32x32 or ids=2x77:int64@49408"
_SIZES = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*", re.ASCII)
_MOST_BYTES = 1 << 33
_NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}


@dataclass(frozen=True, slots=True)
class InputDescription:
    """One input.

    Attributes:
        name: of the argument; empty for the next positional one.
        sizes: of the tensor.
        dtype: of the tensor.
        low: least value; ``None`` for numbers of a normal distribution, or any booleans.
        high: greatest value of floats; the first that integers do not reach.
    """

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None

    def made(self) -> torch.Tensor:
        """Return a random tensor."""
        if self.dtype is torch.bool:
            return torch.rand(self.sizes) < 0.5
        if self.low is None or self.high is None:
            return torch.randn(self.sizes, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return torch.randint(int(self.low), int(self.high), self.sizes, dtype=self.dtype)
        drawn = torch.rand(self.sizes, dtype=torch.float64) * (self.high - self.low) + self.low
        return drawn.to(self.dtype)

    def in_words(self, number: int) -> str:
        """Return its name, sizes and values, for a report."""
        dtype = str(self.dtype).removeprefix("torch.")
        values = "normally distributed" if self.dtype is not torch.bool else "true or false"
        if self.low is not None and self.high is not None:
            values = f"{format_number(self.low)} to {format_number(self.high)}"
            if not self.dtype.is_floating_point:
                values = f"{self.low:,} to {self.high - 1:,}"
        return f"{self.name or f'input[{number}]'} {'x'.join(map(str, self.sizes))} {dtype}, {values}"


def described_batches(given: Sequence[str], count: int, seed: int) -> tuple[tuple[Batch, ...], InputsInfo]:
    """Return random batches, and what they are made of.

    Args:
        given: the descriptions, of positional arguments in order.
        count: the number of batches.
        seed: of their random numbers.

    Raises:
        UsageError: a description cannot be read, or a name occurs twice.
    """
    described = [read_description(text) for text in given]
    names = [each.name for each in described if each.name]
    if len(names) > len(set(names)):
        raise UsageError("--input: a name is given twice", hint="describe each input once")
    torch.manual_seed(seed + INPUT_SEED_OFFSET)
    batches = []
    for _ in range(count):
        tensors = [each.made() for each in described]
        pairs = list(zip(described, tensors, strict=True))
        batches.append(
            Batch(
                tuple(tensor for each, tensor in pairs if not each.name),
                {each.name: tensor for each, tensor in pairs if each.name},
            )
        )
    words = "; ".join(each.in_words(number) for number, each in enumerate(described))
    return tuple(batches), InputsInfo("random", words)


def read_description(text: str) -> InputDescription:
    """Read ``[NAME=]SIZES[:DTYPE][@RANGE]``.

    Raises:
        UsageError: it is none.
    """
    name, equals, rest = text.rpartition("=")
    shape, ranged, span = rest.partition("@")
    sizes, _, named = shape.partition(":")
    dtype = _DTYPES.get(named or "float32")
    if (equals and not name.isidentifier()) or not _SIZES.fullmatch(sizes):
        raise _unreadable(text)
    if dtype is None:
        hint = f"one of: {', '.join(_NAMES)}"
        raise UsageError(f"--input {describe(text)}: unknown dtype {describe(named)}", hint=hint)
    found = tuple(map(int, sizes.split("x")))
    if math.prod(found) * dtype.itemsize > _MOST_BYTES:
        raise _unreadable(text, "more than 8 GB")
    if not ranged:
        if dtype is not torch.bool and not dtype.is_floating_point:
            hint = f"say how far: {describe(text)}@1000 for 0 to 999"
            raise UsageError(f"--input {describe(text)}: integers need a range", hint=hint)
        return InputDescription(name, found, dtype)
    low, high = _range(text, span, dtype)
    return InputDescription(name, found, dtype, low, high)


def _range(text: str, span: str, dtype: torch.dtype) -> tuple[float, float]:
    """Read ``COUNT`` of integers, or ``LOW:HIGH``."""
    first, colon, second = span.partition(":")
    is_float = dtype.is_floating_point
    number = float if is_float else int
    if is_float and not colon:
        raise _unreadable(text, "the range of floats is LOW:HIGH")
    try:
        low, high = (number(first), number(second)) if colon else (0, int(first))
    except ValueError:
        raise _unreadable(text) from None
    if dtype is torch.bool:
        raise _unreadable(text, "booleans have no range")
    limits = torch.finfo(dtype) if is_float else torch.iinfo(dtype)
    if not limits.min <= low < high <= limits.max:
        raise _unreadable(text, "the range is empty, or ends beyond the dtype")
    return low, high


def _unreadable(text: str, why: str = "cannot be read") -> UsageError:
    return UsageError(f"--input {describe(text)}: {why}", hint=_HINT)
