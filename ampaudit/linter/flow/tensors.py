"""Interprets operations on tensors and gradients: their loss scale, their 16-bit dtype, their graph."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ampaudit.linter.flow import events
from ampaudit.linter.flow.gradients import backward, use_loss_gradients
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.syntax import keyword_value, names_in
from ampaudit.linter.flow.torch_names import (
    AUTOCAST_FLOAT32,
    DTYPES,
    KEEPS_DTYPE,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    NUMBER,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    Autocast,
    Call,
    DtypeChoice,
    ImportedName,
    KnownItems,
    LiteralValue,
    LossGradients,
    ScaleReading,
    Tensor,
    Value,
    device_of,
)

# methods that nothing but a tensor has, or that do no harm to what else has them
ON_ANY_TENSOR: Final = frozenset(
    {"float", "half", "bfloat16", "long", "bool", "sigmoid", "matmul", "mm", "bmm", "masked_fill"}
)
_DEFAULT_DTYPES: Final = {"cuda": "float16", "cpu": "bfloat16"}
# parts of names, and names, of positions, times and frequencies
_POSITIONS: Final = ("freq", "posit", "timestep", "time_step", "sigma", "theta", "omega", "angle", "coord")
_POSITION_NAMES: Final = frozenset({"pos", "time", "times", "mz"})


def dtype_named(value: Value) -> str:
    """Return the dtype that a value names, such as ``float16`` for ``torch.half``; empty for other values."""
    return DTYPES.get(value.path, "") if isinstance(value, ImportedName) else ""


def autocast_dtype(interpreter: Interpreter, context: Autocast | None = None) -> str:
    """Return the dtype in which autocast computes matrix products; empty if that is not certain.

    Args:
        interpreter: Interpreter.
        context: Autocast context; by default the current one.
    """
    autocast = interpreter.point.autocast if context is None else context
    if autocast.enabled is not True:
        return ""
    # the CPU may be only the device of an assumed setting
    is_certain = autocast.dtype == "" and (autocast.device != "cpu" or not interpreter.assumptions)
    default = _DEFAULT_DTYPES.get(autocast.device or "") if is_certain else None
    return autocast.dtype or default or "16-bit"


def computed_under(interpreter: Interpreter, operands: Sequence[Tensor]) -> str:
    """Return the 16-bit dtype of autocast in which a result, or one of its operands, is computed."""
    return autocast_dtype(interpreter) or next((t.computed_under for t in operands if t.computed_under), "")


def dtype_of_model_calls(interpreter: Interpreter) -> str:
    """Return the 16-bit dtype of autocast around every call of a model that is trained, else empty."""
    calls = (event for event in interpreter.events.values() if isinstance(event, events.ModelCall))
    trained = [call.autocast for call in calls if "no_grad" not in call.grad_modes]
    dtypes = {autocast_dtype(interpreter, autocast) if autocast.explicit else "" for autocast in trained}
    return dtypes.pop() if len(dtypes) == 1 else ""


def call_op(interpreter: Interpreter, node: ast.AST, path: str, operands: Sequence[Value]) -> None:
    """Let the rules see a call of an op, if they may know a dtype; there are too many of them to record."""
    tensors = tuple([value for value in operands if isinstance(value, Tensor)])
    if any(t.dtype or t.weights_dtype or t.rounded for t in tensors):
        if isinstance(node, ast.Call) and keyword_value(node, "dtype") is not None:
            return  # it casts its operands
        interpreter.judge(interpreter.event(events.OpEvaluated, node, path, tensors))


def matrix_product(interpreter: Interpreter, node: ast.AST, values: list[Value]) -> Value:
    """Interpret a matrix product, which autocast computes in 16 bits whatever its operands are."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(value.is_on_cpu for value in tensors) and interpreter.point.autocast.device != "cpu":
        return Tensor(model_calls=all_model_calls(values), is_on_cpu=True, node=node)
    call_op(interpreter, node, "torch.matmul", values)
    cast = autocast_dtype(interpreter)
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else getattr(node, "args", [])
    implied = "" if any(value.dtype == "float32" for value in tensors) else interpreter.point.weights
    are_angles = _are_positions(*operands) or any(value.upcast for value in tensors)
    rounded = node if (cast or implied) and are_angles else first_rounded(values)
    is_off = len(values) > 1 and follows_operands(interpreter)
    scales = {value.scaler_key for value in values if isinstance(value, Tensor | LossGradients)} - {UNSCALED}
    return Tensor(
        dtype=_dtype_of_pair(*values[:2]) if is_off else cast,
        computed_under=computed_under(interpreter, tensors),
        model_calls=all_model_calls(values),
        scaler_key=MAYBE if len(scales) > 1 else next(iter(scales), UNSCALED),
        rounded=rounded,
        node=node,
    )


