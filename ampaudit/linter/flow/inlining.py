"""Inlines calls of functions of the file, and of those it imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Final

from ampaudit.linter.diagnostic import Certainty, file_number
from ampaudit.linter.flow.events import AutocastEntered
from ampaudit.linter.flow.interpreter import NO_AUTOCAST, UNKNOWN_AUTOCAST, Frame, Interpreter, ProgramPoint
from ampaudit.linter.flow.state import State, join, join_values
from ampaudit.linter.flow.syntax import (
    dotted_name,
    keyword_value,
    parameter_defaults,
    simple_name,
)
from ampaudit.linter.flow.torch_names import FRAMEWORKS
from ampaudit.linter.flow.values import (
    UNKNOWN,
    Autocast,
    Call,
    ClassInfo,
    ContextManager,
    Function,
    FunctionInfo,
    ImportedName,
    Instance,
    LiteralValue,
    Managed,
    Model,
    Optimizer,
    Scaler,
    Value,
    device_of,
)

_COLLECTIONS: Final = frozenset(
    "list List dict Dict Sequence Iterable tuple Tuple Callable type Type ModuleList set frozenset".split()
)
_CLASSES: Final = {
    "scaler": {"GradScaler"},
    "optimizer": {"Optimizer"},
    "scheduler": {"LRScheduler", "_LRScheduler"},
    "model": {"Module", "DistributedDataParallel"},
}
_MAX_DEPTH: Final = 8  # nested calls


def inline_call(
    interpreter: Interpreter,
    info: FunctionInfo,
    node: ast.AST,
    arguments: Mapping[str, Value],
    owner: Instance | None = None,
    frame: int | None = None,
) -> Value:
    """Interpret the body of a function and return the value of the call.

    Args:
        interpreter: Interpreter at the call.
        info: Function or method to interpret.
        node: Call, or the definition itself for an entry point.
        arguments: Values by parameter name or, as text, by position.
        owner: Instance to which a method is bound.
        frame: Frame that defines the function; by default that of its module.
    """
    outside, linked = interpreter.point, interpreter.linked
    if len(outside.stack) >= _MAX_DEPTH or info in outside.stack or not linked.holds(info.node):
        return UNKNOWN
    interpreter.called.add(info)
    script, entry = linked.script_of(info.node), interpreter.state
    enclosing, number = -script.number if frame is None else frame, len(interpreter.frames) + 1
    interpreter.frames[number] = Frame(enclosing, outside.frame, _aliases(info, node, owner))
    inside = outside.inside("call", node)._replace(
        script=script,
        frame=number,
        stack=(*outside.stack, info),
        breaks=[],
        continues=[],
        returns=[],
        yields=[],
    )
    with interpreter.entered(inside):
        _bind_parameters(interpreter, info, arguments, owner, isinstance(node, ast.Call))
        for decorator in info.node.decorator_list:
            context = interpreter.evaluate(decorator)
            interpreter.enter(context)
            if isinstance(context, Autocast):
                interpreter.record(AutocastEntered, decorator, context, info.node)
                interpreter.point = interpreter.point.inside("with", info.node)
        interpreter.execute(info.node.body)
        value = _join_returns(interpreter, entry)
        state = interpreter.state
        values = state.scopes.get(number, {}).values()
        # a function that is defined in this one may need its names later
        if not any(isinstance(one, Function) and (one.frame or 0) > 0 for one in values):
            state.drop_scope(number)
    return _context_of(outside, inside.yields) if info.is_context_manager else value


def _context_of(outside: ProgramPoint, yields: list[ProgramPoint]) -> Value:
    """Return the context in which a context manager that is made of a generator runs its block."""
    contexts: list[Value] = [
        UNKNOWN
        if point.grad_modes != outside.grad_modes
        else ContextManager("null")
        if point.autocast is outside.autocast
        else point.autocast
        for point in yields
    ]
    return reduce(join_values, contexts) if contexts else UNKNOWN


def _aliases(info: FunctionInfo, node: ast.AST, owner: Instance | None) -> dict[str, str]:
    """Return the names that are passed unchanged, by parameter; empty for other expressions.

    A literal is left out: its parameter is a setting, which somebody may change in the call.
    """
    if not isinstance(node, ast.Call):
        return {}
    arguments = info.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if owner is not None else names
    expressions = {k.arg: k.value for k in node.keywords if k.arg is not None}
    expressions |= dict(zip(names, node.args, strict=False))
    return {
        name: dotted_name(value) for name, value in expressions.items() if not isinstance(value, ast.Constant)
    }


def follow_callback(interpreter: Interpreter, function: Function, node: ast.AST) -> None:
    """Interpret a function that other code will call later, without any effect on the current state."""
    state, interpreter.path_state = interpreter.path_state, interpreter.state.fork()
    script, definition = interpreter.linked.script_of(function.info.node), function.info.node
    autocast = NO_AUTOCAST if script.sets_own_context(definition) else UNKNOWN_AUTOCAST
    with interpreter.entered(interpreter.point._replace(autocast=autocast, grad_modes=())):
        inline_call(interpreter, function.info, node, {}, None, function.frame)
    interpreter.path_state = state


def _bind_parameters(
    interpreter: Interpreter,
    info: FunctionInfo,
    values: Mapping[str, Value],
    owner: Instance | None,
    is_called: bool,
) -> None:
    arguments = info.node.args
    names = [*arguments.posonlyargs, *arguments.args]
    if owner is not None and names:
        interpreter.state.bind(interpreter.point.frame, names[0].arg, owner)
        names = names[1:]
    defaults = parameter_defaults(arguments)
    parameters = {argument.arg: argument for argument in (*names, *arguments.kwonlyargs)}
    annotations = [ast.unparse(a.annotation) for a in parameters.values() if a.annotation is not None]
    for index, argument in enumerate(parameters.values()):
        value = passed = values.get(argument.arg, values.get(str(index)) if index < len(names) else None)
        default = defaults.get(argument.arg)
        if value is None and default is not None:
            named = interpreter.evaluate(default)
            is_known = isinstance(named, LiteralValue | ImportedName | Instance)
            value = named if is_known else None
        if isinstance(value, LiteralValue) and not value.is_given:
            value = _literal_argument(value, info, is_called and "**" not in values)
        value = UNKNOWN if value is None else value
        if argument.annotation is not None and value is UNKNOWN:
            is_alone = annotations.count(ast.unparse(argument.annotation)) == 1
            value = annotated_value(interpreter, argument.annotation, argument.arg, is_alone=is_alone)
        if not isinstance(passed, Model):
            interpreter.state.forget(argument.arg)
        interpreter.state.bind(interpreter.point.frame, argument.arg, value)
    others = (
        v for k, v in values.items() if k not in parameters and not (k.isdigit() and int(k) < len(names))
    )
    # what the function does with these is not followed
    interpreter.escaped.update(v.key for v in others if isinstance(v, Scaler | Optimizer))
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            interpreter.state.bind(interpreter.point.frame, star.arg, UNKNOWN)


def _literal_argument(value: LiteralValue, info: FunctionInfo, is_certain: bool) -> Value:
    """Return the value of a parameter from a literal argument or default.

    A boolean is a setting that somebody may change in the file, or pass otherwise from another one, except in
    a function that only returns an expression. So is a device other than CUDA that is only a default.
    """
    if isinstance(value.value, str) and device_of(value) not in ("", "cuda") and not is_certain:
        return UNKNOWN
    is_expression = isinstance(info.node.body[0], ast.Return)
    if isinstance(value.value, bool) and not (is_certain and (is_expression or file_number(info.node))):
        return UNKNOWN
    return replace(value, is_given=is_certain)


def _join_returns(interpreter: Interpreter, entry: State) -> Value:
    ends = interpreter.point.returns
    if interpreter.path_state is not None:
        ends = [*ends, (LiteralValue(None), interpreter.path_state)]
    if not ends:
        interpreter.path_state = entry  # every path raises: continue as if it were not called
        return UNKNOWN
    value, state = ends[0]
    joined: State | None = state
    for other, end in ends[1:]:
        value, joined = join_values(value, other), join(joined, end)
    interpreter.path_state = joined
    return value


def annotated_value(
    interpreter: Interpreter, annotation: ast.expr, name: str, *, is_alone: bool = True
) -> Value:
    """Return the value of an annotation such as ``GradScaler``, ``"Optimizer"`` or ``Accelerator | None``.

    Only one instance of a class of the script can stand for it, so that it must be alone in its function.
    """
    names = _names_in(annotation)
    if names & _COLLECTIONS:
        return UNKNOWN
    kind = next((kind for kind, classes in _CLASSES.items() if names & classes), "")
    if kind:
        return interpreter.stand_in(kind, name, name)
    for framework in FRAMEWORKS:
        if any(path.rpartition(".")[2] in names for path in framework.constructors):
            return Managed(framework, Certainty.LIKELY)
    classes = interpreter.point.script.classes
    info = next((classes[n] for n in sorted(names) if n in classes), None)
    return (
        UNKNOWN if info is None or not info.fields or not is_alone else instance_of_class(interpreter, info)
    )


def _names_in(annotation: ast.expr) -> set[str]:
    """Return the names in an annotation, which may be quoted as a whole or in part."""
    names = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(simple_name(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            with suppress(SyntaxError):
                names |= _names_in(ast.parse(node.value, mode="eval").body)
    return names


def instance_of_class(interpreter: Interpreter, info: ClassInfo) -> Instance:
    """Return the instance that stands for any of a class, with the defaults of its fields."""
    owner = Instance(f"class {info.node.name}", info)
    if owner.key not in interpreter.state.scopes:
        bind_fields(interpreter, owner, None)
    return owner


def bind_fields(interpreter: Interpreter, owner: Instance, call: Call | None) -> None:
    """Bind the fields of an instance that a call makes, or of any instance of its class."""
    for index, field in enumerate(owner.info.fields):
        name = dotted_name(field.target)
        argument = None if call is None else call.get(index, name)
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
