"""The state at a point of a script: values of names and facts about gradients; and the join of two states."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.torch_names import DTYPES
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    Autocast,
    DictLiteral,
    DtypeChoice,
    ImportedName,
    KnownItems,
    LiteralValue,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Unknown,
    Value,
    value_class,
)

T = TypeVar("T")


class Perhaps(Enum):
    """The value of a fact that differs between the paths that lead here."""

    PERHAPS = 0


PERHAPS: Final = Perhaps.PERHAPS


class Stage(Enum):
    """What was done with an optimizer since the last update of a scaler, which keeps it as well."""

    UNSCALED = 0
    STEPPED = 1
    RENEWED = 2  # stepped, before a backward computed new gradients


class Phase(Enum):
    """What was last done with the gradients."""

    UNKNOWN = 0
    IDLE = 1  # they were zeroed
    FRESH = 2  # a backward added to them
    EARLY = 3  # and the scaler was updated before a step
    LOOKED = 4  # the same after unscale_, which looks for infinities: the step may be skipped
    STEPPED = 5  # the scaler stepped
    UPDATED = 6  # and was updated
    BYPASSED = 7  # the optimizer stepped without the scaler


@value_class(frozen=True, slots=True)
class Life:
    """Where all gradients are between two steps.

    Attributes:
        phase: Phase.
        update: Last update of a scaler in this phase.
        scaler: Key of that scaler.
        stepped: Key of the optimizer that a scaler has stepped since the last backward.
    """

    phase: Phase = Phase.UNKNOWN
    update: ast.AST | None = None
    scaler: str = ""
    stepped: str = ""


@value_class(frozen=True, slots=True)
class PerhapsHalf:
    """A cast of a model to a dtype that a setting chooses, and that may be float16."""

    node: ast.AST


@dataclass(frozen=True, eq=False)  # Generic sets an attribute of its own
class FactKind(Generic[T]):
    """A kind of fact; a fact of it has a value, is ``PERHAPS``, or is absent or ``None`` if it is false."""

    name: str


STAGE: Final = FactKind[Stage]("stage")  # per scaler and optimizer
UNUSED: Final = FactKind[Literal[True]]("unused")  # per scaler: nothing was scaled so far
# per model
HALF_WEIGHTS: Final = FactKind[ast.AST | PerhapsHalf]("half")  # what has cast its parameters to float16
BFLOAT16_WEIGHTS: Final = FactKind[ast.AST]("bfloat16")  # the same to bfloat16
FROZEN: Final = FactKind[Literal[True]]("frozen")  # its parameters require no gradients
HALVED_IN_LOOP: Final = FactKind[ast.AST]("halved in loop")  # a cast to float16 in only some iterations
DEVICE: Final = FactKind[str]("device")
CAST_BY_DTYPE: Final[dict[str, FactKind[Any]]] = {"float16": HALF_WEIGHTS, "bfloat16": BFLOAT16_WEIGHTS}


@value_class(frozen=True, slots=True)
class Contribution:
    """One backward pass whose gradients are in ``.grad``.

    Attributes:
        scaler: Key of the scaler that scaled the loss; empty if unscaled.
        node: Call of ``backward``.
        computed_under: 16-bit dtype of autocast when the loss was computed; empty without.
        models: Keys of the models that the loss depends on; ``None`` if unknown.
    """

    scaler: str
    node: ast.AST
    computed_under: str = ""
    models: frozenset[str] | None = None


@value_class(frozen=True, slots=True)
class AccumulatedGradients:
    """What is in ``.grad``.

    Attributes:
        contributions: Backward passes.
        certainty: Certainty of the contributions; ``LIKELY`` if a path or unknown code may change them.
    """

    contributions: frozenset[Contribution] = frozenset()
    certainty: Certainty = Certainty.KNOWN

    @property
    def known(self) -> frozenset[Contribution] | None:
        """The backward passes; ``None`` if they are not certain."""
        return self.contributions if self.certainty == Certainty.KNOWN else None

    @property
    def scaled(self) -> Certainty:
        """How certain it is that all losses were scaled."""
        scaled = self.contributions and all(item.scaler for item in self.contributions)
        return self.certainty if scaled else Certainty.UNKNOWN

    def with_contribution(self, new: Contribution) -> AccumulatedGradients:
        """Return the gradients after another backward pass; one whose loss is scaled is known again."""
        if self.certainty == Certainty.UNKNOWN:
            return (
                AccumulatedGradients(frozenset({new}), Certainty.LIKELY) if new.scaler else UNKNOWN_GRADIENTS
            )
        return replace(self, contributions=self.contributions | {new})

    def weakened(self) -> AccumulatedGradients:
        """Return the gradients after code that may, but probably does not, change them."""
        return replace(self, certainty=Certainty.LIKELY) if self.contributions else UNKNOWN_GRADIENTS

    def joined(self, other: AccumulatedGradients) -> AccumulatedGradients:
        """Return what is known of them where two paths meet."""
        certainty = min(self.certainty, other.certainty)
        if self.contributions == other.contributions or certainty == Certainty.UNKNOWN:
            return AccumulatedGradients(self.contributions, certainty) if certainty else UNKNOWN_GRADIENTS
        union = self.contributions | other.contributions
        if len({item.scaler for item in union}) > 1:
            return UNKNOWN_GRADIENTS
        is_on_one_path = not self.contributions or not other.contributions
        return AccumulatedGradients(union, Certainty.LIKELY if is_on_one_path else certainty)


UNKNOWN_GRADIENTS: Final = AccumulatedGradients(certainty=Certainty.UNKNOWN)
FactKey: TypeAlias = tuple[FactKind[Any], *tuple[str, ...]]
Scope: TypeAlias = int | str  # a call of a function, or an object by its key
_OF_MODELS: Final = (HALF_WEIGHTS, HALVED_IN_LOOP, BFLOAT16_WEIGHTS, FROZEN, DEVICE)


@dataclass(slots=True)
class State:
    """Facts by key, and names by scope. A fact that differs between two joined paths becomes ``PERHAPS``.

    A copy shares its scopes until one side writes to them, so that branches cost what they change.
    """

    gradients: AccumulatedGradients = field(default_factory=AccumulatedGradients)
    life: Life = field(default_factory=Life)
    facts: dict[FactKey, Any] = field(default_factory=dict)
    scopes: dict[Scope, dict[str, Value]] = field(default_factory=dict)
    _owned: set[Scope] = field(default_factory=set, init=False, compare=False)

    def copy(self) -> State:
        """Return a copy for another branch."""
        self.share()
        return State(self.gradients, self.life, self.facts.copy(), self.scopes.copy())

    def share(self) -> None:
        """Copy each scope before the next write to it."""
        self._owned.clear()

    def fork(self) -> State:
        """Return a state with the same names and models but no facts about gradients."""
        self.share()
        facts = {key: fact for key, fact in self.facts.items() if key[0] in _OF_MODELS}
        return State(facts=facts, scopes=self.scopes.copy())

    def reach(
        self, phase: Phase, update: ast.AST | None = None, scaler: str = "", *, stepped: str | None = None
    ) -> None:
        """Begin a phase of the gradients; what was stepped is kept until the next backward."""
        if stepped is None:
            stepped = "" if phase is Phase.FRESH else self.life.stepped
        self.life = Life(phase, update, scaler, stepped)

    def stages(self, *scaler: str) -> list[Stage | Perhaps]:
        """Return the stages of the optimizers of a scaler, or of all; ``PERHAPS`` stands for any."""
        return [stage for _, stage in self.matching(STAGE, *scaler) if stage is not None]

    @property
    def is_unscaled(self) -> bool:
        """Whether unscale_() was called for every optimizer with a stage."""
        stages = self.stages()
        return bool(stages) and all(stage is Stage.UNSCALED for stage in stages)

    @property
    def still_scaled(self) -> Certainty:
        """How certain it is that all gradients are scaled."""
        return Certainty.UNKNOWN if set(self.stages()) - {Stage.RENEWED} else self.gradients.scaled

    def assume_any_call(self) -> None:
        """Forget what is not certain after unknown code, which may run a backward or zero the gradients."""
        if self.life.phase is Phase.UPDATED:
            self.reach(Phase.STEPPED)
        elif self.life.phase in (Phase.FRESH, Phase.IDLE):
            self.reach(Phase.UNKNOWN)

    def assume_any_step(self) -> None:
        """Forget what is known of gradients, scalers and optimizers after code that may change them."""
        self.gradients, self.life = UNKNOWN_GRADIENTS, Life()
        for key in self.facts:
            if key[0] in (STAGE, UNUSED):
                self.facts[key] = PERHAPS

    def holds_scaler(self, scaler: Scaler) -> bool:
        """Return whether a name cannot be ``None``: a scaler was made for it, or it has scaled a loss."""
        was_made = scaler.node is not None and not scaler.optional
        return was_made or self.facts.get((UNUSED, scaler.key), True) is None

    def get(self, kind: FactKind[T], *key: str) -> T | Perhaps | None:
        """Return a fact; ``None`` if it was never set."""
        return self.facts.get((kind, *key))

    def known_at(self, kind: FactKind[Any], *key: str) -> ast.AST | None:
        """Return the node of a fact that is certain, else ``None``."""
        fact = self.facts.get((kind, *key))
        return fact if isinstance(fact, ast.AST) else None

    def trained_cast(self, kind: FactKind[Any], model: str) -> ast.AST | None:
        """Return the cast of a model to a 16-bit dtype, unless its parameters are frozen."""
        return self.known_at(kind, model) if self.get(FROZEN, model) is None else None

    def weights_cast(self, model: str) -> tuple[str, ast.AST] | None:
        """Return the 16-bit dtype of a model's parameters and what has cast them, if that is certain."""
        casts = ((dtype, self.known_at(kind, model)) for dtype, kind in CAST_BY_DTYPE.items())
        return next(((dtype, node) for dtype, node in casts if node is not None), None)

    def set_fact(self, kind: FactKind[T], value: T | Perhaps | None, *key: str) -> None:
        """Set a fact."""
        self.facts[(kind, *key)] = value

    def value(self, scope: Scope, name: str) -> Value | None:
        """Return the value of a name in a scope, or of an attribute of an object."""
        return self.scopes.get(scope, {}).get(name)

    def bind(self, scope: Scope, name: str, value: Value) -> None:
        """Bind a name or an attribute to a value."""
        if scope not in self._owned:
            self.scopes[scope] = self.scopes.get(scope, {}).copy()
            self._owned.add(scope)
        self.scopes[scope][name] = value

    def drop_scope(self, scope: Scope) -> None:
        """Remove the names of a function that has returned."""
        self.scopes.pop(scope, None)
        self._owned.discard(scope)

    def forget(self, name: str) -> None:
        """Remove the facts about the model that a name stood for before it was bound again."""
        key = f"name {name}"
        for kind in _OF_MODELS:
            self.facts.pop((kind, key), None)

    def clear(self, kind: FactKind[Any], *start: str) -> None:
        """Remove all facts with this prefix."""
        for key, _ in self.matching(kind, *start):
            del self.facts[(kind, *key)]

    def matching(self, kind: FactKind[T], *start: str) -> list[tuple[tuple[str, ...], T | Perhaps | None]]:
        """Return the facts with this prefix, and the rest of the key of each."""
        prefix, count = (kind, *start), len(start) + 1
        return [(key[1:], fact) for key, fact in self.facts.items() if key[:count] == prefix]


