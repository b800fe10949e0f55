"""Interprets a script abstractly: tracks what names stand for, contexts, branches and calls."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeAlias

from ampaudit.linter.diagnostic import Certainty, Mistake, file_number, key_of, position_of
from ampaudit.linter.flow.events import Event, Guard, ScalerReplaced
from ampaudit.linter.flow.script import Script, ScriptTooLong
from ampaudit.linter.flow.state import State, item_of
from ampaudit.linter.flow.syntax import condition_of, dotted_name, join_names, walk
from ampaudit.linter.flow.torch_names import CONVENTIONAL_NAMES, canonical_name
from ampaudit.linter.flow.values import (
    UNKNOWN,
    Autocast,
    ContextManager,
    DictLiteral,
    FunctionInfo,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    Managed,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Tensor,
    Value,
    literal_of,
)
from ampaudit.linter.source_tree import LinkedScript

STEPS_AT_ONCE: Final = 16
_MAX_STEPS: Final = 60_000  # per entry point; the rest of a longer one is skipped
_MAX_STEPS_ELSEWHERE: Final = 20_000  # per script, in files that it imports
_SIZE_PER_STEP: Final = 16  # facts, names and events that cost as much as a step
_MAX_WORK: Final = 3_000_000  # per script, which is not read beyond it: some seconds
NO_AUTOCAST = Autocast(False, None, "")
UNKNOWN_AUTOCAST = Autocast(None, None, None, explicit=False)  # the context around is not known
_BUILTINS = frozenset(
    "abs all any bool dict enumerate filter float getattr hasattr int isinstance iter len list map max min"
    " next open print range repr reversed round set sorted str sum super tuple type zip".split()
)


@dataclass(frozen=True, slots=True)
class LintRule:
    """A rule of the linter.

    Attributes:
        code: Code of its mistakes.
        check: Function of the interpreter and an event that yields them.
        of_dtypes: Whether it is about dtypes, and not about a scaler or a loop: then it also speaks where a
            framework runs the code, and is as certain as the class of the model.
    """

    code: str
    check: Callable[[Interpreter, Any], Iterator[Mistake]]
    of_dtypes: bool


P = ParamSpec("P")
EventKind: TypeAlias = Callable[Concatenate[ast.AST, tuple[Guard, ...], ast.stmt | None, Autocast, P], Event]
Handlers = Mapping[type[ast.AST], Callable[["Interpreter", Any], Any]]


class ProgramPoint(NamedTuple):
    """A point of a script with the calls, branches and blocks around it.

    Attributes:
        script: Script that the flow is in.
        breaks: States in which the innermost loop is left.
        continues: States in which its iteration is left.
        returns: Values and states with which the function returns.
        yields: Points at which the function yields.
        frame: Scope of the function's names; zero for the module, negative for an imported one.
        autocast: Innermost autocast context.
        grad_modes: Other contexts, such as ``no_grad`` and ``no_sync``.
        stack: Functions that are followed, outermost first.
        weights: 16-bit dtype of the model whose code is followed, else empty.
        is_first_iteration: Whether each loop around is in its first iteration.
        muted: Whether nothing is reported.
        guards: Calls, loops, branches and blocks, outermost first.
    """

    script: Script
    breaks: list[State]
    continues: list[State]
    returns: list[tuple[Value, State]]
    yields: list[ProgramPoint]
    frame: int = 0
    autocast: Autocast = NO_AUTOCAST
    grad_modes: tuple[str, ...] = ()
    stack: tuple[FunctionInfo, ...] = ()
    weights: str = ""
    is_first_iteration: bool = True
    muted: bool = False
    guards: tuple[Guard, ...] = ()

    def inside(self, kind: str, node: ast.AST) -> ProgramPoint:
        """Return the point inside a loop, a branch, a block or a call."""
        return ProgramPoint(*self[:-1], (*self.guards, Guard(kind, node)))


@dataclass(frozen=True, slots=True)
class Frame:
    """A call of a function, which has names of its own.

    Attributes:
        enclosing: Frame that defines the function.
        caller: Frame that calls it.
        aliases: Names in the caller, by parameter; empty for other expressions.
    """

    enclosing: int
    caller: int
    aliases: dict[str, str]


class Interpreter:
    """An abstract interpreter: what it knows of a script, and the program point where it is.

    Args:
        linked: Parsed script with the files that it imports.
        handlers: Handlers by kind of statement or expression.
        imported: Values of names that earlier code defines, such as the imports of another cell.
        rules: Rules by what they listen to.
    """

    def __init__(
        self,
        linked: LinkedScript,
        handlers: Handlers,
        imported: Mapping[str, Value],
        rules: Mapping[type, Sequence[LintRule]],
    ) -> None:
        self.linked, self.handlers, self.imported, self.rules = linked, handlers, imported, rules
        self.point = ProgramPoint(linked.main, [], [], [], [])
        self.statement: ast.stmt | None = None
        self.path_state: State | None = State()
        self.diagnostics: dict[tuple[str, int, int], Mistake] = {}
        self.events: dict[tuple[type[Event], ast.AST, tuple[Guard, ...]], Event] = {}
        self.assumptions: dict[str, bool] = {}  # the assumed truth of conditions, by their text
        self.condition_counts: Counter[str] = Counter()  # how often each condition was met
        self.frames: dict[int, Frame] = {}
        self.called: set[FunctionInfo] = set()
        self.lambdas: dict[ast.Lambda, FunctionInfo] = {}
        self.completed_calls: dict[tuple[ast.Call, ast.Call], ast.Call] = {}  # of partials
        self.scalers: dict[str, Scaler] = {}
        self.escaped: set[str] = set()
        self.tests_of_counts: set[ast.expr] = set()  # conditions that hold for some batches only
        self.models_by_optimizer: dict[str, frozenset[str]] = {}
        self.half_parameter: ast.AST | None = None  # of the module that is being made
        self.dtype_uses = DtypeUses()
        self.guesses = False  # whether the class of a model was guessed
        self.managers: set[Managed] = set()
        self.managed = False  # whether a framework runs the code that is followed
        self.sharded: set[str] = set()  # keys of the models that FSDP shards
        self.sharded_dtype = ""  # in which FSDP gathers parameters, and so computes
        self.replicated: set[str] = set()  # and of those that DDP wraps, in another branch perhaps
        self._expressions = 0
        self.budget = StepBudget()

    @property
    def state(self) -> State:
        """The state of the current path, which exists while statements are executed."""
        assert self.path_state is not None
        return self.path_state

    # the program point

    @contextmanager
    def entered(self, point: ProgramPoint) -> Iterator[None]:
        """Be at a point inside the current one."""
        outside, statement = self.point, self.statement
        self.point = point
        try:
            yield
        finally:
            self.point, self.statement = outside, statement

    def enter(self, context: Value) -> bool:
        """Enter a context manager, until the point is left; return whether it is a known one."""
        if isinstance(context, Autocast):
            self.point = self.point._replace(autocast=context)
        elif isinstance(context, ContextManager):
            self.point = self.point._replace(grad_modes=(*self.point.grad_modes, context.kind))
        return isinstance(context, Autocast | ContextManager)

    @property
    def calls(self) -> list[ast.Call]:
        """The calls that lead here, outermost first."""
        guards = self.point.guards
        return [node for kind, node in guards if kind == "call" and isinstance(node, ast.Call)]

    @property
    def call_path(self) -> str:
        """The calls that lead here, as text, which tells apart two calls of one function."""
        return "".join(f" from {key_of(call)}" for call in self.calls)

    def event(self, kind: EventKind[P], node: ast.AST, *details: P.args, **named: P.kwargs) -> Event:
        """Return an event at a node, where the flow is."""
        place, point = self._reported(node), self.point
        return kind(place, point.guards, self.statement, point.autocast, *details, **named)

    def _reported(self, node: ast.AST) -> ast.AST:
        """Return where to report a node: one in a known module, where that is called."""
        is_linted, number = self.linked.tree.is_linted, file_number(node)
        if number == 0 or is_linted(number):
            return node
        return next((call for call in reversed(self.calls) if is_linted(file_number(call))), node)

    # diagnostics and events

    def _report(self, rule: LintRule, mistake: Mistake) -> None:
        """Report a mistake, once per rule and position, with the highest certainty of its paths."""
        if self.point.muted or (self.managed and not rule.of_dtypes):
            return
        node = self._reported(mistake.node)
        is_guess = (  # a name that is used like a scaler may be no scaler of torch
            self.guesses if rule.of_dtypes else any(scaler.node is None for scaler in self.scalers.values())
        )
        certainty = min(mistake.certainty, Certainty.LIKELY) if is_guess else mistake.certainty
        key = (rule.code, *position_of(node))
        earlier = self.diagnostics.get(key)
        if earlier is None or earlier.certainty < certainty:
            self.diagnostics[key] = replace(mistake, node=node, certainty=certainty, code=rule.code)

    def record(self, kind: EventKind[P], node: ast.AST, *details: P.args, **named: P.kwargs) -> None:
        """Record an event, once per type, node and guards, before it takes effect on the state."""
        event = self.event(kind, node, *details, **named)
        self.events.setdefault((type(event), event.node, event.guards), event)
        self.judge(event)

    def judge(self, subject: object) -> None:
        """Report what the rules that listen to this kind of event say of one."""
        for rule in self.rules.get(type(subject), ()):
            for mistake in rule.check(self, subject):
                self._report(rule, mistake)

    def record_dtypes(self, node: ast.AST, operands: Iterable[Value]) -> None:
        """Record the dtypes of the operands of an op, only likely if the class of the model was guessed."""
        certainty = Certainty.LIKELY if self.guesses else Certainty.KNOWN
        for value in operands:
            if isinstance(value, Tensor) and (dtype := value.dtype or value.weights_dtype):
                sure = certainty if value.dtype else Certainty.LIKELY
                certainties = self.dtype_uses.ops.setdefault(dtype, {})
                certainties[node] = max(sure, certainties.get(node, sure))

    def record_number(self, node: ast.expr, value: Value) -> None:
        """Record the number that a name stands for where it is an operand."""
        number = literal_of(value)
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(number, bool):
            return
        if isinstance(number, int | float):
            self.dtype_uses.numbers.setdefault(node, number)

    # conditions

    def assumed_truth(self, test: ast.expr) -> bool | None:
        """Return the assumed truth of a condition; ``None`` if nothing is assumed."""
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
        if not text:  # computed by the caller, and no setting
            return None
        text, positive = self.point.script.setting(text, flag[1])
        if text in self.point.script.changing:
            return None
        self.condition_counts[text] += 1
        assumed = self._assumed(text)
        return None if assumed is None else assumed == positive

    def _assumed(self, text: str) -> bool | None:
        """Return the assumed truth of a setting; what equals one value equals no other."""
        if text in self.assumptions or " == " not in text:
            return self.assumptions.get(text)
        name = text.partition(" == ")[0]
        is_other = any(
            holds and other.partition(" == ")[0] == name for other, holds in self.assumptions.items()
        )
        return False if is_other else None

    def _as_named_by_caller(self, text: str) -> str:
        """Return the caller's name for a parameter, so that a condition on both is the same condition."""
        frame = self.frames.get(self.point.frame)
        while frame is not None and text in frame.aliases:
            text, frame = frame.aliases[text], self.frames.get(frame.caller)
        return text

    # execution

    def execute(self, body: list[ast.stmt]) -> None:
        """Execute statements in order until the path ends."""
        outside, handlers = self.point, self.handlers
        is_half = outside.autocast.computes_float16
        for statement in body:
            if self.path_state is None:
                break
            self.statement = statement
            if is_half:
                self.dtype_uses.half_lines.add(statement.lineno)
            handler = handlers.get(type(statement))
            if handler is not None:
                handler(self, statement)
        self.point = outside

    def evaluate(self, node: ast.expr | None) -> Value:
        """Evaluate an expression, including the calls in it."""
        if node is None:
            return UNKNOWN
        self._expressions += 1
        if not self._expressions % STEPS_AT_ONCE:
            state = self.path_state
            # each branch copies and joins the facts and names, and rules compare the events
            size = 0 if state is None else len(state.facts) + len(state.scopes.get(self.point.frame, ()))
            self.budget.spend(size + len(self.events), self.point.script is not self.linked.main)
        if type(node) is ast.Name:
            return self.lookup(node.id)
        handler = self.handlers.get(type(node))
        return UNKNOWN if handler is None else handler(self, node)

    # names

    def lookup(self, name: str) -> Value:
        """Return the value of a name."""
        frame, scopes = self.point.frame, self.state.scopes
        value = scopes[frame].get(name) if frame in scopes else None
        while value is None and frame in self.frames:
            frame = self.frames[frame].enclosing
            value = scopes[frame].get(name) if frame in scopes else None
        return self.infer_from_usage(self._global(name) if value is None else value, name)

    def _global(self, name: str) -> Value:
        if name in self.imported:
            return self.imported[name]
        if name in CONVENTIONAL_NAMES:
            return ImportedName(CONVENTIONAL_NAMES[name])
        return ImportedName(f"builtins.{name}") if name in _BUILTINS else UNKNOWN

    def member(self, module: str, name: str) -> Value:
        """Return a member of a module: its value, if the module is a file that is followed."""
        importer, path, value = self.point.script, join_names(module, name), None
        # a package mostly passes on what a module in it defines
        script = self.linked.module(importer, module) or self.linked.module(
            importer, module.partition(".")[0]
        )
        if script is not None and self.linked.module(importer, path) is None:
            value = self.state.value(-script.number, name)
        return ImportedName(canonical_name(path)) if value is None or value is UNKNOWN else value

    def infer_from_usage(self, value: Value, text: str) -> Value:
        """Replace an unknown value by what the usage of its name tells."""
        if isinstance(value, Tensor):
            unsure = value.node is None
        elif isinstance(value, LiteralValue):
            unsure = value.value is None and not value.is_given
        else:
            unsure = value is UNKNOWN
        if not unsure or not text:
            return value
        kind = self.point.script.usage.kind(text)
        return self.stand_in(kind, self._as_named_by_caller(text) or text, text) if kind else value

    def stand_in(self, kind: str, name: str, text: str) -> Value:
        """Return the object of a kind that a name stands for, where its construction is not seen."""
        key = f"name {name}"
        if kind == "scaler":
            return self.register_scaler(Scaler(key, text=text))
        if kind == "scheduler":
            return Scheduler()
        return Optimizer(key) if kind == "optimizer" else Model(key) if kind == "model" else UNKNOWN

    def register_scaler(self, scaler: Scaler) -> Scaler:
        """Register a scaler by its key."""
        self.scalers.setdefault(scaler.key, scaler)
        return scaler

    def assign(self, target: ast.expr, value: Value) -> None:
        """Assign a value to a name, an attribute, or several."""
        if isinstance(target, ast.Name):
            if value is UNKNOWN:
                self.state.forget(target.id)
            is_inside = "logits" in target.id and self.point.autocast.enabled is True
            if is_inside and isinstance(value, Tensor) and not value.dtype:  # from a matrix product
                value = value._replace(dtype=value.computed_under)
                self.guesses = True
            self.state.bind(self.point.frame, target.id, value)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            if isinstance(owner, Instance):
                self._check_replaced(target, self.state.value(owner.key, target.attr), value)
                self.state.bind(owner.key, target.attr, value)
            elif isinstance(owner, DictLiteral) and dotted_name(target.value):
                self.assign(target.value, owner.with_item(target.attr, value))
            elif text := dotted_name(target):
                self.state.bind(self.point.frame, text, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = value.items if isinstance(value, KnownItems) and not value.repeated else ()
            each = value if isinstance(value, Managed) else item_of(value)
            for index, part in enumerate(target.elts):
                self.assign(part, items[index] if index < len(items) else each)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN)
        elif isinstance(target, ast.Subscript):
            entries, key = self.evaluate(target.value), self.evaluate(target.slice)
            if isinstance(entries, DictLiteral) and dotted_name(target.value):
                name = literal_of(key)
                self.assign(target.value, entries.with_item(name, value))

    def _check_replaced(self, target: ast.Attribute, old: Value | None, new: Value) -> None:
        """Record that a method replaces the scaler of its object, which may have been restored."""
        both_made = isinstance(old, Scaler) and isinstance(new, Scaler) and None not in (old.node, new.node)
        stack = self.point.stack
        if both_made and old != new and stack and self.point.is_first_iteration:
            self.record(ScalerReplaced, target, stack[-1].node.name)

    def assign_item(self, target: ast.expr, value: Value) -> None:
        """Assign an item of an iterable, which is one of several."""
        self.assign(target, value)
        for node in walk(target):
            if isinstance(node, ast.Name):
                one = self.lookup(node.id)
                if isinstance(one, Optimizer):
                    self.state.bind(self.point.frame, node.id, replace(one, one_of_several=True))


