"""Rules on loops in which a framework scales the loss: calls that bypass the framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, Diagnostic, file_number, line_of
from ampaudit.linter.flow.events import (
    Backward,
    Clip,
    Event,
    GradientRead,
    ManagedBackward,
    ManagedClip,
    ManagedStep,
    ManagedUpdate,
    ScalerScale,
    StepEvent,
    UnknownBackward,
    of_type,
)
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.statement_context import nodes_around, tests_around
from ampaudit.linter.flow.syntax import (
    calls_method,
    covers_line,
    dotted_name,
    has_name,
    keyword_value,
    last_component,
)
from ampaudit.linter.flow.torch_names import FRAMEWORKS, Framework
from ampaudit.linter.flow.values import ClassInfo, FunctionInfo, Managed, Tensor
from ampaudit.linter.rules.accumulation import branch_of, excludes, side_of

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = ["check_apex_loops", "check_lightning_module", "check_managed_loops", "check_training_step"]

_MASTERS = re.compile(r"O2|O3")
_OPTIMIZER_STATE = re.compile(r"\bopt(?:im\w*|_\w+)?\.state_dict\(\)")
_OPTIMIZER_RESTORED = re.compile(r"^(?:self\.)?opt(?:im\w*|_\w+)?\.load_state_dict\(")


def check_managed_loops(interpreter: Interpreter, events: list[Event]) -> None:
    """Check the loops of one entry point."""
    for index, event in enumerate(events):
        is_backward = isinstance(event, Backward | UnknownBackward)
        managed = _steps_next(events[index:]) if is_backward else None
        if managed is not None and managed.scales and not _is_alternative(interpreter, event):
            _report_bypassing_backward(interpreter, event, managed.framework, managed.scales)
    _check_clipped(interpreter, events)
    _check_scaled_twice(interpreter, events)
    for backward in of_type(events, ManagedBackward):
        _check_divided_twice(interpreter, backward)
    for update in of_type(events, ManagedUpdate) if of_type(events, ManagedStep) else ():
        _check_updated(interpreter, update)
    for clip in of_type(events, ManagedClip):
        _check_accumulated(interpreter, clip)


def _is_alternative(interpreter: Interpreter, event: Event) -> bool:
    """Return whether a condition chooses between this backward and another, which is the framework's."""
    choices = (n for n in nodes_around(interpreter.linked, event.node) if isinstance(n, ast.If))
    sides = ((choice, side_of(choice, event.node)) for choice in choices)
    others = (choice.orelse if side == "body" else choice.body for choice, side in sides if side)
    return any(calls_method(statement, "backward") for other in others for statement in other)


def _backwards(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Backward | UnknownBackward)]


def _steps_next(events: list[Event]) -> Managed | None:
    """Return what steps first in the file of the first of these events, if a framework manages that."""
    steps = (event for event in events if isinstance(event, ManagedStep | StepEvent))
    step = next((e for e in steps if file_number(e.node) == file_number(events[0].node)), None)
    return step.managed if isinstance(step, ManagedStep) else None


def _check_clipped(interpreter: Interpreter, events: list[Event]) -> None:
    """Check that DeepSpeed, which keeps the gradients elsewhere, is left to clip."""
    frameworks = [e.managed.framework for e in of_type(events, ManagedBackward)]
    if any(framework is not None and not framework.keeps_gradients for framework in frameworks):
        for event in of_type(events, Clip):
            interpreter.report(
                "AMP807",
                event.node,
                "DeepSpeed keeps the gradients in buffers of its own, scaled by the loss scale: this "
                "clips nothing, or the wrong ones",
                'set "gradient_clipping" in its configuration',
                certainty=Certainty.LIKELY,
            )


def _check_scaled_twice(interpreter: Interpreter, events: list[Event]) -> None:
    """Report a scaler of the script that scales the loss a second time."""
    for event in of_type(events, ScalerScale):
        branch = branch_of(None, event)
        beside = [e for e in of_type(events, ManagedBackward) if not excludes(branch, branch_of(None, e))]
        certainty = max((e.managed.scales for e in beside), default=Certainty.UNKNOWN)
        if not certainty:
            continue
        interpreter.report(
            "AMP815",
            event.node,
            "this loss is scaled twice: the framework's backward scales it as well",
            "remove this scaler",
            certainty=certainty,
        )


def _check_updated(interpreter: Interpreter, event: ManagedUpdate) -> None:
    """Check that the scaler of a framework, whose step updates it, is not updated once more."""
    managed = event.managed
    if managed.framework is not None and managed.scales:
        interpreter.report(
            "AMP806",
            event.node,
            f"update() runs again: the step of an optimizer that {managed.framework.name} has prepared "
            "calls it already, and a second call raises",
            "remove it",
            certainty=managed.scales,
        )


