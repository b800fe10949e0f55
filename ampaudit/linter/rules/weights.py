"""Rules on the dtype of weights and losses, for the scaler and the optimizer that get them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Fix, Mistake, file_number, line_of
from ampaudit.linter.flow.events import (
    AdaptersPrepared,
    EntryPointFollowed,
    ModelCall,
    OptimizerMade,
    ScalerScale,
    ScalerStep,
    ScalerUnscale,
    WeightsAveraged,
    WeightsRounded,
    of_type,
)
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import BFLOAT16_WEIGHTS, FROZEN, HALF_WEIGHTS, HALVED_IN_LOOP
from ampaudit.linter.flow.statement_context import conditions_around, nodes_around
from ampaudit.linter.flow.syntax import dotted_name, mentions, receiver_name
from ampaudit.linter.flow.tensors import dtype_of_model_calls
from ampaudit.linter.flow.torch_names import ADAM_LIKE, FLOAT16_ROUNDS_TO_ZERO
from ampaudit.linter.flow.values import LiteralValue, Tensor, literal_of
from ampaudit.linter.rules.rule import rule

_ADAPTS: Final = re.compile(r"inject|adapter|peft|lora")
_CASTS_BACK: Final = ("cast_training_params", "float32", "upcast")
# a step of Adam is about as long; half a unit in the last place of 0.05 is longer
_SMALL_LEARNING_RATE: Final = 1e-4
# what keeps or rounds the weights otherwise, or trains others than these
_OTHERWISE: Final = ("stochastic", "kahan", "master", "fp32_param", "lora", "peft", "adapter", "deepspeed")
_SMALLEST_CHANGE: Final = {"float16": "1/2048", "bfloat16": "1/256"}  # half a unit in the last place


@rule("AMP801", ScalerStep, ScalerUnscale)
def _half_parameters(flow: Interpreter, event: ScalerStep | ScalerUnscale) -> Iterator[Mistake]:
    if event.target is None or event.value.enabled is not True:
        return
    for model in event.target.models or ():
        halved = flow.state.trained_cast(HALF_WEIGHTS, model)
        certainty = Certainty.LIKELY if halved is None else Certainty.KNOWN
        halved = halved or flow.state.trained_cast(HALVED_IN_LOOP, model)
        if halved is not None:
            yield Mistake(
                halved,
                f"these parameters are float16, and the scaler at line {line_of(event.node)} cannot unscale"
                " float16 gradients",
                "keep the parameters in float32 and let autocast choose the dtype of each op",
                certainty=certainty,
            )


@rule("AMP801", ScalerStep, AdaptersPrepared)
def _half_adapters(flow: Interpreter, event: ScalerStep | AdaptersPrepared) -> Iterator[Mistake]:
    """Adapters that are cast to float16 together with the frozen model that they were put into."""
    if isinstance(event, ScalerStep) and (event.value.enabled is not True or event.target is None):
        return
    for (model, *_), fact in flow.state.matching(HALF_WEIGHTS):
        if not isinstance(fact, ast.AST) or flow.state.get(FROZEN, model) is None:
            continue
        nodes, names = nodes_around(flow.linked, fact), {receiver_name(fact)}
        for loop in nodes:
            if isinstance(loop, ast.For) and dotted_name(loop.target) in names:
                names |= {dotted_name(node) for node in ast.walk(loop.iter)}
        put_before = any(
            _ADAPTS.search(dotted_name(call.func).lower())
            and any(dotted_name(node) in names - {""} for node in ast.walk(call))
            for call in nodes
            if isinstance(call, ast.Call) and call.lineno < line_of(fact)
        )
        if put_before and not flow.linked.mentions(*_CASTS_BACK):
            yield Mistake(
                fact,
                "this casts the adapters that the frozen model was given before to float16 as well, and the "
                f"scaler of line {line_of(event.node)} cannot unscale float16 gradients",
                "cast the frozen model first, or cast what is trained back to float32",
                certainty=Certainty.LIKELY,
            )


@rule("AMP857", ScalerStep, ScalerUnscale)
def _sharded(flow: Interpreter, event: ScalerStep | ScalerUnscale) -> Iterator[Mistake]:
    scaler, models = event.value, event.target.models if event.target is not None else None
    is_plain = scaler.enabled is True and not scaler.sharded
    if isinstance(scaler.node, ast.Call) and is_plain and flow.sharded & (models or frozenset()):
        yield Mistake(
            scaler.node,
            "FSDP shards the gradients, and each process looks for infinities in its own: the processes skip"
            " different steps, and their scales part",
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        )


@rule("AMP818", ScalerScale)
def _scaled_bfloat16(flow: Interpreter, event: ScalerScale) -> Iterator[Mistake]:
    place, outputs = event.value.node or event.node, event.outputs
    tests = conditions_around(flow.linked, place)  # one of the dtype may leave bfloat16 out
    if event.value.enabled is not True or any(mentions(test, "dtype", "float16") for test in tests):
        return
    by_loss = outputs.computed_under if isinstance(outputs, Tensor) else ""
    if (by_loss or dtype_of_model_calls(flow)) == "bfloat16":
        fix = None
        if isinstance(place, ast.Call) and not _may_set_enabled(place):
            fix = Fix.at(place, "set keyword", "enabled", "False")
        yield Mistake(
            place,
            "the loss is computed in bfloat16, which has the range of float32: its gradients need no loss"
            " scale",
            "remove the scaler, or create it with enabled=False",
            fix,
            # a scaler of another file may have float16 losses elsewhere
            Certainty.LIKELY if file_number(place) else Certainty.KNOWN,
        )


def _may_set_enabled(call: ast.Call) -> bool:
    """Return whether a call of a GradScaler may pass ``enabled``, its fifth or sixth argument."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return starred or len(call.args) > 4 or any(k.arg in ("enabled", None) for k in call.keywords)


