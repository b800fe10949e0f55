"""Events of a training loop, for rules that look at a whole loop or file."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.values import (
    Autocast,
    Call,
    ClassInfo,
    DictLiteral,
    LiteralValue,
    LossFunction,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Value,
    value_class,
)


class Guard(NamedTuple):
    """A node that decides whether, or how often, a statement runs: ``loop``, ``if``, ``call``."""

    kind: str
    node: ast.AST


@value_class(frozen=True, slots=True)
class Event:
    """Something that happens to a scaler, an optimizer, a model or gradients.

    Attributes:
        node: Expression.
        guards: Guards around it, outermost first.
        statement: Statement that contains it.
        autocast: Innermost autocast context around it.
    """

    node: ast.AST
    guards: tuple[Guard, ...]
    statement: ast.stmt | None
    autocast: Autocast

    @property
    def loop(self) -> ast.AST | None:
        """The innermost loop around the event."""
        return next((guard.node for guard in reversed(self.guards) if guard.kind == "loop"), None)

    def is_inside(self, node: ast.AST) -> bool:
        """Return whether a node, such as a loop or a block, is around the event."""
        return node in [guard.node for guard in self.guards]

    def guards_inside(self, loop: ast.AST | None) -> tuple[Guard, ...]:
        """Return the guards between a loop and the event; all guards if the event is not in that loop."""
        for index, guard in enumerate(self.guards):
            if guard.node is loop and guard.kind == "loop":
                return self.guards[index + 1 :]
        return self.guards


@value_class(frozen=True, slots=True, eq=False)
class EntryPointFollowed:
    """A function that no other calls, or the module, was followed to its end."""

    events: list[Event]


@value_class(frozen=True, slots=True)
class BranchesFollowed:
    """An entry point was followed with a condition assumed to be true, and to be false."""

    one: list[Event]
    other: list[Event]


@value_class(frozen=True, slots=True)
class ClassFollowed:
    """All methods of a class were followed."""

    info: ClassInfo
    events: list[Event]


@value_class(frozen=True, slots=True)
class ScriptFollowed:
    """All entry points of a script were followed, each with its events."""

    events_by_entry: list[list[Event]]

    @property
    def events(self) -> list[Event]:
        """The events of all entry points."""
        return [event for events in self.events_by_entry for event in events]


E = TypeVar("E", bound=Event)


def of_type(events: Iterable[Event], *types: type[E]) -> list[E]:
    """Return the events of some types, in order."""
    return [event for event in events if isinstance(event, types)]


@value_class(frozen=True, slots=True)
class Backward(Event):
    """A backward pass."""

    loss: Tensor


@value_class(frozen=True, slots=True)
class UnknownBackward(Event):
    """A backward pass of unknown code."""


@value_class(frozen=True, slots=True)
class UnknownEffect(Event):
    """A call of unknown code that may step, zero or replace gradients."""


@value_class(frozen=True, slots=True)
class Clip(Event):
    """Clipping of gradients, only likely if it is unknown code with such a name."""

    function: str
    call: Call
    certainty: Certainty = Certainty.KNOWN


@value_class(frozen=True, slots=True)
class GradientRead(Event):
    """A use of ``p.grad``; ``is_copy`` if the result is as easily unscaled."""

    is_copy: bool = False


@value_class(frozen=True, slots=True)
class GradientNorm(Event):
    """A norm or a power of the gradients of a loss, as in a gradient penalty."""

    gradients: LossGradients


@value_class(frozen=True, slots=True)
class WeightsAveraged(Event):
    """An average of weights is updated in place."""

    average: Parameters


@value_class(frozen=True, slots=True)
class WeightsRounded(Event):
    """A model that was cast to float16 in a loop, by ``cast``, is cast back to float32."""

    model: str
    cast: ast.AST


@value_class(frozen=True, slots=True)
class StepEvent(Event):
    """A step; ``target`` is ``None`` if the optimizer is not known."""

    target: Optimizer | None

    @property
    def optimizer(self) -> str:
        """The key of the optimizer; empty if it is not known which."""
        return "" if self.target is None or self.target.one_of_several else self.target.key


@value_class(frozen=True, slots=True)
class OptimizerStep(StepEvent):
    """``optimizer.step()``."""


@value_class(frozen=True, slots=True)
class ScalerStep(StepEvent):
    """``scaler.step(optimizer)``; ``has_closure`` if the step computes the loss again."""

    value: Scaler
    has_closure: bool = False

    @property
    def scaler(self) -> str:
        """The key of the scaler."""
        return self.value.key


@value_class(frozen=True, slots=True)
class ScalerEvent(Event):
    """A call of a scaler, other than its step."""

    value: Scaler

    @property
    def scaler(self) -> str:
        """The key of the scaler."""
        return self.value.key


@value_class(frozen=True, slots=True)
class ScalerMade(ScalerEvent):
    """``GradScaler(...)``."""


@value_class(frozen=True, slots=True)
class ScalerScale(ScalerEvent):
    """``scaler.scale(loss)``."""

    outputs: Value | None


@value_class(frozen=True, slots=True)
class ScalerUnscale(ScalerEvent):
    """``scaler.unscale_(optimizer)``; ``target`` is ``None`` if the optimizer is not known."""

    target: Optimizer | None


@value_class(frozen=True, slots=True)
class ScalerUpdate(ScalerEvent):
    """``scaler.update()``, or ``scaler.update(new_scale)``, which needs no step before it."""

    new_scale: Value | None

    @property
    def needs_step(self) -> bool:
        """Whether it raises if no step or ``unscale_`` has looked for infinities."""
        return self.new_scale in (None, LiteralValue(None))


@value_class(frozen=True, slots=True)
class ScalerSaved(ScalerEvent):
    """``scaler.state_dict()``."""


@value_class(frozen=True, slots=True)
class ScalerRestored(ScalerEvent):
    """``scaler.load_state_dict(state)``."""


@value_class(frozen=True, slots=True)
class ScalerReplaced(Event):
    """A function, by name, replaces the scaler of an object."""

    function: str


@value_class(frozen=True, slots=True)
class ScaleCompared(Event):
    """Two readings of the scale are tested for equality."""


@value_class(frozen=True, slots=True)
class OptimizerMade(Event):
    """The construction of an optimizer."""

    optimizer: Optimizer
    call: Call


@value_class(frozen=True, slots=True)
class OptimizerRestored(Event):
    """``optimizer.load_state_dict(state)`` of a checkpoint."""


@value_class(frozen=True, slots=True)
class ZeroGrad(Event):
    """``zero_grad()``; the key of the optimizer is empty if a model does it."""

    optimizer: str


@value_class(frozen=True, slots=True)
class ModelCall(Event):
    """A call of a model."""

    model: Model
    grad_modes: tuple[str, ...]

    @property
    def callee(self) -> str:
        """The text of what is called, by which models are told apart that one name stands for."""
        return ast.unparse(self.node.func) if isinstance(self.node, ast.Call) else ""


@value_class(frozen=True, slots=True)
class PrecisionChosen(Event):
    """A choice that a condition may decide: a cast to float16, one of two functions, an apex model."""


@value_class(frozen=True, slots=True)
class ApexInitialized(PrecisionChosen):
    """``apex.amp.initialize(models, ...)``."""

    models: Value | None


@value_class(frozen=True, slots=True)
class HalfLayer(Event):
    """A layer is made with ``dtype=torch.float16``."""


@value_class(frozen=True, slots=True)
class LossInside(Event):
    """A loss under autocast; ``outputs`` identify the calls outside of it that returned its inputs."""

    outputs: frozenset[int]


@value_class(frozen=True, slots=True)
class AutocastMade(Event):
    """``torch.autocast(...)``, which takes a device type."""

    call: Call


@value_class(frozen=True, slots=True)
class AutocastEntered(Event):
    """A ``with`` statement enters autocast."""

    context: Autocast
    block: ast.AST


@value_class(frozen=True, slots=True)
class NumberRead(Event):
    """``loss.item()`` and the like."""

    value: Tensor


@value_class(frozen=True, slots=True)
class OpEvaluated(Event):
    """A call of an op of torch, by its function's dotted name also where it is a method or an operator.

    Of its operands, it has those that are tensors. Rules see only ops with a tensor that has a dtype, a cast
    or rounded positions.
    """

    path: str
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The name of the op, without its module."""
        return self.path.rpartition(".")[2]