def _check_divided_twice(interpreter: Interpreter, event: ManagedBackward) -> None:
    """Check that a loss is not divided by the accumulated batches before a backward that does it."""
    loss, managed, framework = event.loss, event.managed, event.managed.framework
    if not managed.divides or framework is None or not isinstance(loss, Tensor) or not loss.divided:
        return
    for node in nodes_around(interpreter.linked, event.node):
        divisor = node.right if isinstance(node, ast.BinOp) else getattr(node, "value", None)
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Div):
            continue
        divided = node.left if isinstance(node, ast.BinOp) else node.target
        if "loss" in dotted_name(divided) and _COUNTS.search(ast.unparse(divisor) if divisor else ""):
            interpreter.report(
                "AMP859",
                node,
                f"the loss is divided twice: backward of {framework.name} divides it by "
                f"{framework.divisor} as well",
                "remove this division",
                certainty=Certainty.LIKELY,
            )


_COUNTS = re.compile(r"accum|grad_acc|\bgas\b", re.IGNORECASE)


def _report_bypassing_backward(
    interpreter: Interpreter, event: Event, framework: Framework | None, certainty: Certainty
) -> None:
    call = _backward_call(event)
    if call is None or framework is None:
        return
    interpreter.report(
        "AMP802",
        call,
        f"backward runs on the unscaled loss, past {framework.name}, whose step expects scaled gradients in "
        "float16: it raises, or divides these by the loss scale",
        f"write {framework.backward}",
        certainty=certainty,
    )