def outer_product(interpreter: Interpreter, node: ast.Call, values: list[Value]) -> Value:
    """Interpret an ``einsum`` that sums nothing: autocast leaves its dtype alone, 16-bit buffers do not."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    implied = interpreter.point.weights if all(v.dtype != "float32" for v in tensors) else ""
    rounded = node if implied and _are_positions(*node.args) else first_rounded(tensors)
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


def combine(node: ast.BinOp, left: Value, right: Value, interpreter: Interpreter) -> Value:
    """Interpret a sum, difference, product, quotient or power of two values."""
    gradients = [value for value in (left, right) if isinstance(value, LossGradients)]
    if gradients:
        if isinstance(node.op, ast.Pow):
            return use_loss_gradients(interpreter, node, gradients[0], "pow")
        if any(isinstance(value, ScaleReading) for value in (left, right)):
            return replace(gradients[0], scaler_key=UNSCALED)
        # a factor that is not known may be the inverse of the scale; a tensor is none
        is_known = all(isinstance(value, Tensor | LossGradients | LiteralValue) for value in (left, right))
        scaled = gradients[0].scaler_key
        return replace(gradients[0], scaler_key=scaled if is_known or scaled == UNSCALED else MAYBE)
    for value in (left, right) if isinstance(node.op, ast.Add) else ():
        # only a report can use the sum of scaled losses that have no graph
        if isinstance(value, Tensor) and value.is_detached and value.scaler_key not in (UNSCALED, MAYBE):
            interpreter.record(events.NumberRead, node, value)
    tensors = [value for value in (left, right) if isinstance(value, Tensor) and value is not UNSCALED_TENSOR]
    if not tensors and isinstance(left, Tensor) and isinstance(node.op, ast.Div):
        return left._replace(divided=True)
    if not tensors:
        return UNSCALED_TENSOR if isinstance(left, Tensor) or isinstance(right, Tensor) else UNKNOWN
    result = tensors[0]._replace(
        rounded=first_rounded(tensors),
        upcast=False,
        model_calls=all_model_calls([left, right]),
        dtype=_dtype_of_pair(left, right),
        node=node,
    )
    if isinstance(node.op, ast.Mult | ast.Div):
        # an unscaled factor or divisor: gradients have the scale still, unless it is the scale itself
        has_number = any(isinstance(value, LiteralValue) for value in (left, right))
        is_unsure = len(tensors) == 1 and result.scaler_key != UNSCALED and not has_number
        return result._replace(
            scaler_key=MAYBE if is_unsure else result.scaler_key,
            divided=result.divided or isinstance(node.op, ast.Div),
        )
    return result._replace(
        scaler_key=common_scale([left, right]),
        divided=any(t.divided for t in tensors),
        loss=next((t.loss for t in tensors if t.loss), ""),
    )


def _dtype_of_pair(left: Value, right: Value) -> str:
    """Return the dtype of a result; numbers and integers leave the dtype, float32 wins, else both have it."""
    dtypes = {
        v.dtype if isinstance(v, Tensor) else "" for v in (left, right) if not isinstance(v, LiteralValue)
    }
    for weaker in ("number", "integer"):
        if len(dtypes) > 1:
            dtypes.discard(weaker)
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


def tensor_method(interpreter: Interpreter, call: Call, base: Tensor, name: str) -> Value:
    """Interpret a method of a tensor."""
    interpreter.record_dtypes(call.node, [base])
    if name == "backward":
        return backward(interpreter, call.node, base)
    if name in ("item", "tolist", "numpy"):
        interpreter.record(events.NumberRead, call.node, base)
        if name != "numpy":
            return UNSCALED_TENSOR
    if name in ("size", "numel", "dim"):
        return NUMBER if call.all() or name != "size" else KnownItems((NUMBER,), repeated=True)
    if name in ("detach", "detach_"):
        return base._replace(model_calls=frozenset(), is_detached=True, node=call.node)
    dtype = requested_dtype(name, call)
    if name in ("to", "type") and not dtype and _may_cast(call):
        base = base._replace(dtype="")
    if base is UNSCALED_TENSOR and name in ("to", "cuda", "cpu") and not dtype:
        return base  # it may be a model of another file as well
    if name in ("cuda", "cpu") or (name == "to" and not dtype):
        base = base._replace(is_on_cpu=name == "cpu" or device_of(call.get(0, "device")) == "cpu")
    if dtype:
        receiver = call.node.func.value if isinstance(call.node.func, ast.Attribute) else call.node
        rounded = call.node if dtype in ("float16", "bfloat16") and _are_positions(receiver) else base.rounded
        upcast = dtype == "float32"
        return base._replace(dtype=dtype, weights_dtype="", upcast=upcast, rounded=rounded, node=call.node)
    if name in ("matmul", "mm", "bmm"):
        return matrix_product(interpreter, call.node, [base, *call.positional])
    call_op(interpreter, call.node, f"torch.{name}", [base, *call.all()])
    chosen = call.keywords.get("dtype")
    if name == "sigmoid":
        return base._replace(sigmoid=call.node, upcast=False, node=call.node)
    if name in ("masked_fill", "masked_fill_", "clamp", "clamp_", "clamp_min"):
        return base._replace(upcast=False, node=call.node)
    if keeps_dtype(interpreter, name) and chosen is None:
        return base._replace(node=call.node)
    dtype = dtype_named(chosen) if chosen is not None else dtype_of_result(interpreter, name)
    return base._replace(dtype=dtype, weights_dtype="", loss="", sigmoid=None, upcast=False, node=call.node)


def follows_operands(interpreter: Interpreter) -> bool:
    """Return whether ops compute in the dtype of their operands, as a 16-bit model does without autocast."""
    enabled = interpreter.point.autocast.enabled
    return enabled is False or (enabled is None and interpreter.point.weights != "")


def keeps_dtype(interpreter: Interpreter, name: str) -> bool:
    """Return whether the result of an op has the dtype of its operands.

    That of exp counts as unknown, since mistakes that follow from its overflow have the same cause.
    """
    is_off = follows_operands(interpreter)
    return name in KEEPS_DTYPE or (is_off and name in AUTOCAST_FLOAT32 and name != "exp")


def dtype_of_result(interpreter: Interpreter, name: str) -> str:
    """Return the dtype in which autocast computes an op that it keeps in float32; empty for other ops."""
    return "float32" if name in AUTOCAST_FLOAT32 and interpreter.point.autocast.enabled is True else ""


def requested_dtype(name: str, call: Call) -> str:
    """Return the dtype that a method such as ``half()`` casts to; empty for other methods."""
    if name in ("to", "type"):
        return next((dtype for value in call.all() if (dtype := dtype_named(value))), "")
    names = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
    return names.get(name, "")


def _may_cast(call: Call) -> bool:
    """Return whether a call of ``to`` has an argument that may be a dtype or a tensor, and no device."""
    first = call.node.args[:1]
    return (
        "dtype" in call.keywords
        or len(call.positional) > 1
        or isinstance(call.first, Tensor | DtypeChoice)
        or any("dtype" in name for argument in first for name in names_in(argument))
    )


def _are_positions(*operands: ast.AST) -> bool:
    """Return whether values are, by their names, positions, times or frequencies."""
    names = {name for operand in operands for name in names_in(operand)}
    is_t = any(isinstance(operand, ast.Name) and operand.id == "t" for operand in operands)
    return is_t or any(
        name in _POSITION_NAMES or name.startswith("pos_") or any(part in name for part in _POSITIONS)
        for name in names
    )