class StepLimitReached(Exception):
    """Raised when an entry point takes too many steps to interpret."""


@dataclass(slots=True)
class StepBudget:
    """Counts the steps of an interpretation, and ends it at a limit."""

    _steps: int = 0
    _elsewhere: int = 0
    _work: int = 0

    def allows(self, node: ast.AST) -> bool:
        """Return whether a function may be followed; further ones in other files are taken as unknown."""
        return self._elsewhere <= _MAX_STEPS_ELSEWHERE or not file_number(node)

    def next_entry_point(self) -> None:
        """Begin another entry point, which may take as many steps."""
        self._steps = 0

    def spend(self, size: int, is_elsewhere: bool) -> None:
        """Take ``STEPS_AT_ONCE`` steps, each of which costs the more the larger the state is.

        Raises:
            StepLimitReached: The entry point, or the code of imported files, takes too many steps.
            ScriptTooLong: The script takes too much work.
        """
        if is_elsewhere:
            self._elsewhere += STEPS_AT_ONCE
            if self._elsewhere > _MAX_STEPS:  # definitions of a module, or a function without calls
                raise StepLimitReached
            return
        self._steps += STEPS_AT_ONCE
        self._work += STEPS_AT_ONCE * (1 + size // _SIZE_PER_STEP)
        if self._steps <= _MAX_STEPS and self._work <= _MAX_WORK:
            return
        if self._steps > _MAX_STEPS:
            raise StepLimitReached
        raise ScriptTooLong("too long to be analyzed: split it into several files")


@dataclass(slots=True)
class DtypeUses:
    """Ops by the dtype of an operand.

    Attributes:
        ops: Certainty of each op's dtype, by dtype.
        half_lines: First lines of statements under float16 autocast.
        numbers: Numbers that names stand for, where they are operands.
    """

    ops: dict[str, dict[ast.AST, Certainty]] = field(default_factory=dict)
    half_lines: set[int] = field(default_factory=set)
    numbers: dict[ast.AST, float] = field(default_factory=dict)

    def positions(self, dtype: str) -> dict[tuple[int, int], Certainty]:
        """Return the positions of ops with an operand of a dtype, and of their arguments."""
        return {
            position_of(part.value if isinstance(part, ast.keyword) else part): certainty
            for node, certainty in self.ops.get(dtype, {}).items()
            for part in (node, *ast.iter_child_nodes(node))
        }