@rule("AMP862", OptimizerMade)
def _eps_is_zero(flow: Interpreter, event: OptimizerMade) -> Iterator[Mistake]:
    name, models = event.optimizer.class_name, event.optimizer.models or ()
    eps = literal_of(event.call.keywords.get("eps", LiteralValue(ADAM_LIKE.get(name))))
    halved = any(flow.state.trained_cast(HALF_WEIGHTS, model) for model in models)
    if name in ADAM_LIKE and halved and isinstance(eps, int | float) and eps <= FLOAT16_ROUNDS_TO_ZERO:
        yield Mistake(
            event.node,
            f"eps={eps:g} is zero in float16, the dtype of these parameters and of the optimizer's state:"
            " where a gradient is zero, the update is 0/0",
            "keep the parameters in float32; if they must be float16, use eps=1e-4",
        )


@rule("AMP870", OptimizerMade)
def _updates_are_rounded_away(flow: Interpreter, event: OptimizerMade) -> Iterator[Mistake]:
    """bfloat16 weights that an optimizer of torch changes by less than they can represent."""
    expression, models = event.call.expression(1, "lr"), event.optimizer.models
    rate = literal_of(event.call.get(1, "lr"))
    if rate is None and expression is not None:
        rate = flow.point.script.defaults.get(dotted_name(expression).rpartition(".")[2])
    is_small = isinstance(rate, float) and rate <= _SMALL_LEARNING_RATE
    if event.optimizer.class_name not in ADAM_LIKE or not is_small:
        return
    if models is None:  # of the only model, if there is one
        facts = flow.state.matching(BFLOAT16_WEIGHTS)
        models = frozenset(key[0] for key, fact in facts if fact is not None)
    if len(models) != 1 or flow.linked.mentions(*_OTHERWISE):
        return
    cast = flow.state.trained_cast(BFLOAT16_WEIGHTS, next(iter(models)))
    if cast is not None:
        yield Mistake(
            cast,
            f"these weights are bfloat16, and Adam changes each by about the learning rate, {rate:g}: less "
            "than half a unit in the last place of weights of 0.05 and more, whose changes are rounded away",
            "keep the weights in float32 and compute under autocast, or round stochastically",
            certainty=Certainty.LIKELY,
        )


@rule("AMP876", ModelCall, of_dtypes=True)
def _overflows(flow: Interpreter, event: ModelCall) -> Iterator[Mistake]:
    loading = event.model.node
    if "AutoencoderKL" not in event.model.origin or not isinstance(loading, ast.Call) or not loading.args:
        return
    is_plain = isinstance(loading.args[0], ast.Constant | ast.Name)
    name = literal_of(flow.evaluate(loading.args[0])) if is_plain else None
    dtype, cast = flow.state.weights_cast(event.model.key) or ("", None)
    is_low = dtype == "float16" or event.autocast.computes_float16
    if is_low and isinstance(name, str) and _SDXL.search(name.lower()):
        yield Mistake(
            cast or event.node,
            "this VAE overflows in float16: its activations exceed 65504, and what it returns is NaN",
            "keep it in float32 or bfloat16, or load madebyollin/sdxl-vae-fp16-fix",
            certainty=Certainty.LIKELY,
        )


_SDXL: Final = re.compile(r"(sdxl|stable-diffusion-xl)(?!.*fp16-fix)")


@rule("AMP867", WeightsAveraged, of_dtypes=True)
def _average_stands_still(flow: Interpreter, event: WeightsAveraged) -> Iterator[Mistake]:
    cast, dtype = event.average.cast, event.average.dtype
    for model in event.average.models or () if cast is None and not dtype else ():
        dtype, cast = flow.state.weights_cast(model) or (dtype, cast)
    if cast is not None:
        yield Mistake(
            cast,
            f"these copies of the weights are {dtype}, and line {line_of(event.node)} averages them: "
            f"changes of less than {_SMALLEST_CHANGE[dtype]} of a weight are rounded away, and the average "
            "stands still",
            "keep the average in float32, and cast a copy of it where it is used",
            certainty=Certainty.LIKELY,
        )


@rule("AMP867", EntryPointFollowed, of_dtypes=True)
def _average_is_rounded(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """An average that each pass of a loop casts to float16 and back, as an evaluation does."""
    averaged = {model for e in of_type(followed.events, WeightsAveraged) for model in e.average.models or ()}
    for event in of_type(followed.events, WeightsRounded):
        if event.model in averaged:
            yield Mistake(
                event.cast,
                f"line {line_of(event.node)} casts this average of the weights back to float32, but it stays "
                "rounded to float16: changes of less than 1/2048 of a weight since the last time are lost",
                "cast a copy of it, or evaluate it under autocast",
                certainty=Certainty.LIKELY,
            )