def join(one: State | None, other: State | None) -> State | None:
    """Join the states of two paths, where ``None`` is a path that has ended."""
    if one is None or other is None:
        return one if other is None else other
    left, right = one.facts, other.facts
    facts: dict[FactKey, Any] = {}
    for key in left | right:
        fact, second = left.get(key), right.get(key)
        equal = second is fact or second == fact
        facts[key] = fact if equal else (fact or second) if key[0] is HALVED_IN_LOOP else PERHAPS
    scopes = {**other.scopes, **one.scopes}
    for scope, names in one.scopes.items():
        others = other.scopes.get(scope, names)
        if others is not names:  # a name that only one path binds keeps its value
            scopes[scope] = joined = {**others, **names}
            for name, value in names.items():
                second = others.get(name, value)
                if second is not value:
                    joined[name] = join_values(value, second)
    one.share()  # neither may write to what the joined state has of them
    other.share()
    life = one.life if one.life == other.life else Life()
    return State(one.gradients.joined(other.gradients), life, facts, scopes)


def join_all(states: Iterable[State | None]) -> State | None:
    """Join the states of several paths."""
    joined: State | None = None
    for state in states:
        joined = join(joined, state)
    return joined


def join_values(one: Value, other: Value) -> Value:
    """Return the value of a name that two branches assign."""
    if one == other:
        return one
    for value, absent in ((other, one), (one, other)):
        if isinstance(absent, LiteralValue) and absent.value is None:
            # it is used only where it is not None
            return replace(value, optional=True) if isinstance(value, Scaler) else value
    names = one._fields if isinstance(one, Tensor) else one.__slots__
    pairs = ((name, getattr(one, name)) for name in names if type(one) is type(other))
    agreement: dict[str, Any] = {name: value for name, value in pairs if value == getattr(other, name)}
    if isinstance(one, Optimizer) and isinstance(other, Optimizer):
        models = None if one.models is None or other.models is None else one.models | other.models
        return replace(one, class_name=agreement.get("class_name", ""), models=models)
    if isinstance(one, Managed) and isinstance(other, Managed) and replace(one, model=other.model) == other:
        return replace(one, model=None)
    for managed, plain in ((one, other), (other, one)):
        if isinstance(managed, Managed) and isinstance(plain, Optimizer | Unknown):  # prepared in one branch
            return replace(managed, scales=Certainty.UNKNOWN, divides=False)
    if isinstance(one, Scaler) and isinstance(other, Scaler):
        return replace(one, enabled=agreement.get("enabled"), optional=one.optional or other.optional)
    if isinstance(one, Model) and isinstance(other, Model) and one.key == other.key:
        return replace(one, wrapper=agreement.get("wrapper", ""))
    contexts = [value for value in (one, other) if isinstance(value, Autocast)]
    if contexts:
        return replace(max(contexts, key=lambda context: context.enabled is not False), enabled=None)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return Tensor(**{"scaler_key": MAYBE, "rounded": one.rounded or other.rounded, **agreement})
    if isinstance(one, KnownItems) and isinstance(other, KnownItems) and len(one.items) == len(other.items):
        items = tuple(map(_one_of, one.items, other.items))
        return KnownItems(items, one.repeated or other.repeated)
    if isinstance(one, Parameters) and isinstance(other, Parameters):
        models = None if one.models is None or other.models is None else one.models | other.models
        return replace(one, models=models) if one.cast is other.cast else Parameters(models)
    if isinstance(one, DictLiteral) and isinstance(other, DictLiteral) and one.node is other.node:
        for name, value in zip(other.names, other.items, strict=True):
            existing = one.item(name)
            one = one.with_item(name, value if existing is None else join_values(existing, value))
        return one
    return choice_of_dtypes(one, other)


