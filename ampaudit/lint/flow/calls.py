"""Follows a call of a method, of a function of torch or of the file, or of what is not known."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampaudit.lint.flow import gradients, objects, optimizers, scaling, tensors, torchcalls
from ampaudit.lint.flow.inlining import callback, enter
from ampaudit.lint.flow.names import WITHOUT_EFFECT, canonical
from ampaudit.lint.flow.script import dotted
from ampaudit.lint.flow.values import (
    MAYBE,
    OPAQUE,
    UNKNOWN,
    Bound,
    ClassValue,
    Function,
    Gradients,
    Instance,
    Listed,
    Loss,
    Managed,
    Model,
    Optimizer,
    ParamGrad,
    Params,
    Scaler,
    Scheduler,
    Symbol,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.machine import Machine

__all__ = ["Arguments", "call", "unknown_call"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call hands over.

    Attributes:
        positional: values in order.
        keywords: values by name.
        node: the call.
    """

    positional: list[Value]
    keywords: dict[str, Value]
    node: ast.Call

    def get(self, index: int, name: str) -> Value | None:
        """By place or name."""
        if index < len(self.positional):
            return self.positional[index]
        return self.keywords.get(name)

    def all(self) -> list[Value]:
        """Every value."""
        return [*self.positional, *self.keywords.values()]

    def named(self) -> dict[str, Value]:
        """By name, or by place as text, as functions of the file take them."""
        return {**{str(index): value for index, value in enumerate(self.positional)}, **self.keywords}

    def expression(self, index: int, name: str) -> ast.expr | None:
        """The expression of an argument."""
        if index < len(self.node.args):
            return self.node.args[index]
        return next((k.value for k in self.node.keywords if k.arg == name), None)


def _arguments(machine: Machine, node: ast.Call) -> Arguments:
    positional = [machine.evaluate(argument) for argument in node.args]
    keywords = {k.arg or "**": machine.evaluate(k.value) for k in node.keywords}
    return Arguments(positional, keywords, node)


def call(machine: Machine, node: ast.Call) -> Value:
    """The value that a call returns, after what it does to the state."""
    if isinstance(node.func, ast.Attribute):
        base = machine.evaluate(node.func.value)
        if not isinstance(base, Symbol):
            return _method(machine, node, base, node.func.attr)
        function: Value = Symbol(canonical(f"{base.path}.{node.func.attr}"))
    else:
        function = machine.evaluate(node.func)
    return _function(machine, node, function)


def _method(machine: Machine, node: ast.Call, base: Value, name: str) -> Value:
    if isinstance(base, Instance):
        return _of_instance(machine, node, base, name)
    if isinstance(base, Tensor) and base is OPAQUE and isinstance(node.func, ast.Attribute):
        base = machine.by_use(base, dotted(node.func.value))
    arguments = _arguments(machine, node)
    if isinstance(base, Scaler):
        return scaling.scaler_method(machine, node, base, name, arguments)
    if isinstance(base, Optimizer):
        return optimizers.optimizer_method(machine, node, base, name, arguments)
    if isinstance(base, Model):
        return objects.model_method(machine, node, base, name, arguments)
    if isinstance(base, Scheduler):
        return objects.scheduler_method(machine, node, base, name, arguments)
    if isinstance(base, Gradients):
        return tensors.norm_of(machine, node, base) if tensors.is_norm(name) else base
    if isinstance(base, ParamGrad):
        return tensors.gradient_method(machine, node, name)
    if isinstance(base, Tensor):
        return tensors.method(machine, node, base, name, arguments)
    casts = name in ("to", "type") and any(tensors.dtype_of(value) for value in arguments.all())
    if base is UNKNOWN and (casts or name in tensors.ON_ANY_TENSOR):
        return tensors.method(machine, node, Tensor(scaled=MAYBE), name, arguments)
    if isinstance(base, Loss | Params | Listed | Managed):
        return base if name in ("to", "cuda", "cpu", "values", "items") else _managed(base)
    return unknown_call(machine, node, name, arguments)


