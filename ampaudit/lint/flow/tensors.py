"""What becomes of tensors: of a loss's scale, of autocast's 16 bits, of a gradient that is read."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.lint.flow.facts import is_still_scaled
from ampaudit.lint.flow.names import DTYPES
from ampaudit.lint.flow.values import (
    MAYBE,
    NO,
    OPAQUE,
    UNKNOWN,
    Autocast,
    Const,
    Gradients,
    ParamGrad,
    Symbol,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = [
    "ON_ANY_TENSOR",
    "all_roots",
    "cast_of",
    "combined",
    "dtype_of",
    "lowered",
    "method",
    "mixed",
    "product",
    "touches_gradient",
]

_KEEPS: Final = frozenset(
    "mean sum view reshape squeeze unsqueeze flatten transpose permute contiguous to cuda cpu clone type_as"
    " requires_grad_ expand repeat chunk split t T".split()
)
# methods that nothing but a tensor has, or that do no harm to what else has them
ON_ANY_TENSOR: Final = frozenset(
    {"float", "half", "bfloat16", "sigmoid", "matmul", "mm", "bmm", "masked_fill"}
)
_NORMS: Final = frozenset({"norm", "pow", "square", "sum", "abs", "pow_"})
# the gradient itself, or a multiple of it: the scale can be taken out afterwards as well
_SAME_GRADIENT: Final = frozenset(
    "detach contiguous view reshape flatten cpu clone float double to mul mul_ div div_".split()
)
_HARMLESS_ON_GRADIENTS: Final = frozenset(
    "isnan isinf isfinite zero_ detach_ requires_grad_ size numel dim is_contiguous untyped_storage data_ptr"
    " any all is_sparse type record_stream".split()
)


def dtype_of(value: Value) -> str:
    """``float16`` of ``torch.half``; empty for what is no dtype."""
    return DTYPES.get(value.path, "") if isinstance(value, Symbol) else ""


def lowered(machine: Machine) -> str:
    """The dtype that matrix products have here for certain: of the autocast around, or empty."""
    here = machine.autocast
    if here.enabled is not True:
        return ""
    return here.dtype or _default(here)


def _default(here: Autocast) -> str:
    if here.dtype == "" and here.device in ("cuda", "cpu"):
        return "float16" if here.device == "cuda" else "bfloat16"
    return "16-bit"


def product(machine: Machine, node: ast.AST, values: list[Value]) -> Value:
    """A matrix product; autocast makes it 16-bit whatever its operands are."""
    cast = lowered(machine)
    for value in values:
        if isinstance(value, Tensor) and value.upcast is not None and cast:
            machine.say(
                "AMP845",
                value.upcast,
                f"autocast casts this float32 tensor back to {cast} at line {getattr(node, 'lineno', 0)}",
                "put the lines that need float32 under 'with torch.autocast(device_type, enabled=False):'",
            )
    roots = all_roots(values)
    return Tensor(cast=cast, under=cast, roots=roots, scaled=_all_scaled(values), node=node)


def all_roots(values: Sequence[Value]) -> frozenset[str] | None:
    """The model calls that go into any of some values; ``None`` where one of them is not known."""
    found: frozenset[str] = frozenset()
    for value in values:
        if isinstance(value, Const):
            continue
        if not isinstance(value, Tensor) or value.roots is None:
            return None
        found |= value.roots
    return found


def _all_scaled(values: list[Value]) -> str:
    kinds = {value.scaled for value in values if isinstance(value, Tensor | Gradients)} - {NO}
    return MAYBE if len(kinds) > 1 else next(iter(kinds), NO)


def combined(node: ast.BinOp, left: Value, right: Value, machine: Machine) -> Value:
    """A sum, difference, product or quotient of two values."""
    gradients = [value for value in (left, right) if isinstance(value, Gradients)]
    if gradients:
        if isinstance(node.op, ast.Pow):
            return norm_of(machine, node, gradients[0])
        return replace(gradients[0], scaled=MAYBE if gradients[0].scaled != NO else NO)
    tensors = [value for value in (left, right) if isinstance(value, Tensor) and value is not OPAQUE]
    if not tensors:
        return OPAQUE if isinstance(left, Tensor) or isinstance(right, Tensor) else UNKNOWN
    first = tensors[0]
    if isinstance(node.op, ast.Mult | ast.Div):
        # an unscaled factor or divisor: gradients have the scale still, unless it is the scale itself
        scaled = (
            MAYBE if len(tensors) == 1 and first.scaled != NO and not _number(left, right) else first.scaled
        )
        return replace(
            first,
            scaled=scaled,
            divided=True,
            upcast=None,
            roots=all_roots([left, right]),
            cast="",
            node=node,
        )
    divided: bool | None = any(t.divided for t in tensors) or (False if first.divided is False else None)
    return replace(
        first,
        scaled=mixed([left, right]),
        cast=first.cast if all(t.cast == first.cast for t in tensors) and len(tensors) == 2 else "",
        upcast=None,
        roots=all_roots([left, right]),
        divided=divided,
        loss=next((t.loss for t in tensors if t.loss), ""),
        node=node,
    )


def _number(left: Value, right: Value) -> bool:
    return isinstance(left, Const) or isinstance(right, Const)


def mixed(values: Sequence[Value]) -> str:
    """The scale that is in all of some values, or ``MAYBE``."""
    kinds = {
        value.scaled if isinstance(value, Tensor) else NO for value in values if not isinstance(value, Const)
    }
    return next(iter(kinds)) if len(kinds) == 1 else MAYBE


def norm_of(machine: Machine, node: ast.AST, gradients: Gradients) -> Value:
    """A penalty's norm or power of gradients."""
    if gradients.scaled not in (NO, MAYBE):
        machine.say(
            "AMP837",
            node,
            "these gradients have the loss scale as a factor, so the penalty is of the scale and not of the"
            " model",
            "multiply them by 1. / scaler.get_scale() first",
        )
    elif machine.autocast.enabled is False and gradients.under and machine.scalers:
        machine.say(
            "AMP838",
            node,
            "the penalty is computed outside autocast, although the loss it is added to is computed inside",
            "compute the penalty and add it to the loss under 'with torch.autocast(...)'",
        )
    return Tensor(scaled=gradients.scaled, node=node)


