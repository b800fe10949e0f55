"""Rules on loops in which a framework scales the loss: calls that bypass the framework, or repeat it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Mistake, file_number, line_of
from ampaudit.linter.flow.events import (
    ApexInitialized,
    Backward,
    ClassFollowed,
    Clip,
    EntryPointFollowed,
    Event,
    ManagedBackward,
    ManagedClip,
    ManagedModel,
    ManagedStep,
    ManagedUpdate,
    ScalerScale,
    ScriptFollowed,
    StepEvent,
    UnknownBackward,
    of_type,
)
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.managed import LIGHTNING, MANAGED, lightning_trainers
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.state import FROZEN, HALF_WEIGHTS, STAGE, PerhapsHalf, Stage
from ampaudit.linter.flow.statement_context import conditions_around, nodes_around
from ampaudit.linter.flow.syntax import (
    calls,
    covers_line,
    dotted_name,
    keyword_value,
    mentions,
    receiver_name,
    simple_name,
    tests_remainder,
)
from ampaudit.linter.flow.torch_names import Framework
from ampaudit.linter.flow.values import ClassInfo, FunctionInfo, KnownItems, Model, Tensor
from ampaudit.linter.rules.accumulation import branch_of, excludes, side_of
from ampaudit.linter.rules.rule import rule


@rule("AMP801", ManagedModel)
def _half_weights(flow: Interpreter, event: ManagedModel) -> Iterator[Mistake]:
    """Check that the parameters of a model, whose gradients a framework unscales, are not float16."""
    managed, fact = event.managed, flow.state.get(HALF_WEIGHTS, event.model)
    halved = fact.node if isinstance(fact, PerhapsHalf) else fact
    is_frozen = flow.state.get(FROZEN, event.model) is not None
    if not isinstance(halved, ast.AST) or is_frozen or not managed.scales or managed.framework is None:
        return
    if not flow.linked.mentions(*_TRAINS_COPIES):
        yield Mistake(
            halved,
            f"these parameters are float16{', if a setting says so' if halved is not fact else ''}, and the "
            f"scaler of {managed.framework.name} cannot unscale float16 gradients",
            "keep the parameters in float32 and let the framework's precision choose the dtype of each op",
            certainty=min(managed.scales, Certainty.KNOWN if halved is fact else Certainty.LIKELY),
        )


# adapters have parameters of their own, and some code casts what it trains by itself
_TRAINS_COPIES: Final = ("add_adapter", "peft", "lora", "cast_training_params")


@rule("AMP802", EntryPointFollowed)
def _bypassing_backward(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    events = followed.events
    for index, event in enumerate(events) if of_type(events, ManagedStep) else ():
        steps = of_type(events[index:], ManagedStep, StepEvent)
        step = next((e for e in steps if file_number(e.node) == file_number(event.node)), None)
        if isinstance(step, ManagedStep) and not _is_alternative(flow, event):
            yield from _bypassing(event, step.managed.framework, step.managed.scales)


def _is_alternative(flow: Interpreter, event: Event) -> bool:
    """Return whether a condition chooses between this backward and another, which is the framework's."""
    choices = (n for n in nodes_around(flow.linked, event.node) if isinstance(n, ast.If))
    sides = ((choice, side_of(choice, event.node)) for choice in choices)
    others = (choice.orelse if side == "body" else choice.body for choice, side in sides if side)
    return any(calls(statement, "backward") for other in others for statement in other)


@rule("AMP802", ClassFollowed)
def _bypassing_backward_in_class(flow: Interpreter, followed: ClassFollowed) -> Iterator[Mistake]:
    """Check a training step in place of a framework's, and a Lightning module that optimizes manually."""
    for managed in sorted(flow.managers, key=lambda one: one.scales, reverse=True):
        framework = managed.framework
        step = followed.info.methods.get(framework.step) if framework is not None else None
        if framework is not None and step is not None and followed.info.derives(*framework.bases):
            for event in followed.events:
                if _is_in(event.node, step):
                    yield from _bypassing(event, framework, managed.scales)
    if _optimizes_manually(followed.info):
        certainty = max(lightning_trainers(flow), default=Certainty.LIKELY)
        for event in followed.events:
            yield from _bypassing(event, LIGHTNING, certainty)