def choice_of_dtypes(*values: Value) -> Value:
    """Return which dtypes some values name, if all of them name one."""
    names: set[str] = set()
    for value in values:
        dtype = DTYPES.get(value.path) if isinstance(value, ImportedName) else None
        choices = value.names if isinstance(value, DtypeChoice) else {dtype} if dtype else None
        if not choices:
            return UNKNOWN
        names |= choices
    return DtypeChoice(frozenset(names)) if len(names) > 1 else values[0] if values else UNKNOWN


def item_of(value: Value) -> Value:
    """Return the value of any item of an iterable."""
    if isinstance(value, KnownItems):
        result: Value = value.items[0] if value.items else UNKNOWN
        for item in value.items[1:]:
            result = _one_of(result, item)
        several = len(value.items) > 1 or value.repeated
        return replace(result, one_of_several=True) if isinstance(result, Optimizer) and several else result
    return value if isinstance(value, Tensor | LossGradients | Parameters) else UNKNOWN


def _one_of(one: Value, other: Value) -> Value:
    """Return the value of either of two items; of two scalers it is not known what they have scaled."""
    joined = join_values(one, other)
    if isinstance(one, Scaler) and isinstance(other, Scaler) and one.key != other.key:
        return replace(one, key="one of several", node=None)
    return joined


def join_items(items: KnownItems, added: Value) -> KnownItems:
    """Return a list after another item was added, of which any may be meant later."""
    return KnownItems((_one_of(item_of(items), added) if items.items else added,), repeated=True)


def flattened(values: Iterable[Value]) -> list[Value]:
    """Return some values with the items of tuples and lists in place of these."""
    items: list[Value] = []
    for value in values:
        items += flattened(value.items) if isinstance(value, KnownItems) else [value]
    return items