def touches_gradient(machine: Machine, node: ast.AST) -> None:
    """A value of ``p.grad`` is used; it must not have the loss scale in it."""
    machine.note("gradient.read", node)
    line = getattr(node, "lineno", 0)
    if is_still_scaled(machine) and not any(key[:2] == ("AMP808", line) for key in machine.found):
        machine.say(
            "AMP808",
            node,
            "these gradients still have the loss scale as a factor",
            "call scaler.unscale_(optimizer) once, before the first use of the gradients",
        )


def gradient_method(machine: Machine, node: ast.Call, name: str) -> Value:
    """A method of ``p.grad``."""
    if name in _SAME_GRADIENT:
        machine.note("gradient.read", node)
        return ParamGrad()
    if name in _HARMLESS_ON_GRADIENTS:
        return OPAQUE
    touches_gradient(machine, node)
    return OPAQUE


def method(machine: Machine, node: ast.Call, base: Tensor, name: str, arguments: Arguments) -> Value:
    """A method of a tensor."""
    if name == "backward":
        from ampaudit.lint.flow.gradients import backward

        return backward(machine, node, base, arguments)
    if name in ("item", "tolist"):
        machine.note("item", node, value=base)
        return OPAQUE
    if name in ("detach", "detach_"):
        return replace(base, roots=frozenset(), node=node)
    wanted = cast_of(name, arguments)
    if wanted:
        up = node if wanted == "float32" else None
        return replace(base, cast=wanted if wanted in ("float16", "bfloat16") else "", upcast=up, node=node)
    if name == "sigmoid":
        return replace(base, sigmoid=node, upcast=None, node=node)
    if name in ("matmul", "mm", "bmm"):
        return product(machine, node, [base, *arguments.positional])
    if name in ("div", "mul", "div_", "mul_"):
        return replace(base, divided=True, upcast=None, node=node)
    if name in ("masked_fill", "masked_fill_", "clamp", "clamp_", "clamp_min"):
        return replace(base, upcast=None, node=node)
    kept = base if name in _KEEPS else replace(base, cast="", loss="", sigmoid=None)
    return replace(kept, upcast=base.upcast if name in _KEEPS else None, node=node)


def cast_of(name: str, arguments: Arguments) -> str:
    """The dtype that a method of a tensor or a model asks for, such as ``half()``; or empty."""
    names = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
    if name in names:
        return names[name]
    if name not in ("to", "type"):
        return ""
    return next((found for value in arguments.all() if (found := dtype_of(value))), "")


def is_norm(name: str) -> bool:
    """Whether a method or function makes a penalty of gradients."""
    return name in _NORMS