@rule("AMP807", ClassFollowed)
def _clipped_before_unscaling(flow: Interpreter, followed: ClassFollowed) -> Iterator[Mistake]:
    """Check that a Lightning module which optimizes manually clips in a hook that runs after unscaling."""
    info, certainty = followed.info, max(lightning_trainers(flow), default=Certainty.UNKNOWN)
    if not certainty or not _optimizes_manually(info):
        return
    names = ("on_before_optimizer_step", "configure_gradient_clipping")
    hooks = [info.methods[name] for name in names if name in info.methods]
    methods = [method for method in info.methods.values() if method not in hooks]
    clips: list[ast.AST] = [
        node
        for method in methods
        if not any(calls(hook.node, method.node.name) for hook in hooks)
        for node in ast.walk(method.node)
        if isinstance(node, ast.Call) and dotted_name(node.func) == "self.clip_gradients"
    ]
    for event in of_type(followed.events, Clip):
        places = (event.node, *(guard.node for guard in event.guards if guard.kind == "call"))
        if not any(_is_in(place, hook) for place in places for hook in hooks):
            clips.append(event.node)
    for node in clips:
        yield Mistake(
            node,
            "the gradients are clipped while they are still scaled: Lightning unscales them in the step",
            "clip in on_before_optimizer_step, or train in bf16-mixed",
            certainty=certainty,
        )


def _optimizes_manually(info: ClassInfo) -> bool:
    return info.derives("LightningModule") and mentions(info.node, "automatic_optimization")


def _is_in(node: ast.AST, method: FunctionInfo) -> bool:
    return covers_line(method.node, line_of(node))


def _bypassing(event: Event, framework: Framework | None, certainty: Certainty) -> Iterator[Mistake]:
    """Yield the mistake of a backward pass on the loss itself, which no scaler has scaled before."""
    call: ast.AST | None = None
    if isinstance(event, Backward) and not event.loss.scaler_key:
        call = event.node
    elif isinstance(event, UnknownBackward):
        calls = (n for n in ast.walk(event.node) if isinstance(n, ast.Call))
        backwards = (call for call in calls if simple_name(call.func) == "backward")
        call = next((call for call in backwards if "loss" in receiver_name(call).lower()), None)
    if call is not None and framework is not None and certainty:
        yield Mistake(
            call,
            f"backward runs on the unscaled loss, past {framework.name}, whose step expects scaled gradients "
            "in float16: it raises, or divides these by the loss scale",
            f"write {framework.backward}",
            certainty=certainty,
        )


