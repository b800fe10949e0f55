"""Interprets calls of what a framework manages."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from ampaudit.linter.diagnostic import Certainty, file_number
from ampaudit.linter.flow import events
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import STAGE, UNKNOWN_GRADIENTS, AccumulatedGradients, Contribution, Stage
from ampaudit.linter.flow.syntax import dotted_name, receiver_name
from ampaudit.linter.flow.torch_names import AUTOCAST_PRECISIONS, FRAMEWORKS, Framework
from ampaudit.linter.flow.values import (
    Autocast,
    Call,
    DictLiteral,
    KnownItems,
    LiteralValue,
    Managed,
    Model,
    Optimizer,
    Value,
    literal_of,
)

LIGHTNING: Final = next(framework for framework in FRAMEWORKS if framework.name == "Lightning")
MANAGED: Final = "managed"  # the key of the scaler of a framework
_DIVISORS: Final = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
_WRAPS: Final = ("prepare", "prepare_model", "setup", "setup_module")
_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_gradients")


def make_managed(interpreter: Interpreter, call: Call, framework: Framework) -> Value:
    """Interpret the construction of a framework's object."""
    precision = call.keywords.get(framework.precision)
    certainty = Certainty.LIKELY
    if isinstance(precision, LiteralValue):
        scaled, unscaled = precision.value in framework.scaled, precision.value in framework.unscaled
        certainty = Certainty.KNOWN if scaled else Certainty.UNKNOWN if unscaled else Certainty.LIKELY
    elif precision is None and framework.precision and call.keywords.keys().isdisjoint(("**", "fp16")):
        certainty = Certainty.UNKNOWN
    # DeepSpeed has the number in its configuration, 1 if it is not given
    divisor = next((v for k, v in call.keywords.items() if k in _DIVISORS), LiteralValue(1))
    divides = framework.divisor != "" and (framework.precision == "" or divisor != LiteralValue(1))
    is_engine = framework.name == "DeepSpeed"
    weights_dtype = _dtype_of_engine(call) if is_engine else ""
    cast = AUTOCAST_PRECISIONS.get(literal_of(precision), "")
    managed = Managed(framework, certainty, divides, weights_dtype, autocast=cast)
    if not file_number(call.node):
        interpreter.managers.add(managed)
    if not is_engine:
        return managed
    return KnownItems((managed, managed, call.keywords.get("training_data", managed), managed))


def _dtype_of_engine(call: Call) -> str:
    """Return the 16-bit dtype that a literal configuration of DeepSpeed names; empty if it has none."""
    config = call.keywords.get("config")
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        section = config.item(name) if isinstance(config, DictLiteral) else None
        if isinstance(section, DictLiteral) and literal_of(section.item("enabled")) is True:
            return dtype if literal_of(section.item("auto_cast")) is not True else ""
    return ""


def managed_method(interpreter: Interpreter, call: Call, base: Managed, name: str) -> Value:
    """Interpret a method of an object that a framework manages."""
    state, framework = interpreter.state, base.framework
    if name == "backward" and framework is not None:
        interpreter.record(events.ManagedBackward, call.node, base, call.get(0, "loss"))
        scaled = framework.keeps_gradients and base.scales
        new = Contribution(f"managed by {framework.name}", call.node)
        state.gradients = AccumulatedGradients(frozenset({new}), base.scales) if scaled else UNKNOWN_GRADIENTS
    elif name in (*_CLIPS, "unscale_gradients"):
        interpreter.record(events.ManagedClip, call.node, base)
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(STAGE, Stage.UNSCALED, MANAGED, "")
    elif name == "step":
        interpreter.record(events.ManagedStep, call.node, base)
        state.gradients = UNKNOWN_GRADIENTS
        state.clear(STAGE, MANAGED)
    elif name == "zero_grad":
        interpreter.record(events.ManagedZeroGrad, call.node, base)
        state.gradients = AccumulatedGradients()
    elif name == "update" and framework is not None and "scaler" in receiver_name(call.node):
        interpreter.record(events.ManagedUpdate, call.node, base)
    elif name == "fit" and isinstance(model := call.get(0, "model"), Model):
        interpreter.record(events.ManagedModel, call.node, base, model.key)
    elif name in _WRAPS:
        if base.scales:
            interpreter.record(events.AdaptersPrepared, call.node, base)
        optimizers = [value for value in call.all() if isinstance(value, Optimizer)]
        for key in sorted({key for optimizer in optimizers for key in optimizer.models or ()}):
            interpreter.record(events.ManagedModel, call.node, base, key)
        wrapped = [
            replace(base, model=value if isinstance(value, Model) else None) for value in call.positional
        ]
        if wrapped and not any(isinstance(one, ast.Starred) for one in call.node.args):
            return KnownItems(tuple(wrapped)) if len(wrapped) > 1 else wrapped[0]
    elif name == "autocast" and base.autocast:
        return Autocast(True, None, base.autocast)
    elif name == "unwrap_model" and isinstance(inner := call.first, Managed):
        return inner.model or base
    return base


def lightning_trainers(interpreter: Interpreter) -> list[Certainty]:
    """Return how certain it is of each trainer of Lightning that it scales the loss."""
    return [managed.scales for managed in interpreter.managers if managed.framework is LIGHTNING]


def autocast_of_trainers(interpreter: Interpreter) -> str:
    """Return the dtype of the autocast in which all trainers of Lightning call models, else empty."""
    dtypes = {managed.autocast for managed in interpreter.managers if managed.framework is LIGHTNING}
    return dtypes.pop() if len(dtypes) == 1 else ""


def make_trainer(interpreter: Interpreter, call: Call) -> None:
    """Interpret a call that may give a model to a trainer; adapters have parameters of their own."""
    trainer_arguments = call.get(1, "args")
    if not isinstance(trainer_arguments, Managed) or not isinstance(model := call.get(0, "model"), Model):
        return
    if dotted_name(call.node.func).endswith("Trainer") and "peft_config" not in call.keywords:
        interpreter.record(events.ManagedModel, call.node, trainer_arguments, model.key)
