"""Checks of single ops whose input is in 16 bits."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.values import Tensor, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_half_exp", "check_half_kernel"]


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