def _backward_call(event: Event) -> ast.Call | None:
    """Return the call of ``backward`` on a loss itself; what is scaled before is left alone."""
    if isinstance(event, Backward):
        call = event.node if not event.loss.scaler_key else None
    else:
        calls = (n for n in ast.walk(event.node) if isinstance(n, ast.Call))
        call = next(
            (c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"), None
        )
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    return call if "loss" in dotted_name(call.func.value).lower() or isinstance(event, Backward) else None


def _check_accumulated(interpreter: Interpreter, event: ManagedClip) -> None:
    """Check that Accelerate clips only where it steps, as each call unscales."""
    managed = event.managed
    blocks = [guard.node for guard in event.guards if isinstance(guard.node, ast.With)]
    tests = tests_around(interpreter.linked, event.node)
    name = managed.framework.name if managed.framework is not None else ""
    items = (item.context_expr for block in blocks for item in block.items)
    accumulates = any(calls_method(item, "accumulate") for item in items)
    is_gated = any("sync" in text or "%" in text for text in tests)
    if name == "Accelerate" and accumulates and managed.scales and not is_gated:
        interpreter.report(
            "AMP810",
            event.node,
            "the gradients are clipped for every batch, but the step runs only for some: each call "
            "unscales, and with fp16 the second raises",
            "clip only 'if accelerator.sync_gradients:'",
            certainty=managed.scales,
        )


def check_lightning_module(interpreter: Interpreter, info: ClassInfo, events: list[Event]) -> None:
    """Check a Lightning module that optimizes manually: it must not call ``loss.backward()``."""
    framework = next(one for one in FRAMEWORKS if one.name == "Lightning")
    trainers = [managed for managed in interpreter.managers if managed.framework is framework]
    certainty = max((managed.scales for managed in trainers), default=Certainty.LIKELY)
    _check_after_backward(interpreter, info, trainers, events)
    if certainty and "automatic_optimization = False" in ast.unparse(info.node):
        for node in _clips_before_step(info, events) if trainers else ():
            interpreter.report(
                "AMP807",
                node,
                "the gradients are clipped while they are still scaled: Lightning unscales them in the step",
                "clip in on_before_optimizer_step, or train in bf16-mixed",
                certainty=certainty,
            )
        for event in _backwards(events):
            _report_bypassing_backward(interpreter, event, framework, certainty)


_AFTER_UNSCALING: Final = ("on_before_optimizer_step", "configure_gradient_clipping")


def _clips_before_step(info: ClassInfo, events: list[Event]) -> Iterator[ast.AST]:
    """Yield what clips in a Lightning module other than in, or called from, the hooks after unscaling."""
    hooks = [info.methods[name] for name in _AFTER_UNSCALING if name in info.methods]
    for event in of_type(events, Clip):
        calls = [guard.node for guard in event.guards if guard.kind == "call"]
        if not any(_is_in(node, hook) for node in (event.node, *calls) for hook in hooks):
            yield event.node
    nodes = (node for hook in hooks for node in ast.walk(hook.node))
    called = {dotted_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    for name, method in info.methods.items():
        for node in ast.walk(method.node) if f"self.{name}" not in called and method not in hooks else ():
            if isinstance(node, ast.Call) and dotted_name(node.func) == "self.clip_gradients":
                yield node


def check_training_step(interpreter: Interpreter, info: ClassInfo, events: list[Event]) -> None:
    """Check a training step that replaces that of a framework, whose optimizers expect a scaled loss."""
    for managed in sorted(interpreter.managers, key=lambda one: one.scales, reverse=True):
        framework = managed.framework
        step = info.methods.get(framework.step) if framework is not None else None
        if framework is None or step is None or not managed.scales or not info.derives(*framework.bases):
            continue
        for event in _backwards(events):
            if _is_in(event.node, step):
                _report_bypassing_backward(interpreter, event, framework, managed.scales)


def _is_in(node: ast.AST, method: FunctionInfo) -> bool:
    return covers_line(method.node, line_of(node))


def _check_after_backward(
    interpreter: Interpreter, info: ClassInfo, trainers: list[Managed], events: list[Event]
) -> None:
    """Check the hook that Lightning calls before it unscales the gradients."""
    hook = info.methods.get("on_after_backward")
    certainty = max((managed.scales for managed in trainers), default=Certainty.UNKNOWN)
    if hook is None or not certainty:
        return
    for event in events:
        if isinstance(event, Clip | GradientRead) and _is_in(event.node, hook):
            interpreter.report(
                "AMP807" if isinstance(event, Clip) else "AMP808",
                event.node,
                "on_after_backward runs before Lightning unscales the gradients: they still have the "
                "loss scale",
                "use on_before_optimizer_step, which runs after it",
                certainty=certainty,
            )


def check_apex_loops(script: Script) -> Iterator[Diagnostic]:
    """Check that clipping is behind the block of ``scale_loss``, and on the gradients that the step uses."""
    if "scale_loss" not in script.text:
        return
    certainty = _keeps_masters(script)
    for function in script.nodes():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_function(function, certainty)
    yield from _check_states(script)


def _check_states(script: Script) -> Iterator[Diagnostic]:
    """Check that the state of apex is saved and restored beside that of the optimizer."""
    if "amp.initialize" not in script.code or "state_dict" not in script.code:
        return
    for node in script.nodes():
        text = ast.unparse(node) if isinstance(node, ast.Dict | ast.Expr) else ""
        saves = isinstance(node, ast.Dict) and _OPTIMIZER_STATE.search(text) is not None
        if saves and "amp.state_dict" not in script.code:
            yield Diagnostic(
                "AMP820",
                node,
                "the checkpoint contains the optimizer's state but not apex's: a resumed run starts at a "
                "scale that overflows",
                "save amp.state_dict() as well",
            )
        restores = isinstance(node, ast.Expr) and _OPTIMIZER_RESTORED.search(text) is not None
        if restores and "amp.load_state_dict" not in script.code:
            yield Diagnostic(
                "AMP820",
                node,
                "the optimizer resumes from a checkpoint, but apex's loss scale starts over, at one that "
                "overflows",
                "restore it as well: amp.load_state_dict(checkpoint[...])",
            )


def _keeps_masters(script: Script) -> Certainty:
    """Return how certain it is that apex keeps float32 copies of float16 parameters, as O2 does."""
    for node in script.nodes():
        if isinstance(node, ast.Call) and dotted_name(node.func).endswith("amp.initialize"):
            level = keyword_value(node, "opt_level")
            if isinstance(level, ast.Constant):
                return Certainty.KNOWN if _MASTERS.search(str(level.value)) else Certainty.UNKNOWN
            mentions_level = level is not None and re.search(r"['\"]O2['\"]", script.text)
            return Certainty.LIKELY if mentions_level else Certainty.UNKNOWN
    return Certainty.UNKNOWN


def _check_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, certainty: Certainty
) -> Iterator[Diagnostic]:
    blocks = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.With)
        and any(has_name(item.context_expr, "scale_loss") for item in node.items)
    ]
    inside = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
    uses_masters = bool(blocks) and has_name(function, "master_params")
    for node in ast.walk(function) if blocks else ():
        name = last_component(dotted_name(node.func)) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not name.startswith("clip_grad"):
            continue
        if id(node) in inside:
            yield Diagnostic(
                "AMP807",
                node,
                "the gradients are clipped inside scale_loss, at whose end apex takes the loss scale out "
                "of them",
                "clip after the block",
            )
        elif certainty and not uses_masters and node.args and calls_method(node.args[0], "parameters"):
            yield Diagnostic(
                "AMP807",
                node,
                "with O2, the optimizer steps with apex's float32 copies of the parameters: this clips "
                "the others, whose gradients are not used",
                "clip amp.master_params(optimizer)",
                certainty=certainty,
            )
