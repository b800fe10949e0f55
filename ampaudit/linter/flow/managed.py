"""Interprets calls of what a framework manages."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, file_number
from ampaudit.linter.flow.events import (
    AdaptersPrepared,
    ManagedBackward,
    ManagedClip,
    ManagedStep,
    ManagedUpdate,
    ManagedZeroGrad,
)
from ampaudit.linter.flow.facts import FROZEN, HALF_WEIGHTS, PerhapsHalf
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, AccumulatedGradients, Contribution
from ampaudit.linter.flow.syntax import dotted_name, receiver_name
from ampaudit.linter.flow.torch_names import Framework
from ampaudit.linter.flow.values import KnownItems, LiteralValue, Managed, Model, Optimizer, Value, literal_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["check_autocast_step", "check_trainer_model", "make_managed", "managed_method"]

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_gradients")


def make_managed(
    interpreter: Interpreter, node: ast.Call, framework: Framework, arguments: Arguments
) -> Value:
    """Interpret the construction of a framework's object."""
    precision = arguments.keywords.get(framework.precision)
    certainty = Certainty.LIKELY
    if isinstance(precision, LiteralValue):
        scaled, unscaled = precision.value in framework.scaled, precision.value in framework.unscaled
        certainty = Certainty.KNOWN if scaled else Certainty.UNKNOWN if unscaled else Certainty.LIKELY
    elif precision is None and framework.is_float32:
        certainty = Certainty.UNKNOWN
    # DeepSpeed has the number in its configuration, 1 if it is not given
    divisor = arguments.keywords.get(framework.divisor, LiteralValue(1))
    divides = framework.divisor != "" and (framework.precision == "" or divisor != LiteralValue(1))
    managed = Managed(framework, certainty, divides)
    if not file_number(node):
        interpreter.managers.add(managed)
    return KnownItems((managed,) * 4) if framework.name == "DeepSpeed" else managed


def managed_method(
    interpreter: Interpreter, node: ast.Call, base: Managed, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of an object that a framework manages."""
    state, framework = interpreter.state, base.framework
    if name == "backward" and framework is not None:
        loss = arguments.get(0, "loss")
        interpreter.record(ManagedBackward(interpreter.at(node), base, loss))
        scaled = framework.keeps_gradients and base.scales
        new = Contribution(f"managed by {framework.name}", node)
        state.gradients = AccumulatedGradients(frozenset({new}), base.scales) if scaled else UNKNOWN_GRADIENTS
    elif name in (*_CLIPS, "unscale_gradients"):
        interpreter.record(ManagedClip(interpreter.at(node), base))
        state.gradients = UNKNOWN_GRADIENTS
    elif name == "step":
        interpreter.record(ManagedStep(interpreter.at(node), base))
        state.gradients = UNKNOWN_GRADIENTS
    elif name == "zero_grad":
        interpreter.record(ManagedZeroGrad(interpreter.at(node), base))
        state.gradients = AccumulatedGradients()
    elif name == "update" and framework is not None and "scaler" in receiver_name(node):
        interpreter.record(ManagedUpdate(interpreter.at(node), base))
    elif name == "fit":
        _check_model(interpreter, base, arguments.get(0, "model"))
    elif name == "prepare" and base.scales and interpreter.linked.mentions(r"inject\(|add_adapter"):
        interpreter.record(AdaptersPrepared(interpreter.at(node), base))
    elif name == "prepare" and not interpreter.linked.mentions(_TRAINS_COPIES):
        optimizers = [value for value in arguments.all() if isinstance(value, Optimizer)]
        for key in sorted({key for optimizer in optimizers for key in optimizer.models or ()}):
            _check_dtype(interpreter, base, key)
    return base


# adapters have parameters of their own, and some code casts what it trains by itself
_TRAINS_COPIES: Final = (
    r"add_adapter|get_peft_model|LoraConfig|lora_|LoRA\w+\(|cast_training_params|\.data = "
)


def check_trainer_model(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> None:
    """Check the model that a trainer gets with its arguments; adapters have parameters of their own."""
    trainer_arguments = arguments.get(1, "args")
    is_trainer = dotted_name(node.func).endswith("Trainer") and "peft_config" not in arguments.keywords
    if is_trainer and isinstance(trainer_arguments, Managed):
        _check_model(interpreter, trainer_arguments, arguments.get(0, "model"))


def check_autocast_step(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> None:
    """Check that Ignite's training step, which has no scaler unless it is given one, scales the loss."""
    mode = arguments.keywords.get("amp_mode")
    under_autocast = node.func is not None and dotted_name(node.func).endswith("_amp")
    if not under_autocast and literal_of(mode) != "amp":
        return
    scaler = arguments.keywords.get("scaler")
    is_off = scaler is None or (isinstance(scaler, LiteralValue) and not scaler.value)
    if is_off and len(arguments.positional) < _IGNITE_SCALER and "**" not in arguments.keywords:
        interpreter.report(
            "AMP813",
            node,
            "the loss is computed under float16 autocast without a loss scale, which Ignite adds only if it "
            "is asked to: small gradients become zero",
            "pass scaler=True, or a scaler of your own",
        )


_IGNITE_SCALER: Final = 8  # positional arguments, among which it may be


def _check_model(interpreter: Interpreter, trainer: Managed, model: Value | None) -> None:
    if isinstance(model, Model):
        _check_dtype(interpreter, trainer, model.key)


def _check_dtype(interpreter: Interpreter, managed: Managed, key: str) -> None:
    """Check that the parameters of a model, whose gradients a framework unscales, are not float16."""
    fact = interpreter.state.get(HALF_WEIGHTS, key)
    halved = fact.node if isinstance(fact, PerhapsHalf) else fact
    is_frozen = interpreter.state.get(FROZEN, key) is not None
    if isinstance(halved, ast.AST) and not is_frozen and managed.scales and managed.framework is not None:
        interpreter.report(
            "AMP801",
            halved,
            f"these parameters are float16{', if a setting says so' if halved is not fact else ''}, and the "
            f"scaler of {managed.framework.name} cannot unscale float16 gradients",
            "keep the parameters in float32 and let the framework's precision choose the dtype of each op",
            certainty=min(managed.scales, Certainty.KNOWN if halved is fact else Certainty.LIKELY),
        )
