"""Follows a script without running it: what names stand for, what is entered, what a branch leaves open."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ampaudit.lint.diagnostic import Diagnostic, Event, Fix, Guard, position_of
from ampaudit.lint.flow.joining import item_of
from ampaudit.lint.flow.script import Script, condition_of, dotted_name
from ampaudit.lint.flow.state import State
from ampaudit.lint.flow.torch_names import CONVENTIONAL_NAMES
from ampaudit.lint.flow.values import (
    UNKNOWN,
    UNSCALED_TENSOR,
    Autocast,
    BoundMethod,
    Class,
    Constant,
    Function,
    FunctionInfo,
    ImportedName,
    Instance,
    KnownItems,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Tensor,
    Value,
)

__all__ = ["NO_AUTOCAST", "UNKNOWN_AUTOCAST", "Interpreter", "LoopExits", "StepLimitReached"]

NO_AUTOCAST = Autocast(False, None, "")
UNKNOWN_AUTOCAST = Autocast(None, None, None, explicit=False)  # what encloses this is not known
_MAX_STEPS = 60_000  # of a root; what is longer is left unread from there on
_BUILTINS = frozenset(
    "abs all any bool dict enumerate float getattr hasattr int isinstance iter len list map max min next open"
    " print range repr reversed round set sorted str sum super tuple type zip".split()
)


class StepLimitReached(Exception):
    """A script that takes too many steps to follow."""


@dataclass(slots=True)
class LoopExits:
    """States in which a loop's body is left early."""

    continues: list[State] = field(default_factory=list)
    breaks: list[State] = field(default_factory=list)


Handlers = Mapping[type[ast.AST], Callable[["Interpreter", Any], Any]]


