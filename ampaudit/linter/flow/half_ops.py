"""Checks of single ops whose input is in 16 bits."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.values import Tensor, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "check_half_exp",
    "check_half_fft",
    "check_half_kernel",
    "check_half_sum",
    "check_log_probabilities",
    "check_rounded_angles",
    "check_rounded_timesteps",
    "check_same_dtype",
    "rounds_positions",
]


def check_half_exp(interpreter: Interpreter, node: ast.Call, value: Value) -> bool:
    """Report an exponential of unbounded values in float16; return whether it is one."""
    if not isinstance(value, Tensor) or value.cast != "float16" or interpreter.autocast.enabled is not False:
        return False
    method = node.func.value if isinstance(node.func, ast.Attribute) and not node.args else None
    is_bounded = _BOUNDED.search(ast.unparse(method or node.args[0])) is not None
    if not is_bounded:
        interpreter.report(
            "AMP868",
            node,
            "exp of more than 11 overflows in float16, the dtype of these values, which autocast would cast",
            "compute it from float32 values: write .float() first, or use log_softmax or cross_entropy",
            certainty=Certainty.LIKELY,
        )
    return not is_bounded


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
    r"freq|posit|\bpos\b|pos_|time_?step|\btimes?\b|^t$|sigma|theta|omega|angle|\bmz\b|coord"
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


def check_rounded_timesteps(interpreter: Interpreter, value: Value) -> None:
    """Report times in 16 bits that are passed to a model, which takes sines and cosines of them."""
    cast = value.rounded if isinstance(value, Tensor) else None
    is_cast = isinstance(cast, ast.Call) and _TIMES.search(ast.unparse(cast.func).lower()) is not None
    if is_cast and interpreter.linked.mentions(r"\.backward\("):
        check_rounded_angles(interpreter, value)


_TIMES: Final = re.compile(r"time_?step|\btimes?\b|sigma")


def check_half_sum(interpreter: Interpreter, node: ast.Call, value: Value) -> None:
    """Check that no sum of float16 values is computed outside autocast, which would compute it in float32."""
    if isinstance(value, Tensor) and value.cast == "float16" and interpreter.autocast.enabled is False:
        interpreter.report(
            "AMP873",
            node,
            "these values are float16 under autocast, and so is their sum outside: above 65504 it is inf",
            "compute it inside the autocast block, or from values.float()",
            certainty=Certainty.LIKELY,
        )


def check_log_probabilities(interpreter: Interpreter, node: ast.Call, value: Value) -> None:
    """Check that no log-probabilities are computed from the output of a model whose weights are 16-bit."""
    dtype = value.weights_dtype if isinstance(value, Tensor) else ""
    is_off = interpreter.autocast.enabled is False or not interpreter.linked.mentions("autocast")
    if dtype and is_off and interpreter.linked.mentions(r"\.backward\("):
        bits = 8 if dtype == "bfloat16" else 11
        interpreter.report(
            "AMP872",
            node,
            f"the model computes in {dtype}, and so does this outside autocast: log-probabilities have {bits}"
            " significant bits, too few for a ratio or a difference of them",
            "write logits.float() first",
            certainty=Certainty.LIKELY,
        )


def check_same_dtype(interpreter: Interpreter, node: ast.AST, what: str, values: Sequence[Value]) -> None:
    """Check that an op that converts nothing is not given a 16-bit and a float32 tensor."""
    dtypes = [value.dtype for value in values if isinstance(value, Tensor) and value.dtype]
    casts = [dtype for dtype in dtypes if dtype in ("float16", "bfloat16")]
    if casts and "float32" in dtypes:
        interpreter.report(
            "AMP874",
            node,
            f"{what} takes tensors of one dtype and raises, as one is {casts[0]} by autocast and the other "
            "float32",
            "cast one to the dtype of the other, as in x.to(y.dtype)",
        )
