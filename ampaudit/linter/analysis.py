"""Analyzes a script: interprets the module, then every function and class not called so far.

Both branches of a condition such as ``if use_amp:`` are interpreted and joined; then each of the most
frequent conditions is assumed to be true, and to be false. A diagnostic counts if it is certain in one of
these runs.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from functools import partial

from ampaudit.linter.diagnostic import Mistake
from ampaudit.linter.flow.evaluation import HANDLERS
from ampaudit.linter.flow.events import (
    Backward,
    BranchesFollowed,
    ClassFollowed,
    Clip,
    EntryPointFollowed,
    Event,
    ModelCall,
    PrecisionChosen,
    ScalerScale,
    ScalerStep,
    ScalerUnscale,
    ScriptFollowed,
)
from ampaudit.linter.flow.inlining import inline_call
from ampaudit.linter.flow.interpreter import (
    NO_AUTOCAST,
    UNKNOWN_AUTOCAST,
    Interpreter,
    ProgramPoint,
    StepLimitReached,
)
from ampaudit.linter.flow.managed import autocast_of_trainers
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.state import State
from ampaudit.linter.flow.syntax import parameter_defaults
from ampaudit.linter.flow.values import (
    Autocast,
    ClassInfo,
    FunctionInfo,
    ImportedName,
    Instance,
    LiteralValue,
    Value,
)
from ampaudit.linter.repair import with_safety
from ampaudit.linter.rules.rule import RULES
from ampaudit.linter.source_tree import LinkedScript

_MAX_CONDITIONS = 2


def analyze(
    linked: LinkedScript, earlier_names: Mapping[str, Value]
) -> tuple[list[Mistake], dict[str, Value]]:
    """Return the diagnostics of a script in the order of its lines, and the imported names at its end.

    Args:
        linked: Parsed script with the files that it imports, whose diagnostics come last.
        earlier_names: Values of the names that earlier code blocks define.
    """
    script = linked.main
    interpreter = Interpreter(linked, HANDLERS, earlier_names, RULES)
    events_by_entry: list[list[Event]] = []
    start = _imported(interpreter)
    end = _follow(interpreter, events_by_entry, start)
    for info in script.functions.values():
        if info.relevant and info not in interpreter.called:
            _follow(interpreter, events_by_entry, end, info)
    for class_info in script.classes.values():
        _follow_class(interpreter, events_by_entry, end, class_info)
    interpreter.guesses = False
    interpreter.judge(ScriptFollowed(events_by_entry))
    ordered = sorted(interpreter.diagnostics.items(), key=lambda pair: (pair[0][1:], pair[0][0]))
    names: dict[str, Value] = {k: v for k, v in end.scopes.get(0, {}).items() if isinstance(v, ImportedName)}
    return [with_safety(script, item) for _, item in ordered], names


def _imported(interpreter: Interpreter) -> State:
    """Return the state after the definitions at module level of the imported files."""
    with contextlib.suppress(StepLimitReached):
        for script in interpreter.linked.imported.values():
            with interpreter.entered(ProgramPoint(script, [], [], [], [], -script.number, muted=True)):
                interpreter.execute([node for node in script.tree.body if isinstance(node, _DEFINING)])
    interpreter.events.clear()
    interpreter.called.clear()
    interpreter.condition_counts.clear()
    interpreter.budget.next_entry_point()
    return interpreter.state


_DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try)


def _follow(
    interpreter: Interpreter,
    events_by_entry: list[list[Event]],
    start: State,
    info: FunctionInfo | None = None,
    owner: Instance | None = None,
    context: Autocast | None = None,
) -> State:
    """Interpret an entry point; then again with each of its most frequent conditions true and false.

    It is a function or, without one, the module; a method has an owner. Most functions are called in an
    unknown autocast context.
    """
    if context is None:
        script = interpreter.linked.main
        context = NO_AUTOCAST if info is None or script.sets_own_context(info.node) else UNKNOWN_AUTOCAST
    run = partial(_run, interpreter, start, info, owner, context)
    interpreter.condition_counts.clear()
    events = run()
    events_by_entry.append(events)
    end = interpreter.path_state or State()
    if any(isinstance(event, _TRAINING_EVENTS) for event in events):
        for condition, _ in interpreter.condition_counts.most_common(_MAX_CONDITIONS):
            runs = []
            for answer in (True, False):
                interpreter.assumptions = {condition: answer}
                runs.append(run())
            interpreter.judge(BranchesFollowed(*runs))
        interpreter.assumptions = {}
    return end


def _run(
    interpreter: Interpreter,
    start: State,
    info: FunctionInfo | None,
    owner: Instance | None,
    context: Autocast,
) -> list[Event]:
    interpreter.path_state, interpreter.guesses = start.fork(), False
    main = interpreter.linked.main
    point = ProgramPoint(main, [], [], [], [], autocast=context)
    with contextlib.suppress(StepLimitReached), interpreter.entered(point):
        if info is None:
            interpreter.execute(main.tree.body)
        else:
            arguments = {} if owner is not None else _never_passed(main, info)
            inline_call(interpreter, info, info.node, arguments, None if info.is_static else owner)
    events = list(interpreter.events.values())
    interpreter.events = {}
    interpreter.budget.next_entry_point()
    if events and not interpreter.managed:
        interpreter.judge(EntryPointFollowed(events))
    return events


def _never_passed(script: Script, info: FunctionInfo) -> dict[str, Value]:
    """Return the parameters with default ``None`` that no call of the function passes."""
    name, arguments = info.node.name, info.node.args
    defaults = parameter_defaults(arguments).items()
    optional = [name for name, d in defaults if isinstance(d, ast.Constant) and d.value is None]
    if not optional or "(call)" not in script.usage.methods.get(name, ()):
        return {}
    calls = [c for c in script.of_type(ast.Call) if isinstance(c.func, ast.Name) and c.func.id == name]
    if len(calls) != sum(node.id == name for node in script.of_type(ast.Name)):
        return {}  # other code may call it as well
    most = max((len(call.args) for call in calls), default=0)
    passed = {keyword.arg for call in calls for keyword in call.keywords}
    if None in passed or any(isinstance(a, ast.Starred) for call in calls for a in call.args):
        return {}
    passed.update(argument.arg for argument in (*arguments.posonlyargs, *arguments.args)[:most])
    return {name: LiteralValue(None, is_given=True) for name in optional if name not in passed}


def _follow_class(
    interpreter: Interpreter, events_by_entry: list[list[Event]], end: State, info: ClassInfo
) -> None:
    owner, before = Instance(f"class {info.node.name}", info), len(events_by_entry)
    interpreter.managed = info.derives("LightningModule", "LightningLite", "Callback")
    start = info.method("__init__")
    if start is not None and info.is_relevant:
        end = _follow(interpreter, events_by_entry, end, start, owner)
    cast = autocast_of_trainers(interpreter) if info.derives("LightningModule") else ""
    context = Autocast(True, "cuda", cast, explicit=False) if cast else None
    for name, method in info.methods.items():
        autocast = context if name in _STEPS_OF_LIGHTNING else None
        matters = method.relevant or autocast is not None
        if matters and method is not start and method not in interpreter.called:
            _follow(interpreter, events_by_entry, end, method, owner, autocast)
    interpreter.managed = False
    events = [event for entry in events_by_entry[before:] for event in entry]
    interpreter.judge(ClassFollowed(info, events))


_STEPS_OF_LIGHTNING = ("forward", "training_step", "validation_step", "test_step", "predict_step")


_TRAINING_EVENTS = (Backward, ModelCall, PrecisionChosen, ScalerScale, ScalerStep, ScalerUnscale, Clip)