class Interpreter:
    """The reader at one place of a script.

    Args:
        script: what is read.
        statements: what to do with each kind of statement.
        expressions: what value each kind of expression has.
        assumptions: conditions by their text that are taken to be true or false.
        known: names that are given from outside, such as imports of an earlier cell.
    """

    def __init__(
        self,
        script: Script,
        statements: Handlers,
        expressions: Handlers,
        assumptions: Mapping[str, bool],
        known: Mapping[str, Value],
    ) -> None:
        self.script = script
        self.statements, self.expressions = statements, expressions
        self.assumptions, self.known = dict(assumptions), known
        self.condition_counts: Counter[str] = Counter()  # conditions that were met
        self.path_state: State | None = State()
        self.frame, self._frames = 0, 1
        self.enclosing_frames: dict[int, int] = {}
        self.caller_frames: dict[int, int] = {}
        self.aliases: dict[int, dict[str, str]] = {}  # parameters, by what was handed over for them
        self.guards: tuple[Guard, ...] = ()
        self.autocasts: list[Autocast] = [NO_AUTOCAST]
        self.grad_modes: list[str] = []  # no_grad, no_sync
        self.loops: list[LoopExits] = []
        self.returns: list[tuple[Value, State]] = []
        self.statement: ast.stmt | None = None
        self.diagnostics: dict[tuple[str, int, int], Diagnostic] = {}
        self.events: dict[tuple[str, ast.AST, tuple[Guard, ...]], Event] = {}
        self.scalers: dict[str, Scaler] = {}
        self.escaped: set[str] = set()
        self.called: set[FunctionInfo] = set()
        self.stack: list[FunctionInfo] = []
        self.managed = False
        self.repetitions = 0
        self._steps = 0

    # what is seen

    def report(self, code: str, node: ast.AST, cause: str, advice: str, fix: Fix | None = None) -> None:
        """Report a mistake, once per place."""
        self.diagnostics.setdefault((code, *position_of(node)), Diagnostic(code, node, cause, advice, fix))

    def record_event(self, kind: str, node: ast.AST, **data: Any) -> None:
        """Record that something happens; the second time round a loop adds nothing."""
        key = (kind, node, self.guards)
        if key not in self.events:
            self.events[key] = Event(kind, node, self.guards, self.statement, data)

    def reset_steps(self) -> None:
        """Count the steps anew, for the next root."""
        self._steps = 0

    @property
    def state(self) -> State:
        """The state, where there is one: statements are followed only while it is."""
        assert self.path_state is not None
        return self.path_state

    @property
    def is_first_iteration(self) -> bool:
        """Whether no loop around is gone through again."""
        return self.repetitions == 0

    @property
    def autocast(self) -> Autocast:
        """The innermost autocast."""
        return self.autocasts[-1]

    @property
    def call_path(self) -> str:
        """The calls that lead here: a function that is called twice does two things."""
        calls = (
            guard.node for guard in self.guards if guard.kind == "call" and isinstance(guard.node, ast.Call)
        )
        return "".join(f" from L{call.lineno}:{call.col_offset}" for call in calls)

    def assumed_truth(self, test: ast.expr) -> bool | None:
        """Whether a condition is assumed."""
        if isinstance(test, ast.BoolOp):
            parts = [self.assumed_truth(part) for part in test.values]
            decisive = not isinstance(test.op, ast.And)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        flag = condition_of(test)
        if flag is None:
            return None
        text = self._as_named_by_caller(flag[0])
        self.condition_counts[text] += 1
        assumed = self.assumptions.get(text)
        return None if assumed is None else assumed == flag[1]

    def _as_named_by_caller(self, text: str) -> str:
        """What a parameter is called by whoever calls: a condition on it is the same condition."""
        frame: int | None = self.frame
        while frame is not None and text in self.aliases.get(frame, ()):
            text, frame = self.aliases[frame][text], self.caller_frames.get(frame)
        return text

    # going through

    def execute(self, body: list[ast.stmt]) -> None:
        """Statements in order, until the path ends."""
        outside = self.guards
        for statement in body:
            if self.path_state is None:
                break
            self.statement = statement
            handler = self.statements.get(type(statement))
            if handler is not None:
                handler(self, statement)
        self.guards = outside

    def evaluate(self, node: ast.expr | None) -> Value:
        """What an expression stands for; follows the calls in it."""
        if node is None:
            return UNKNOWN
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise StepLimitReached
        handler = self.expressions.get(type(node))
        value: Value = handler(self, node) if handler is not None else UNKNOWN
        return value

    @contextmanager
    def guarded(self, kind: str, node: ast.AST) -> Iterator[None]:
        """Inside a loop, a branch or a call."""
        outside = self.guards
        self.guards = (*outside, Guard(kind, node))
        try:
            yield
        finally:
            self.guards = outside

    # names

    def lookup(self, name: str, text: str = "") -> Value:
        """What a name stands for here."""
        frame: int | None = self.frame
        value: Value | None = None
        while frame is not None and value is None:
            value = self.state.value(frame, name)
            frame = self.enclosing_frames.get(frame)
        if value is None:
            value = self._global(name)
        return self.infer_from_usage(value, text or name)

    def _global(self, name: str) -> Value:
        if name in self.script.functions:
            return Function(self.script.functions[name], 0)
        if name in self.script.classes:
            return Class(self.script.classes[name])
        if name in self.known:
            return self.known[name]
        if name in CONVENTIONAL_NAMES:
            return ImportedName(CONVENTIONAL_NAMES[name])
        return ImportedName(f"builtins.{name}") if name in _BUILTINS else UNKNOWN

    def infer_from_usage(self, value: Value, text: str) -> Value:
        """A value that is not known, by what the script does with its name."""
        unsure = (
            value is UNKNOWN or value is UNSCALED_TENSOR or (isinstance(value, Tensor) and value.node is None)
        )
        if isinstance(value, Constant) and value.value is None:
            unsure = True
        if not unsure or not text:
            return value
        kind, key = self.script.usage.kind(text), f"name {text}"
        if kind == "scaler":
            return self.register_scaler(Scaler(key, text=text))
        if kind == "optimizer":
            return Optimizer(key)
        if kind == "scheduler":
            return Scheduler(key)
        return Model(key) if kind == "model" else value

    def register_scaler(self, scaler: Scaler) -> Scaler:
        """Note that there is such a scaler."""
        self.scalers.setdefault(scaler.key, scaler)
        return scaler

    def assign(self, target: ast.expr, value: Value) -> None:
        """Bind a name, an attribute, or several."""
        if isinstance(target, ast.Name):
            self.state.bind(self.frame, target.id, value)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            if isinstance(owner, Instance):
                self.state.bind(owner.key, target.attr, value)
            elif text := dotted_name(target):
                self.state.bind(self.frame, text, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = value.items if isinstance(value, KnownItems) and not value.repeated else ()
            for index, part in enumerate(target.elts):
                self.assign(part, items[index] if index < len(items) else item_of(value))
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN)

    def assign_item(self, target: ast.expr, value: Value) -> None:
        """Bind what a loop goes through: one of several."""
        self.assign(target, value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                one = self.lookup(node.id)
                if isinstance(one, Optimizer):
                    self.state.bind(self.frame, node.id, replace(one, one_of_several=True))

    def new_frame(self) -> int:
        """For the names of a call."""
        self._frames += 1
        return self._frames

    def bound_method(self, owner: Instance, name: str) -> BoundMethod | None:
        """A method of an object, by name."""
        info = owner.info.method(name)
        return BoundMethod(owner, info) if info is not None else None
