"""Follows a script without running it: what names stand for, what is entered, what a branch leaves open."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ampaudit.lint.found import Event, Found, Guard, Repair
from ampaudit.lint.names import CONVENTIONS
from ampaudit.lint.script import Script, dotted, flag_of, has_own_context
from ampaudit.lint.state import State, join
from ampaudit.lint.values import (
    OPAQUE,
    UNKNOWN,
    Autocast,
    Bound,
    ClassValue,
    Const,
    Context,
    Function,
    FunctionInfo,
    Instance,
    Listed,
    Managed,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Symbol,
    Tensor,
    Value,
    join_values,
    part_of,
)

__all__ = ["OFF", "UNSURE", "Loop", "Machine", "TooLong"]

OFF = Autocast(False, None, "")
UNSURE = Autocast(None, None, None, plain=False)  # what encloses this is not known
_MOST_STEPS = 60_000  # of a root; what is longer is left unread from there on
_DEEPEST = 8
_BUILTINS = frozenset(
    "abs all any bool dict enumerate float getattr hasattr int isinstance iter len list map max min next open"
    " print range repr reversed round set sorted str sum super tuple type zip".split()
)


class TooLong(Exception):
    """A script that takes too many steps to follow."""


@dataclass(slots=True)
class Loop:
    """States in which a loop's body is left early."""

    continues: list[State] = field(default_factory=list)
    breaks: list[State] = field(default_factory=list)


Handlers = Mapping[type[ast.AST], Callable[["Machine", Any], Any]]


