"""Interprets operations on tensors and gradients: their loss scale, their 16-bit dtype, their graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.events import NumberRead
from ampaudit.linter.flow.gradient_uses import gradient_norm
from ampaudit.linter.flow.gradients import backward
from ampaudit.linter.flow.torch_names import (
    AUTOCAST_FLOAT32,
    DTYPES,
    KEEPS_DTYPE,
    LOG_PROBABILITIES,
    WRITES_SAME_DTYPE,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    ImportedName,
    LiteralValue,
    LossGradients,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = [
    "ON_ANY_TENSOR",
    "all_model_calls",
    "autocast_dtype",
    "check_half_exp",
    "check_half_fft",
    "check_half_kernel",
    "check_half_sum",
    "check_log_probabilities",
    "check_rounded_angles",
    "check_rounded_timesteps",
    "check_same_dtype",
    "combine",
    "common_scale",
    "dtype_named",
    "dtype_of_result",
    "first_rounded",
    "matrix_product",
    "outer_product",
    "requested_dtype",
    "tensor_method",
]


# methods that nothing but a tensor has, or that do no harm to what else has them
ON_ANY_TENSOR: Final = frozenset(
    {"float", "half", "bfloat16", "sigmoid", "matmul", "mm", "bmm", "masked_fill"}
)


def dtype_named(value: Value) -> str:
    """Return the dtype that a value names, such as ``float16`` for ``torch.half``; empty for other values."""
    return DTYPES.get(value.path, "") if isinstance(value, ImportedName) else ""


def autocast_dtype(interpreter: Interpreter) -> str:
    """Return the dtype in which autocast computes matrix products here; empty if that is not certain."""
    autocast = interpreter.autocast
    if autocast.enabled is not True:
        return ""
    default = _DEFAULT_DTYPES.get(autocast.device or "") if autocast.dtype == "" else None
    return autocast.dtype or default or "16-bit"


_DEFAULT_DTYPES: Final = {"cuda": "float16", "cpu": "bfloat16"}


def matrix_product(interpreter: Interpreter, node: ast.AST, values: list[Value]) -> Value:
    """Interpret a matrix product, which autocast computes in 16 bits whatever its operands are."""
    cast = autocast_dtype(interpreter)
    for value in values:
        if isinstance(value, Tensor) and value.upcast is not None and cast:
            interpreter.report(
                "AMP845",
                value.upcast,
                f"autocast casts this float32 tensor back to {cast} at line {line_of(node)}",
                "compute what needs float32 under 'with torch.autocast(device_type, enabled=False):'",
            )
    roots = all_model_calls(values)
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else getattr(node, "args", [])
    dtypes = [value.dtype for value in values if isinstance(value, Tensor)]
    implied = "" if "float32" in dtypes else next(iter(interpreter.weights[-1:]), "")
    rounded = node if (cast or implied) and rounds_positions(*operands) else first_rounded(values)
    if interpreter.autocast.enabled is False and len(values) > 1:
        cast = _dtype_of_pair(*values[:2])
    return Tensor(
        dtype=cast,
        computed_under=cast,
        model_calls=roots,
        scaler_key=_scale_of_product(values),
        rounded=rounded,
        node=node,
    )


def outer_product(interpreter: Interpreter, node: ast.Call, values: list[Value]) -> Value:
    """Interpret an ``einsum`` that sums nothing: autocast leaves its dtype alone, 16-bit buffers do not."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    implied = next(iter(interpreter.weights[-1:]), "") if all(v.dtype != "float32" for v in tensors) else ""
    rounded = node if implied and rounds_positions(*node.args) else first_rounded(tensors)
    return Tensor(model_calls=all_model_calls(tensors), rounded=rounded, node=node)


def first_rounded(values: Sequence[Value]) -> ast.AST | None:
    """Return where positions that any of some values is computed from were rounded."""
    return next((v.rounded for v in values if isinstance(v, Tensor) and v.rounded is not None), None)


def all_model_calls(values: Sequence[Value]) -> frozenset[str] | None:
    """Return the model calls that any of some values depends on; ``None`` if one is unknown."""
    calls: frozenset[str] = frozenset()
    for value in values:
        if isinstance(value, LiteralValue):
            continue
        if not isinstance(value, Tensor) or value.model_calls is None:
            return None
        calls |= value.model_calls
    return calls


def _scale_of_product(values: list[Value]) -> str:
    kinds = {value.scaler_key for value in values if isinstance(value, Tensor | LossGradients)} - {UNSCALED}
    return MAYBE if len(kinds) > 1 else next(iter(kinds), UNSCALED)


def _check_summed(interpreter: Interpreter, node: ast.BinOp, values: Sequence[Value]) -> None:
    """Record a scaled loss without a graph that is added to others, which only a report can use."""
    for value in values if isinstance(node.op, ast.Add) else ():
        if isinstance(value, Tensor) and value.is_detached and value.scaler_key not in (UNSCALED, MAYBE):
            interpreter.record(NumberRead(interpreter.at(node), value))


