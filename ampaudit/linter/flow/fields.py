"""Binds the fields of dataclasses to what a call gives, to defaults, or to what annotations say."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.arguments import Arguments
from ampaudit.linter.flow.definitions import ClassInfo, Instance
from ampaudit.linter.flow.frameworks import FRAMEWORKS
from ampaudit.linter.flow.syntax import dotted_name, keyword_value
from ampaudit.linter.flow.values import (
    UNKNOWN,
    ImportedName,
    Managed,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["annotated_value", "bind_fields", "instance_of_class"]

_COLLECTIONS: Final = frozenset(
    "list List dict Dict Sequence Iterable tuple Tuple Callable type Type ModuleList set frozenset".split()
)


def annotated_value(
    interpreter: Interpreter, annotation: ast.expr, name: str, *, is_alone: bool = True
) -> Value:
    """Return the value of an annotation such as ``GradScaler``, ``"Optimizer"`` or ``Accelerator | None``.

    Only one instance of a class of the script can stand for it, so that it must be alone in its function.
    """
    names = set(re.findall(r"\w+", ast.unparse(annotation)))
    if "GradScaler" in names:
        return interpreter.register_scaler(Scaler(f"name {name}", text=name))
    if names & _COLLECTIONS:
        return UNKNOWN
    if "Optimizer" in names:
        return Optimizer(f"name {name}")
    if names & {"LRScheduler", "_LRScheduler"}:
        return Scheduler(f"name {name}")
    if names & {"Module", "DistributedDataParallel"}:
        return Model(f"name {name}")
    for framework in FRAMEWORKS:
        if any(path.rpartition(".")[2] in names for path in framework.constructors):
            return Managed(framework, Certainty.LIKELY)
    if "DeepSpeedEngine" in names:
        return Managed()
    info = next(
        (interpreter.script.classes[n] for n in sorted(names) if n in interpreter.script.classes), None
    )
    return (
        UNKNOWN if info is None or not info.fields or not is_alone else instance_of_class(interpreter, info)
    )


def instance_of_class(interpreter: Interpreter, info: ClassInfo) -> Instance:
    """Return the instance that stands for any of a class, with the defaults of its fields."""
    owner = Instance(f"class {info.node.name}", info)
    if owner.key not in interpreter.state.scopes:
        bind_fields(interpreter, owner, None)
    return owner


def bind_fields(interpreter: Interpreter, owner: Instance, arguments: Arguments | None) -> None:
    """Bind the fields of an instance that a call makes, or of any instance of its class."""
    for index, field in enumerate(owner.info.fields):
        name = dotted_name(field.target)
        argument = None if arguments is None else arguments.get(index, name)
        value = argument if argument is not None else _default(interpreter, field)
        if value is UNKNOWN:
            value = annotated_value(interpreter, field.annotation, f"{owner.info.node.name}.{name}")
        interpreter.state.bind(owner.key, name, value)


def _default(interpreter: Interpreter, field: ast.AnnAssign) -> Value:
    """Return the default of a field if it is a dtype or another object; a caller may give other numbers."""
    if isinstance(field.value, ast.Call) and dotted_name(field.value.func).endswith("field"):
        factory = keyword_value(field.value, "default_factory")
        if factory is None:
            return UNKNOWN
        return interpreter.evaluate(
            ast.copy_location(ast.Call(func=factory, args=[], keywords=[]), field.value)
        )
    value = UNKNOWN if field.value is None else interpreter.evaluate(field.value)
    return value if isinstance(value, ImportedName) else UNKNOWN
