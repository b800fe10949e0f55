"""Interprets loss functions."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, Fix
from ampaudit.linter.flow import tensors
from ampaudit.linter.flow.events import LossInside
from ampaudit.linter.flow.syntax import dotted_name, keyword_value, last_component
from ampaudit.linter.flow.values import LiteralValue, LossFunction, Tensor, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments


__all__ = ["call_loss_function", "record_loss", "reduction_of"]


def record_loss(interpreter: Interpreter, node: ast.AST, values: Sequence[Value]) -> None:
    """Record a loss that is computed under autocast from what a model has returned outside."""
    autocast = interpreter.autocast
    outside = frozenset(id(v.node) for v in values if isinstance(v, Tensor) and not v.computed_under)
    if outside and autocast.enabled is True and autocast.explicit:
        interpreter.record(LossInside(interpreter.at(node), outside))


def call_loss_function(
    interpreter: Interpreter, node: ast.Call, loss: LossFunction, arguments: Arguments
) -> Value:
    """Interpret a loss function of torch."""
    tensor_arguments = [value for value in arguments.all() if isinstance(value, Tensor)]
    first = arguments.first
    autocast = interpreter.autocast
    record_loss(interpreter, node, tensor_arguments)
    if (
        loss.name in ("BCELoss", "binary_cross_entropy")
        and autocast.enabled is True
        and autocast.device != "cpu"
        and not (autocast.conditional and _is_off_by_default(interpreter, autocast.node))
    ):
        _check_binary_cross_entropy(interpreter, node, loss, first)
    elif autocast.enabled is False and isinstance(first, Tensor) and first.cast:
        interpreter.report(
            "AMP842",
            node,
            f"the model's output is {first.cast} under autocast, and this loss, "
            f"computed outside, stays in {first.cast}",
            "move the loss into the autocast block, or pass it output.float()",
        )
    computed_under = tensors.autocast_dtype(interpreter) or next(
        (t.computed_under for t in tensor_arguments if t.computed_under), ""
    )
    roots = tensors.all_model_calls(tensor_arguments) if tensor_arguments else None
    divided = False if loss.reduction in ("mean", "batchmean") else None
    return Tensor(
        computed_under=computed_under, model_calls=roots, loss=loss.name, divided=divided, node=node
    )


def reduction_of(arguments: Arguments) -> str:
    """Return the reduction of a loss, ``?`` if it is not known."""
    value = arguments.keywords.get("reduction")
    if value is None:
        return "mean"
    return str(value.value) if isinstance(value, LiteralValue) else "?"


def _is_off_by_default(interpreter: Interpreter, autocast: ast.AST | None) -> bool:
    """Return whether the setting that enables autocast has a default somewhere, which is false."""
    switch = keyword_value(autocast, "enabled") if isinstance(autocast, ast.Call) else None
    name = last_component(dotted_name(switch)) if switch is not None else ""
    return name != "" and interpreter.linked.mentions(rf"\b{name}\b(?:\s*:\s*\w+)?\s*=\s*False\b")


def _check_binary_cross_entropy(
    interpreter: Interpreter, node: ast.Call, loss: LossFunction, first: Value
) -> None:
    argument = node.args[0] if node.args else None
    direct = isinstance(first, Tensor) and first.sigmoid is argument and argument is not None
    is_fixable = direct and loss.name == "binary_cross_entropy" and isinstance(argument, ast.Call)
    interpreter.report(
        "AMP844",
        node,
        "autocast rejects binary cross entropy on probabilities, whose log easily becomes -inf in float16",
        "pass logits to BCEWithLogitsLoss or F.binary_cross_entropy_with_logits, without the sigmoid",
        Fix.at(node, "with logits") if is_fixable else None,
        certainty=Certainty.LIKELY if interpreter.autocast.conditional else Certainty.KNOWN,
    )
