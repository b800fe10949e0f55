"""Interprets uses of gradients: ``p.grad``, and those of ``torch.autograd.grad``."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.linter.flow.events import GradientRead
from ampaudit.linter.flow.gradient_facts import advice_for, still_scaled
from ampaudit.linter.flow.statement_context import (
    call_beside_scaler,
    in_same_function,
    nodes_around,
    said_where,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    UNSCALED,
    UNSCALED_TENSOR,
    GradAttribute,
    LossGradients,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["gradient_method", "gradient_norm", "is_norm_function", "use_gradient"]


_NORM_FUNCTIONS: Final = frozenset({"norm", "pow", "square", "sum", "abs", "pow_"})


# the gradient itself, or a multiple of it: the scale can be taken out afterwards as well
_KEEPS_GRADIENT: Final = frozenset(
    "detach contiguous view reshape flatten cpu clone float double to mul mul_ div div_".split()
)


_HARMLESS_ON_GRADIENTS: Final = frozenset(
    "isnan isinf isfinite zero_ fill_ detach_ requires_grad_ size numel dim is_contiguous untyped_storage"
    " data_ptr any all is_sparse type record_stream".split()
)


def gradient_norm(interpreter: Interpreter, node: ast.AST, gradients: LossGradients) -> Value:
    """Interpret a norm or power of gradients, as in a gradient penalty."""
    if gradients.scaler_key not in (UNSCALED, MAYBE):
        places = (node, *reversed(interpreter.calls))  # the norm, or the call of a helper that is given them
        place = next((p for p in places if in_same_function(interpreter.linked, p, gradients.node)), node)
        interpreter.report(
            "AMP837",
            place,
            f"these gradients{said_where(node, place)} are scaled by the loss scale, "
            "so the penalty measures the scale and not the model",
            "multiply them by 1 / scaler.get_scale() first",
        )
    elif interpreter.autocast.enabled is False and gradients.computed_under and interpreter.scalers:
        interpreter.report(
            "AMP838",
            node,
            "the penalty is computed outside autocast, although the rest of the loss is computed inside",
            "compute the penalty and add it to the loss under 'with torch.autocast(...)'",
        )
    return Tensor(scaler_key=gradients.scaler_key, node=node)


def use_gradient(interpreter: Interpreter, node: ast.AST) -> None:
    """Record that ``p.grad`` is read, and report it if it is still scaled."""
    interpreter.record(GradientRead(interpreter.at(node)))
    certainty = still_scaled(interpreter)
    if _is_normalized(interpreter, node) or isinstance(interpreter.statement, ast.Assert):
        return
    place = call_beside_scaler(interpreter.linked, node, interpreter.calls)
    line = getattr(place, "lineno", 0)
    if certainty and not any(key[:2] == ("AMP808", line) for key in interpreter.diagnostics):
        interpreter.report(
            "AMP808",
            place,
            f"the gradients used{said_where(node, place, 'here')} are still scaled by the loss scale",
            advice_for(interpreter, "read")
            or "call scaler.unscale_(optimizer) once, before the gradients are first used",
            certainty=certainty,
        )


def _is_normalized(interpreter: Interpreter, node: ast.AST) -> bool:
    """Return whether the function around a node divides the gradients by their norm: the scale cancels."""
    texts = (ast.unparse(n) for n in nodes_around(interpreter.linked, node) if isinstance(n, ast.BinOp))
    return any(_BY_NORM.search(text) for text in texts)


_BY_NORM: Final = re.compile(r"(?:grad|rho|radius|epsilon).* / \(?\w*norm")


def gradient_method(interpreter: Interpreter, node: ast.Call, name: str) -> Value:
    """Interpret a method of ``p.grad``."""
    if name in _KEEPS_GRADIENT:
        interpreter.record(GradientRead(interpreter.at(node)))
        return GradAttribute()
    if name in _HARMLESS_ON_GRADIENTS:
        return UNSCALED_TENSOR
    use_gradient(interpreter, node)
    return UNSCALED_TENSOR


def is_norm_function(name: str) -> bool:
    """Return whether a method or function is a norm or power."""
    return name in _NORM_FUNCTIONS
