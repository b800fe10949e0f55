"""Interprets optimizers: construction, step, zero_grad."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, Fix, key_of, remove_statement
from ampaudit.linter.flow.events import (
    OptimizerMade,
    OptimizerRestored,
    OptimizerStep,
    ScalerUnscale,
    ZeroGrad,
    of_type,
)
from ampaudit.linter.flow.facts import (
    BFLOAT16_WEIGHTS,
    FRESH,
    HALF_WEIGHTS,
    STEPPED,
    STEPPED_LAST,
    UNSCALED_AT,
    Stepped,
)
from ampaudit.linter.flow.gradient_uses import (
    clear_gradients,
    gradient_contributions,
    has_single_optimizer,
    is_unscaled,
)
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, Contribution, item_of
from ampaudit.linter.flow.statement_context import scaler_in_scope
from ampaudit.linter.flow.syntax import dotted_name
from ampaudit.linter.flow.torch_names import ADAM_LIKE, FLOAT16_ROUNDS_TO_ZERO, MANAGING_PACKAGES
from ampaudit.linter.flow.values import (
    UNKNOWN,
    DictLiteral,
    KnownItems,
    LiteralValue,
    Model,
    Optimizer,
    Parameters,
    StateDict,
    Value,
    literal_of,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["optimizer_method", "optimizer_value"]


# a finite loss says nothing of the gradients
_FINITE_TEST = r"(?:isfinite|isinf|isnan)(?!\([^)]*loss)|found_inf|check_inf|overflow"


def optimizer_method(
    interpreter: Interpreter, node: ast.Call, optimizer: Optimizer, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of an optimizer."""
    if name == "step":
        _step(interpreter, node, optimizer, arguments)
    elif name == "zero_grad":
        interpreter.record(ZeroGrad(interpreter.at(node), optimizer.key))
        clear_gradients(interpreter)
    elif name == "state_dict":
        return StateDict("optimizer", optimizer.key)
    elif name == "load_state_dict" and not isinstance(arguments.get(0, "state_dict"), StateDict):
        interpreter.record(OptimizerRestored(interpreter.at(node)))  # from another run
    return UNKNOWN


def _step(interpreter: Interpreter, node: ast.Call, optimizer: Optimizer, arguments: Arguments) -> None:
    state = interpreter.state
    interpreter.record(OptimizerStep(interpreter.at(node), optimizer.key, interpreter.autocast))
    if arguments.all():  # a closure runs backward
        state.gradients = UNKNOWN_GRADIENTS
        return
    contributions = gradient_contributions(interpreter)
    scalers = {item.scaler for item in contributions or ()}  # empty for a loss that is not scaled
    if state.get(STEPPED_LAST) == optimizer.key and not optimizer.one_of_several:
        interpreter.report(
            "AMP817",
            node,
            "the scaler has already stepped this optimizer; this second step also runs after an overflow",
            "remove it: scaler.step(optimizer) calls optimizer.step()",
            remove_statement(interpreter.statement, node),
        )
    elif (
        contributions
        and scalers != {""}
        and not state.may_hold(UNSCALED_AT)
        and (has_single_optimizer(interpreter) or len(contributions) == 1)
    ):
        _report_bypassed_scaler(
            interpreter,
            node,
            "the optimizer steps with scaled gradients, and nothing skips the step if they overflow",
        )
    elif contributions and scalers == {""}:
        _check_scaling(interpreter, contributions)
    elif contributions and has_single_optimizer(interpreter) and _overflow_is_unchecked(interpreter):
        _report_bypassed_scaler(
            interpreter,
            node,
            "the step bypasses the scaler: nothing skips it if the gradients have overflowed",
        )
    for key in interpreter.scalers:
        # the script tests for overflow itself, or the mistake was just reported
        was_unscaled = any(isinstance(fact, ast.AST) for _, fact in state.matching(UNSCALED_AT, key))
        if was_unscaled or key in scalers:
            state.set_fact(STEPPED, Stepped.PAST_SCALER, key, optimizer.key)
    state.set_fact(FRESH, None)


def _report_bypassed_scaler(interpreter: Interpreter, node: ast.Call, cause: str) -> None:
    scaler = scaler_in_scope(interpreter.script, node)
    optimizer = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else "optimizer"
    fix = Fix.at(node, "step by scaler", scaler) if scaler else None
    interpreter.report("AMP803", node, cause, f"write {scaler or 'scaler'}.step({optimizer})", fix)