@value_class(frozen=True, slots=True)
class LossCalled(Event):
    """A call of a loss function of torch; ``outputs`` are those of the model, its first operand."""

    loss: LossFunction
    outputs: Value


@value_class(frozen=True, slots=True)
class CheckpointSaved(Event):
    """``torch.save`` of a dict."""

    entries: DictLiteral


@value_class(frozen=True, slots=True)
class ManagedEvent(Event):
    """A call of an object that a framework manages."""

    managed: Managed


@value_class(frozen=True, slots=True)
class ManagedBackward(ManagedEvent):
    """A call of its backward pass."""

    loss: Value | None


@value_class(frozen=True, slots=True)
class AdaptersPrepared(ManagedEvent):
    """A call of its ``prepare`` in a script that adds adapters."""


@value_class(frozen=True, slots=True)
class ManagedClip(ManagedEvent):
    """A call that clips the gradients."""


@value_class(frozen=True, slots=True)
class ManagedModel(ManagedEvent):
    """A call that gives it a model, by key, to train."""

    model: str


@value_class(frozen=True, slots=True)
class ManagedStep(ManagedEvent):
    """A step of its optimizer."""


@value_class(frozen=True, slots=True)
class ManagedZeroGrad(ManagedEvent):
    """A call that zeroes the gradients."""


@value_class(frozen=True, slots=True)
class ManagedUpdate(ManagedEvent):
    """An update of its scaler."""
