"""Checks of single ops whose input is in 16 bits."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.values import Tensor, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "check_half_exp",
    "check_half_fft",
    "check_half_kernel",
    "check_rounded_angles",
    "rounds_positions",
]


def check_half_exp(interpreter: Interpreter, node: ast.Call, value: Value) -> None:
    """Check that no exponential of values without a known bound is computed in float16."""
    if not isinstance(value, Tensor) or value.cast != "float16" or interpreter.autocast.enabled is not False:
        return
    method = node.func.value if isinstance(node.func, ast.Attribute) and not node.args else None
    if not _BOUNDED.search(ast.unparse(method or node.args[0])):
        interpreter.report(
            "AMP868",
            node,
            "exp of more than 11 overflows in float16, the dtype of these values, which autocast would cast",
            "compute it from float32 values: write .float() first, or use log_softmax or cross_entropy",
            certainty=Certainty.LIKELY,
        )


# negative, shifted by the maximum, or the logarithm of a variance
_BOUNDED: Final = re.compile(r"^-|^\(-|max|clamp|clip|sigmoid|tanh|var|std|sigma")


def check_half_kernel(interpreter: Interpreter, node: ast.Call, path: str, value: Value | None) -> None:
    """Check an op that has no 16-bit kernel."""
    # autocast on the CPU computes these in float32
    cast_here = interpreter.autocast.enabled is not False and interpreter.autocast.device == "cpu"
    if isinstance(value, Tensor) and value.cast and not cast_here:
        interpreter.report(
            "AMP846",
            node,
            f"{path} has no {value.cast} kernel, and its input is {value.cast} under autocast",
            "compute it from float32 inputs under 'with torch.autocast(device_type, enabled=False):'",
        )


def check_half_fft(interpreter: Interpreter, node: ast.Call, path: str, value: Value | None) -> None:
    """Check a Fourier transform; cuFFT takes no bfloat16, and float16 only in sizes that are powers of 2."""
    cast = value.cast if isinstance(value, Tensor) else ""
    if cast in ("float16", "bfloat16") and interpreter.autocast.device != "cpu":
        refused = "any bfloat16 input" if cast == "bfloat16" else "a size that is no power of two in float16"
        interpreter.report(
            "AMP846",
            node,
            f"{path} refuses {refused}, and its input is {cast} under autocast, which does not cast it",
            "transform x.float(), under 'with torch.autocast(device_type, enabled=False):'",
            certainty=Certainty.KNOWN if cast == "bfloat16" else Certainty.LIKELY,
        )


def rounds_positions(*operands: ast.AST) -> bool:
    """Return whether values that are cast to 16 bits are, by their names, positions, times or frequencies."""
    return any(_POSITIONS.search(ast.unparse(operand).lower()) for operand in operands)


_POSITIONS: Final = re.compile(
    r"freq|posit|\bpos\b|pos_|time_?step|\btimes?\b|^t$|theta|omega|angle|\bmz\b|coord"
)


def check_rounded_angles(interpreter: Interpreter, value: Value) -> None:
    """Check that sines and cosines are not those of positions that were rounded to 16 bits."""
    if isinstance(value, Tensor) and value.rounded is not None:
        interpreter.report(
            "AMP869",
            value.rounded,
            "positions or times are rounded to 16 bits here, to 8 significant bits in bfloat16 and 11 in "
            "float16: the sines and cosines of neighbors become equal",
            "compute them in float32 under 'with torch.autocast(device_type, enabled=False):', then cast",
            certainty=Certainty.LIKELY,
        )