def _overflow_is_unchecked(interpreter: Interpreter) -> bool:
    """Return whether gradients were unscaled, and the script does not test for overflow itself."""
    if not is_unscaled(interpreter):
        return False
    unscaled = of_type(interpreter.events.values(), ScalerUnscale)
    inner = len(interpreter.guards) > min((len(e.guards) for e in unscaled), default=0)
    return bool(unscaled) and not inner and not interpreter.linked.mentions(_FINITE_TEST)


def _check_scaling(interpreter: Interpreter, contributions: frozenset[Contribution]) -> None:
    scripts = interpreter.linked.scripts
    managed = any(name.startswith(MANAGING_PACKAGES) for script in scripts for name in script.imports)
    if managed or interpreter.managed or any(script.scales_losses for script in scripts):
        return
    for item in contributions:
        if item.computed_under == "float16":
            interpreter.report(
                "AMP813",
                item.node,
                "the loss is computed under float16 autocast without "
                "a loss scale: small gradients become zero",
                'scale the loss with torch.amp.GradScaler("cuda"), or use dtype=torch.bfloat16',
            )


def optimizer_value(interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments) -> Optimizer:
    """Interpret the construction of an optimizer; the name is empty for classes of other packages."""
    parameters = arguments.get(0, "params")
    if isinstance(parameters, KnownItems):
        groups = (g.item("params") if isinstance(g, DictLiteral) else g for g in parameters.items)
        parameters = item_of(
            KnownItems(tuple(item_of(g) if isinstance(g, KnownItems) else g or UNKNOWN for g in groups))
        )
    models = parameters.models if isinstance(parameters, Parameters) and not parameters.is_copy else None
    if isinstance(parameters, Model):  # of which timm takes the parameters
        models = frozenset({parameters.key})
    key = key_of(node) + interpreter.call_path
    interpreter.record(OptimizerMade(interpreter.at(node)))
    if models:
        interpreter.models_by_optimizer[key] = models
    if name in ADAM_LIKE and models:
        _check_eps(interpreter, node, name, arguments, models)
    if name in ADAM_LIKE:
        _check_bfloat16(interpreter, arguments, models)
    return Optimizer(key, node, name, models)


def _check_eps(
    interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments, models: frozenset[str]
) -> None:
    value = arguments.keywords.get("eps", LiteralValue(ADAM_LIKE[name]))
    eps = literal_of(value)
    halved = any(interpreter.state.trained_cast(HALF_WEIGHTS, model) for model in models)
    if halved and isinstance(eps, int | float) and eps <= FLOAT16_ROUNDS_TO_ZERO:
        interpreter.report(
            "AMP862",
            node,
            f"eps={eps:g} is zero in float16, the dtype of these parameters and of the optimizer's state:"
            " where a gradient is zero, the update is 0/0",
            "keep the parameters in float32; if they must be float16, use eps=1e-4",
        )


_SMALL_LEARNING_RATE: Final = (
    1e-4  # a step of Adam is about as long; half a unit in the last place of 0.05 is longer
)
# what keeps or rounds the weights otherwise, or trains others than these
_OTHERWISE: Final = (
    r"stochastic|[Kk]ahan|master|fp32_param|LoRA|[Ll]ora_|peft|adapter|deepspeed|MixedPrecision"
)


def _check_bfloat16(interpreter: Interpreter, arguments: Arguments, models: frozenset[str] | None) -> None:
    """Report bfloat16 weights that an optimizer of torch changes by less than they can represent."""
    value, expression = arguments.get(1, "lr"), arguments.expression(1, "lr")
    rate = literal_of(value)
    if rate is None and expression is not None:
        rate = interpreter.script.defaults.get(dotted_name(expression).rpartition(".")[2])
    if not isinstance(rate, float) or rate > _SMALL_LEARNING_RATE:
        return
    state = interpreter.state
    if models is None:  # of the only model, if there is one
        models = frozenset(key[0] for key, fact in state.matching(BFLOAT16_WEIGHTS) if fact is not None)
    if len(models) != 1 or interpreter.linked.mentions(_OTHERWISE):
        return
    cast = state.trained_cast(BFLOAT16_WEIGHTS, next(iter(models)))
    if cast is not None:
        interpreter.report(
            "AMP870",
            cast,
            f"these weights are bfloat16, and Adam changes each by about the learning rate, {rate:g}: less "
            "than half a unit in the last place of weights of 0.05 and more, whose changes are rounded away",
            "keep the weights in float32 and compute under autocast, or round stochastically",
            certainty=Certainty.LIKELY,
        )
