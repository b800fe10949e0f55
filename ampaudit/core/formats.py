"""Defines the number formats and their limits.

Sources: IEEE 754-2019 for float16 and float32; the bfloat16 layout of 1+8+7 bits; the OCP "8-bit
Floating Point Specification" 1.0 for the two 8-bit formats (E4M3 has no infinity: overflow is NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ampaudit.core.errors import UsageError

if TYPE_CHECKING:
    import torch

    Dtype: TypeAlias = str | torch.dtype
else:
    Dtype = str


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point format."""

    name: str  # of the torch dtype
    fraction_bits: int  # explicit bits of the significand
    min_exponent: int  # exponent of the smallest normal number, which is 2**min_exponent
    max: float  # largest finite value
    has_inf: bool = True  # whether overflow gives infinity (otherwise NaN)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number: ``2**-fraction_bits``."""
        return math.ldexp(1.0, -self.fraction_bits)

    @property
    def min_normal(self) -> float:
        """Smallest number with full precision: ``2**min_exponent``."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number: ``2**(min_exponent - fraction_bits)``."""
        return math.ldexp(1.0, self.min_exponent - self.fraction_bits)

    @property
    def overflow_at(self) -> float:
        """Smallest magnitude that rounds to infinity: max plus half an ulp."""
        _, exponent = math.frexp(self.max)
        return self.max + math.ldexp(1.0, exponent - self.fraction_bits - 2)

    @property
    def flush_below(self) -> float:
        """Largest magnitude that rounds to zero: half of the smallest subnormal (ties go to even, zero)."""
        return self.min_subnormal / 2

    def headroom_bits(self, peak: float) -> float:
        """Return log2(max / peak): how often the peak can double before it overflows."""
        if peak == 0.0:
            return math.inf
        return math.log2(self.max / peak) if math.isfinite(peak) else -math.inf


FLOAT32 = NumberFormat("float32", 23, -126, (2 - 2.0**-23) * 2.0**127)
FLOAT16 = NumberFormat("float16", 10, -14, 65504.0)
BFLOAT16 = NumberFormat("bfloat16", 7, -126, (2 - 2.0**-7) * 2.0**127)
FLOAT8_E4M3FN = NumberFormat("float8_e4m3fn", 3, -6, 448.0, has_inf=False)
FLOAT8_E5M2 = NumberFormat("float8_e5m2", 2, -14, 57344.0)

WHAT_IF_FORMATS = (FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2)
FORMATS = {f.name: f for f in (FLOAT32, *WHAT_IF_FORMATS)}
LOW_PRECISION_FORMATS = (FLOAT16, BFLOAT16)
LOW_PRECISION_NAMES = tuple(f.name for f in LOW_PRECISION_FORMATS)
# lowest accuracy of an output, in dB, that rounding alone explains
ROUNDING_DB = {"float16": 40.0, "bfloat16": 25.0}
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def format_named(name: str) -> NumberFormat:
    """Return a format by name; short forms (fp16, half, bf16, fp32) are accepted.

    Raises:
        UsageError: The name is unknown.
    """
    full = _SHORT.get(name, name)
    if full not in FORMATS:
        raise _unknown(name, FORMATS)
    return FORMATS[full]


def _unknown(name: str, known: Iterable[str]) -> UsageError:
    from ampaudit.core.untrusted import describe  # here, as it imports pydantic

    return UsageError(f"unknown dtype {describe(name)!r}", hint=f"one of: {', '.join(known)}")


def name_of_dtype(dtype: Any) -> Any:
    """Return the name of a torch dtype without importing torch; return other values unchanged."""
    kind = type(dtype)
    is_dtype = (kind.__module__, kind.__name__) == ("torch", "dtype")
    return str(dtype).removeprefix("torch.") if is_dtype else dtype


def low_precision_format(dtype: Dtype) -> NumberFormat:
    """Return the 16-bit format of a name or a torch dtype.

    Raises:
        UsageError: The format is unknown or not a 16-bit format.
    """
    name = name_of_dtype(dtype)
    hint = f"one of: {', '.join(LOW_PRECISION_NAMES)}"
    if not isinstance(name, str):
        raise UsageError(f"dtype is of type {type(dtype).__name__}", hint=hint)
    if _SHORT.get(name, name) not in FORMATS:
        raise _unknown(name, LOW_PRECISION_NAMES)
    form = format_named(name)
    if form not in LOW_PRECISION_FORMATS:
        raise UsageError(f"--dtype {name}: not a 16-bit format", hint=hint)
    return form