@rule("AMP815", EntryPointFollowed)
def _scaled_twice(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    for event in of_type(followed.events, ScalerScale):
        branch = branch_of(flow, None, event)
        backwards = of_type(followed.events, ManagedBackward)
        beside = [e.managed.scales for e in backwards if not excludes(branch, branch_of(flow, None, e))]
        if Certainty.KNOWN in beside:  # else the framework may be one that scales nothing here
            yield Mistake(
                event.node,
                "this loss is scaled twice: the framework's backward scales it as well",
                "remove this scaler",
            )


@rule("AMP806", EntryPointFollowed)
def _updated_twice(_: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    for event in of_type(followed.events, ManagedUpdate) if of_type(followed.events, ManagedStep) else ():
        framework = event.managed.framework
        if framework is not None and event.managed.scales:
            yield Mistake(
                event.node,
                f"update() runs again: the step of an optimizer that {framework.name} has prepared calls it "
                "already, and a second call raises",
                "remove it",
                certainty=event.managed.scales,
            )


@rule("AMP859", ManagedBackward)
def _divided_twice(flow: Interpreter, event: ManagedBackward) -> Iterator[Mistake]:
    loss, framework = event.loss, event.managed.framework
    if not event.managed.divides or framework is None or not isinstance(loss, Tensor) or not loss.divided:
        return
    for node in nodes_around(flow.linked, event.node):
        if isinstance(node, ast.BinOp):
            divided, divisor = node.left, node.right
        elif isinstance(node, ast.AugAssign):
            divided, divisor = node.target, node.value
        else:
            continue
        counts = mentions(divisor, "accum", "grad_acc", "gas")
        if isinstance(node.op, ast.Div) and "loss" in dotted_name(divided) and counts:
            yield Mistake(
                node,
                f"the loss is divided twice: backward of {framework.name} divides it by "
                f"{framework.divisor} as well",
                "remove this division",
                certainty=Certainty.LIKELY,
            )


@rule("AMP810", ManagedClip)
def _clipped_for_each_batch(flow: Interpreter, event: ManagedClip) -> Iterator[Mistake]:
    """Check that Accelerate and Fabric clip once per step, as each call unscales the gradients."""
    managed = event.managed
    blocks = [guard.node for guard in event.guards if isinstance(guard.node, ast.With)]
    accumulates = any(calls(item, "accumulate") for block in blocks for item in block.items)
    conditions = conditions_around(flow.linked, event.node)
    is_gated = any(mentions(condition, "sync") or tests_remainder(condition) for condition in conditions)
    is_again = flow.state.get(STAGE, MANAGED, "") is Stage.UNSCALED
    unscales = managed.framework is not None and managed.framework.name in ("Accelerate", "Fabric")
    scripts = flow.linked.scripts
    has_optimizer = any(script.usage.optimizer_names for script in scripts)
    is_prepared = has_optimizer and any(calls(script.tree, "prepare", "setup") for script in scripts)
    is_again |= accumulates and managed.divides and not is_gated
    if unscales and managed.scales and is_prepared and is_again:
        yield Mistake(
            event.node,
            "the gradients are clipped more than once before a step: each call unscales, and with fp16 the "
            "second raises",
            "clip once, right before the step; with accumulate(), 'if accelerator.sync_gradients:'",
            certainty=managed.scales,
        )


@rule("AMP807", ScriptFollowed)
def _clipped_beside_apex(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    """Check that clipping is behind the block of ``scale_loss``, and on the gradients that the step uses."""
    script = flow.linked.main
    if "scale_loss" not in script.text:
        return
    certainty = _keeps_masters(script)
    for function in script.of_type(ast.FunctionDef, ast.AsyncFunctionDef):
        nodes = script.nodes(function)
        withs = [node for node in nodes if isinstance(node, ast.With)]
        blocks = [node for node in withs if any(calls(item, "scale_loss") for item in node.items)]
        uses_masters = mentions(function, "master_params")
        clips = [n for n in nodes if isinstance(n, ast.Call) and simple_name(n.func).startswith("clip_grad")]
        for node in clips if blocks else ():
            if any(covers_line(block, node.lineno) for block in blocks):
                yield Mistake(
                    node,
                    "the gradients are clipped inside scale_loss, at whose end apex takes the loss scale out "
                    "of them",
                    "clip after the block",
                )
            elif certainty and not uses_masters and node.args and calls(node.args[0], "parameters"):
                yield Mistake(
                    node,
                    "with O2, the optimizer steps with apex's float32 copies of the parameters: this clips "
                    "the others, whose gradients are not used",
                    "clip amp.master_params(optimizer)",
                    certainty=certainty,
                )


def _keeps_masters(script: Script) -> Certainty:
    """Return how certain it is that apex keeps float32 copies of float16 parameters, as O2 does."""
    for node in script.of_type(ast.Call):
        if dotted_name(node.func).endswith("amp.initialize"):
            level = keyword_value(node, "opt_level")
            if isinstance(level, ast.Constant):
                return Certainty.KNOWN if level.value in ("O2", "O3") else Certainty.UNKNOWN
            is_option = any(constant.value == "O2" for constant in script.of_type(ast.Constant))
            return Certainty.LIKELY if level is not None and is_option else Certainty.UNKNOWN
    return Certainty.UNKNOWN


@rule("AMP858", ApexInitialized)
def _wrapped_before_apex(_: Interpreter, event: ApexInitialized) -> Iterator[Mistake]:
    for model in event.models.items if isinstance(event.models, KnownItems) else (event.models,):
        if isinstance(model, Model) and model.wrapper:
            yield Mistake(
                event.node,
                f"this model is already inside {model.wrapper}, which amp.initialize refuses: it casts the "
                "parameters before they are wrapped",
                "call amp.initialize first and wrap what it returns",
            )