def combine(node: ast.BinOp, left: Value, right: Value, interpreter: Interpreter) -> Value:
    """Interpret a sum, difference, product, quotient or power of two values."""
    gradients = [value for value in (left, right) if isinstance(value, LossGradients)]
    if gradients:
        if isinstance(node.op, ast.Pow):
            return gradient_norm(interpreter, node, gradients[0])
        # a factor that is not known may be the inverse of the scale; a tensor is none
        is_known = all(isinstance(value, Tensor | LossGradients | LiteralValue) for value in (left, right))
        scaled = gradients[0].scaler_key
        return replace(gradients[0], scaler_key=scaled if is_known or scaled == UNSCALED else MAYBE)
    _check_summed(interpreter, node, (left, right))
    tensors = [value for value in (left, right) if isinstance(value, Tensor) and value is not UNSCALED_TENSOR]
    if not tensors:
        return UNSCALED_TENSOR if isinstance(left, Tensor) or isinstance(right, Tensor) else UNKNOWN
    first = tensors[0]
    if isinstance(node.op, ast.Mult | ast.Div):
        # an unscaled factor or divisor: gradients have the scale still, unless it is the scale itself
        has_number = any(isinstance(value, LiteralValue) for value in (left, right))
        is_unsure = len(tensors) == 1 and first.scaler_key != UNSCALED and not has_number
        return replace(
            first,
            scaler_key=MAYBE if is_unsure else first.scaler_key,
            rounded=first_rounded(tensors),
            divided=first.divided if _is_weight(node, left) else True,
            upcast=None,
            model_calls=all_model_calls([left, right]),
            dtype=_dtype_of_pair(left, right),
            node=node,
        )
    divided: bool | None = any(t.divided for t in tensors) or (
        False if any(t.divided is False for t in tensors) else None
    )
    return replace(
        first,
        scaler_key=common_scale([left, right]),
        dtype=_dtype_of_pair(left, right),
        upcast=None,
        model_calls=all_model_calls([left, right]),
        divided=divided,
        rounded=first_rounded(tensors),
        loss=next((t.loss for t in tensors if t.loss), ""),
        node=node,
    )


def _is_weight(node: ast.BinOp, left: Value) -> bool:
    """Return whether a factor is the weight of a loss, and no inverse of a number of batches."""
    factor = node.right if isinstance(left, Tensor) else node.left
    return isinstance(node.op, ast.Mult) and _WEIGHTS.search(ast.unparse(factor)) is not None


_WEIGHTS: Final = re.compile(r"^1(?:\.0)? - |mix|alpha|beta|lambda|\blam\b|weight|coef|temperature|gamma")


def _dtype_of_pair(left: Value, right: Value) -> str:
    """Return the dtype of a result; a number leaves the dtype, float32 wins, else both have it."""
    dtypes = {
        v.dtype if isinstance(v, Tensor) else "" for v in (left, right) if not isinstance(v, LiteralValue)
    }
    if "float32" in dtypes:
        return "float32"
    return dtypes.pop() if len(dtypes) == 1 else ""


def common_scale(values: Sequence[Value]) -> str:
    """Return the scaler whose scale all of some values have, or ``MAYBE``."""
    kinds = {
        value.scaler_key if isinstance(value, Tensor) else UNSCALED
        for value in values
        if not isinstance(value, LiteralValue)
    }
    return next(iter(kinds)) if len(kinds) == 1 else MAYBE


def tensor_method(
    interpreter: Interpreter, node: ast.Call, base: Tensor, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of a tensor."""
    interpreter.record_dtypes(node, [base])
    if name == "backward":
        return backward(interpreter, node, base, arguments)
    if name in ("item", "tolist"):
        interpreter.record(NumberRead(interpreter.at(node), base))
        return UNSCALED_TENSOR
    if name in ("detach", "detach_"):
        return replace(base, model_calls=frozenset(), is_detached=True, node=node)
    dtype = requested_dtype(name, arguments)
    if base is UNSCALED_TENSOR and name in ("to", "cuda", "cpu") and not dtype:
        return base  # it may be a model of another file as well
    if dtype:
        up = node if dtype == "float32" else None
        cast = dtype if dtype in ("float16", "bfloat16") else ""
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else node
        rounded = node if cast and rounds_positions(receiver) else base.rounded
        return replace(base, dtype=dtype, weights_dtype="", upcast=up, rounded=rounded, node=node)
    if name == "sigmoid":
        return replace(base, sigmoid=node, upcast=None, node=node)
    if name in WRITES_SAME_DTYPE:
        check_same_dtype(interpreter, node, f"{name}()", [base, *arguments.all()])
        return base
    if name == "numpy" and base.dtype == "bfloat16":
        check_half_kernel(interpreter, node, "numpy", base)
    if name == "sum":
        check_half_sum(interpreter, node, base)
    if name in LOG_PROBABILITIES:
        check_log_probabilities(interpreter, node, base)
    if name in ("sin", "cos"):
        check_rounded_angles(interpreter, base)
    if name == "exp" and check_half_exp(interpreter, node, base):
        return replace(base, dtype="", upcast=None, node=node)  # what follows has the same cause
    if name in ("matmul", "mm", "bmm"):
        return matrix_product(interpreter, node, [base, *arguments.positional])
    if name in ("div", "mul", "div_", "mul_"):
        return replace(base, divided=True, upcast=None, node=node)
    if name in ("masked_fill", "masked_fill_", "clamp", "clamp_", "clamp_min"):
        return replace(base, upcast=None, node=node)
    keeps = name in KEEPS_DTYPE or (name in AUTOCAST_FLOAT32 and interpreter.autocast.enabled is False)
    result = base if keeps else replace(base, dtype=dtype_of_result(interpreter, name), loss="", sigmoid=None)
    return replace(result, upcast=base.upcast if keeps else None, node=node)


def dtype_of_result(interpreter: Interpreter, name: str) -> str:
    """Return the dtype in which autocast computes an op that it keeps in float32; empty for other ops."""
    return "float32" if name in AUTOCAST_FLOAT32 and interpreter.autocast.enabled is True else ""


def requested_dtype(name: str, arguments: Arguments) -> str:
    """Return the dtype that a method such as ``half()`` casts to; empty for other methods."""
    names = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
    if name in names:
        return names[name]
    if name not in ("to", "type"):
        return ""
    return next((dtype for value in arguments.all() if (dtype := dtype_named(value))), "")


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
            "AMP868",
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