class Machine:
    """The reader at one place of a script.

    Args:
        script: what is read.
        statements: what to do with each kind of statement.
        expressions: what value each kind of expression has.
        assume: conditions by their text that are taken to be true or false.
        known: names that are given from outside, such as imports of an earlier cell.
    """

    def __init__(
        self,
        script: Script,
        statements: Handlers,
        expressions: Handlers,
        assume: Mapping[str, bool],
        known: Mapping[str, Value],
    ) -> None:
        self.script = script
        self.statements, self.expressions = statements, expressions
        self.assume, self.known = dict(assume), known
        self.flags: Counter[str] = Counter()  # conditions that were met
        self.state: State | None = State()
        self.frame, self._frames = 0, 1
        self.parents: dict[int, int] = {}
        self.guards: tuple[Guard, ...] = ()
        self.contexts: list[Autocast] = [OFF]
        self.grad: list[str] = []  # no_grad, no_sync
        self.loops: list[Loop] = []
        self.returns: list[tuple[Value, State]] = []
        self.statement: ast.stmt | None = None
        self.found: dict[tuple[str, int, int], Found] = {}
        self.events: dict[tuple[str, ast.AST, tuple[Guard, ...]], Event] = {}
        self.optimizers: set[str] = set()
        self.scalers: dict[str, Scaler] = {}
        self.escaped: set[str] = set()
        self.called: set[FunctionInfo] = set()
        self.stack: list[FunctionInfo] = []
        self.managed = False
        self.rounds = 0
        self._steps = 0

    # what is seen

    def say(self, code: str, node: ast.AST, cause: str, advice: str, repair: Repair | None = None) -> None:
        """Report a mistake, once per place."""
        place = (code, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        self.found.setdefault(place, Found(code, node, cause, advice, repair))

    def note(self, kind: str, node: ast.AST, **data: Any) -> None:
        """Record that something happens; the second time round a loop adds nothing."""
        key = (kind, node, self.guards)
        if key not in self.events:
            self.events[key] = Event(kind, node, self.guards, self.statement, data)

    def restart(self) -> None:
        """Count the steps anew, for the next root."""
        self._steps = 0

    @property
    def live(self) -> State:
        """The state, where there is one: statements are followed only while it is."""
        assert self.state is not None
        return self.state

    @property
    def first_round(self) -> bool:
        """Whether no loop around is gone through again."""
        return self.rounds == 0

    @property
    def autocast(self) -> Autocast:
        """The innermost autocast."""
        return self.contexts[-1]

    @property
    def callers(self) -> str:
        """The calls that lead here: a function that is called twice does two things."""
        calls = (
            guard.node for guard in self.guards if guard.kind == "call" and isinstance(guard.node, ast.Call)
        )
        return "".join(f" from L{call.lineno}:{call.col_offset}" for call in calls)

    def truth(self, test: ast.expr) -> bool | None:
        """Whether a condition is assumed."""
        if isinstance(test, ast.BoolOp):
            parts = [self.truth(part) for part in test.values]
            decisive = not isinstance(test.op, ast.And)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        flag = flag_of(test)
        if flag is None:
            return None
        self.flags[flag[0]] += 1
        assumed = self.assume.get(flag[0])
        return None if assumed is None else assumed == flag[1]

    # going through

    def block(self, body: list[ast.stmt]) -> None:
        """Statements in order, until the path ends."""
        outside = self.guards
        for statement in body:
            if self.state is None:
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
        if self._steps > _MOST_STEPS:
            raise TooLong
        handler = self.expressions.get(type(node))
        value: Value = handler(self, node) if handler is not None else UNKNOWN
        return value

    @contextmanager
    def guarded(self, kind: str, node: ast.AST, branch: bool = True) -> Iterator[None]:
        """Inside a loop, a branch or a call."""
        outside = self.guards
        self.guards = (*outside, Guard(kind, node, branch))
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
            value = self.live.value(frame, name)
            frame = self.parents.get(frame)
        if value is None:
            value = self._global(name)
        return self.by_use(value, text or name)

    def _global(self, name: str) -> Value:
        if name in self.script.functions:
            return Function(self.script.functions[name], 0)
        if name in self.script.classes:
            return ClassValue(self.script.classes[name])
        if name in self.known:
            return self.known[name]
        if name in CONVENTIONS:
            return Symbol(CONVENTIONS[name])
        return Symbol(f"builtins.{name}") if name in _BUILTINS else UNKNOWN

    def by_use(self, value: Value, text: str) -> Value:
        """A value that is not known, by what the script does with its name."""
        unsure = value is UNKNOWN or value is OPAQUE or (isinstance(value, Tensor) and value.node is None)
        if isinstance(value, Const) and value.value is None:
            unsure = True
        if not unsure or not text:
            return value
        kind, key = self.script.ducks.kind(text), f"name {text}"
        if kind == "scaler":
            return self.seen_scaler(Scaler(key, text=text))
        if kind == "optimizer":
            self.optimizers.add(key)
            return Optimizer(key)
        if kind == "scheduler":
            return Scheduler(key)
        return Model(key) if kind == "model" else value

    def seen_scaler(self, scaler: Scaler) -> Scaler:
        """Note that there is such a scaler."""
        self.scalers.setdefault(scaler.key, scaler)
        return scaler

    def assign(self, target: ast.expr, value: Value) -> None:
        """Bind a name, an attribute, or several."""
        if isinstance(target, ast.Name):
            self.live.bind(self.frame, target.id, value)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            if isinstance(owner, Instance):
                self.live.bind(owner.key, target.attr, value)
            elif text := dotted(target):
                self.live.bind(self.frame, text, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = value.items if isinstance(value, Listed) and not value.one else ()
            for index, part in enumerate(target.elts):
                self.assign(part, items[index] if index < len(items) else part_of(value))
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN)

    def assign_item(self, target: ast.expr, value: Value) -> None:
        """Bind what a loop goes through: one of several."""
        self.assign(target, value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                one = self.lookup(node.id)
                if isinstance(one, Optimizer):
                    self.live.bind(self.frame, node.id, replace(one, many=True))

    # functions of the file

    def enter(
        self,
        info: FunctionInfo,
        node: ast.AST,
        given: Mapping[str, Value],
        owner: Instance | None,
        frame: int,
    ) -> Value:
        """Follow a call into a function of the file; what it returns."""
        if info in self.stack or len(self.stack) >= _DEEPEST:
            return UNKNOWN
        self.called.add(info)
        saved = (self.frame, self.loops, self.returns, self.statement, self.contexts, self.grad)
        self._frames += 1
        self.frame, self.loops, self.returns = self._frames, [], []
        self.contexts, self.grad = list(self.contexts), list(self.grad)
        self.parents[self.frame] = frame
        self.stack.append(info)
        entry = self.live
        self._bind(info, given, owner)
        try:
            with self.guarded("call", node):
                self._decorated(info)
                self.block(info.node.body)
            return self._returned(entry)
        finally:
            self.stack.pop()
            self._leave()
            self.frame, self.loops, self.returns, self.statement, self.contexts, self.grad = saved

    def _leave(self) -> None:
        """Drop the names of the function that returns, unless one that is defined in it may need them."""
        names = self.live.scopes.get(self.frame, {}) if self.state is not None else {}
        if self.state is not None and not any(isinstance(v, Function) and v.frame for v in names.values()):
            self.state.leave(self.frame)

    def callback(self, function: Function, node: ast.AST) -> None:
        """Follow a function that somebody else will call, some time; what it does changes nothing here."""
        state, contexts, grad = self.state, self.contexts, self.grad
        self.state = self.live.copy()
        for fact in ("grads", "unscaled", "stepped", "updated", "early", "zeroed", "last"):
            self.live.clear(fact)
        self.contexts, self.grad = [OFF if has_own_context(function.info.node) else UNSURE], []
        self.enter(function.info, node, {}, None, function.frame)
        self.state, self.contexts, self.grad = state, contexts, grad

    def _decorated(self, info: FunctionInfo) -> None:
        for decorator in info.node.decorator_list:
            value = self.evaluate(decorator)
            if isinstance(value, Autocast):
                self.contexts.append(value)
            elif isinstance(value, Context):
                self.grad.append(value.kind)

    def _bind(self, info: FunctionInfo, given: Mapping[str, Value], owner: Instance | None) -> None:
        arguments = info.node.args
        names = [*arguments.posonlyargs, *arguments.args]
        if owner is not None and names:
            self.live.bind(self.frame, names[0].arg, owner)
            names = names[1:]
        defaults = dict(zip([a.arg for a in names][::-1], arguments.defaults[::-1], strict=False))
        defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
        for index, argument in enumerate([*names, *arguments.kwonlyargs]):
            value = given.get(argument.arg, given.get(str(index)))
            if value is None:
                default = defaults.get(argument.arg)
                value = Const(default.value) if isinstance(default, ast.Constant) else UNKNOWN
            if argument.annotation is not None and value is UNKNOWN:
                value = self._annotated(argument)
            self.live.bind(self.frame, argument.arg, value)
        for star in (arguments.vararg, arguments.kwarg):
            if star is not None:
                self.live.bind(self.frame, star.arg, UNKNOWN)

    def _annotated(self, argument: ast.arg) -> Value:
        text = argument.annotation
        name = text.value if isinstance(text, ast.Constant) else dotted(text) if text is not None else ""
        last = str(name).rpartition(".")[2]
        if last == "GradScaler":
            return self.seen_scaler(Scaler(f"name {argument.arg}", text=argument.arg))
        if last == "Optimizer":
            self.optimizers.add(f"name {argument.arg}")
            return Optimizer(f"name {argument.arg}")
        return Managed() if last in ("Accelerator", "Fabric", "DeepSpeedEngine") else UNKNOWN

    def _returned(self, entry: State) -> Value:
        ends = self.returns
        if self.state is not None:
            ends = [*ends, (Const(None), self.state)]
        if not ends:
            self.state = entry  # every path raises: go on as if it were not called
            return UNKNOWN
        value, state = ends[0]
        joined: State | None = state
        for other, end in ends[1:]:
            value, joined = join_values(value, other), join(joined, end)
        self.state = joined
        return value

    def bound(self, owner: Instance, name: str) -> Bound | None:
        """A method of an object, by name."""
        info = owner.info.method(name)
        return Bound(owner, info) if info is not None else None