def _managed(base: Value) -> Value:
    return base if isinstance(base, Managed) else UNKNOWN


def _of_instance(machine: Machine, node: ast.Call, base: Instance, name: str) -> Value:
    method = machine.bound(base, name)
    if method is not None:
        return _function(machine, node, method)
    stored = machine.live.value(base.key, name)
    value = machine.by_use(stored or UNKNOWN, dotted(node.func))
    if stored is not None or value is not UNKNOWN:
        return _function(machine, node, value)
    arguments = _arguments(machine, node)
    if name not in WITHOUT_EFFECT and not (base.info.derives("Module") and name in objects.MODULE_METHODS):
        _may_do_anything(machine, f"self.{name}", [*arguments.all(), base])
    return UNKNOWN


def _function(machine: Machine, node: ast.Call, function: Value) -> Value:
    arguments = _arguments(machine, node)
    if isinstance(function, Function):
        if not function.info.busy:
            return OPAQUE
        return enter(machine, function.info, node, arguments.named(), None, function.frame)
    if isinstance(function, Bound):
        static = any(dotted(d) == "staticmethod" for d in function.info.node.decorator_list)
        owner = None if static else function.owner
        return (
            enter(machine, function.info, node, arguments.named(), owner, 0) if function.info.busy else OPAQUE
        )
    if isinstance(function, ClassValue):
        return objects.instance(machine, node, function.info, arguments)
    if isinstance(function, Symbol):
        return torchcalls.symbol_call(machine, node, function.path, arguments)
    if isinstance(function, Model):
        return objects.forward(machine, node, function, arguments)
    if isinstance(function, Loss):
        return torchcalls.loss_call(machine, node, function, arguments)
    if isinstance(function, Instance):
        return _called_instance(machine, node, function)
    return unknown_call(machine, node, dotted(node.func), arguments)


def _called_instance(machine: Machine, node: ast.Call, owner: Instance) -> Value:
    for name in ("__call__", "forward"):
        method = machine.bound(owner, name)
        if method is not None:
            return _function(machine, node, method)
    return UNKNOWN


def unknown_call(machine: Machine, node: ast.Call, name: str, arguments: Arguments) -> Value:
    """Code that is not in this file."""
    last = name.rpartition(".")[2]
    if last == "backward":
        gradients.unknown_backward(machine)
        return UNKNOWN
    given = arguments.all()
    for value in given:
        if isinstance(value, Function) and value.info.busy and value.info not in machine.called:
            callback(machine, value, node)
    if last not in WITHOUT_EFFECT:
        _may_do_anything(machine, name, given)
    touched = any(isinstance(value, Scaler | Instance) for value in given)
    return UNKNOWN if touched else _opaque(machine, given)


def _opaque(machine: Machine, given: list[Value]) -> Value:
    """What unknown code returns; a scale may be in it only if one was in what it was given."""
    known = [value for value in given if isinstance(value, Tensor)]
    if any(value.scaled for value in known):
        return UNKNOWN
    under = tensors.lowered(machine) or next((value.under for value in known if value.under), "")
    return Tensor(under=under) if under else OPAQUE


def _may_do_anything(machine: Machine, name: str, given: list[Value]) -> None:
    """Unknown code may do with what it is given whatever it likes."""
    last = name.rpartition(".")[2].lower()
    state = machine.live
    flat = [item for value in given for item in (value.items if isinstance(value, Listed) else (value,))]
    held = [value for value in flat if isinstance(value, Instance)]
    for owner in held:
        flat += state.scopes.get(owner.key, {}).values()
    machine.escaped.update(value.key for value in flat if isinstance(value, Scaler | Optimizer))
    for fact in ("updated", "idle", "fresh"):
        state.forget(fact)
    touches = any(isinstance(value, Scaler | Optimizer) for value in flat)
    trains = "backward" in last or last.endswith("step") or ("train" in last and bool(given))
    if touches or trains:
        state.put(MAYBE, "grads")
        for fact in ("unscaled", "stepped", "early", "zeroed", "last", "unused", "leftover"):
            state.forget(fact)
        state.put(MAYBE, "touched")
