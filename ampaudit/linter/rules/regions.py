"""Rules on autocast blocks: what belongs inside, for which device, and what they share with the scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Fix, Mistake, line_of, position_of
from ampaudit.linter.flow.events import (
    AutocastEntered,
    AutocastMade,
    Backward,
    EntryPointFollowed,
    Event,
    LossInside,
    ManagedBackward,
    ManagedStep,
    ModelCall,
    ScalerMade,
    ScalerScale,
    ScriptFollowed,
    StepEvent,
    UnknownBackward,
    of_type,
)
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.objects import applies_to_device
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.state import DEVICE
from ampaudit.linter.flow.statement_context import is_in_scope
from ampaudit.linter.flow.syntax import (
    calls,
    dotted_name,
    enters_autocast,
    keyword_value,
    last_component,
    mentions,
    names_in,
    simple_name,
)
from ampaudit.linter.flow.values import Autocast, DeviceValue, FunctionInfo, Scaler, Tensor, literal_of
from ampaudit.linter.rules.accumulation import branch_of, excludes
from ampaudit.linter.rules.rule import rule


@rule("AMP840", EntryPointFollowed)
def _step_inside(_: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check that an autocast block ends after the loss, unless AMP852 says more, or nothing is trained."""
    events = followed.events
    steps = of_type(events, StepEvent)
    stale = [_block_around_loop(step, events) for step in steps]
    reported: set[Autocast] = set()
    late: list[Backward | StepEvent] = [*of_type(events, Backward), *steps]
    for event in late if steps else ():
        context = event.autocast
        is_stale = any(block is not None and event.is_inside(block) for block in stale)
        if context.is_certain and context not in reported and not is_stale:
            reported.add(context)
            yield Mistake(
                event.node,
                "backward runs inside autocast, although its ops follow the dtypes of the forward pass anyway"
                if isinstance(event, Backward)
                else "the optimizer steps inside autocast, which is for the forward pass and the loss",
                "end the autocast block after the loss",
                _end_block_fix(events, event, context),
            )


# calls after the backward that need no autocast
_NEEDS_NO_AUTOCAST: Final = frozenset(
    "backward scale step update unscale_ zero_grad clip_grad_norm_ clip_grad_value_ parameters item detach"
    " append get_scale print log info add_scalar set_postfix len str float".split()
)


def _end_block_fix(events: list[Event], event: Event, context: Autocast) -> Fix | None:
    """Return the fix that ends the block before a statement, if what follows needs no autocast."""
    block = next((e.block for e in of_type(events, AutocastEntered) if e.context is context), None)
    if not isinstance(block, ast.With) or len(block.items) != 1 or event.statement not in block.body:
        return None
    index = block.body.index(event.statement)
    nodes = [node for statement in block.body[index:] for node in ast.walk(statement)]
    calls = {simple_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    casts = any(isinstance(node, ast.MatMult | ast.Pow) for node in nodes)  # operators that autocast casts
    return Fix.at(block, "end block", str(index)) if calls <= _NEEDS_NO_AUTOCAST and not casts else None


@rule("AMP852", EntryPointFollowed)
def _stale_weights(_: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check for steps in a loop inside one autocast block.

    Autocast keeps the 16-bit copy of each weight until its outermost block ends (torch,
    ``aten/src/ATen/autocast_mode.cpp``: ``cached_cast`` and ``clear_cache``).
    """
    for event in followed.events:
        is_step = isinstance(event, StepEvent | ManagedStep)
        block = _block_around_loop(event, followed.events) if is_step else None
        if block is not None:
            yield Mistake(
                event.node,
                f"this step is in a loop inside the autocast block of line {line_of(block)}, which casts each"
                " weight once and keeps the copy: from the second iteration on, the model computes with the "
                "old weights",
                "enter autocast anew in each iteration, around the forward pass and the loss only",
            )


def _block_around_loop(step: Event, events: list[Event]) -> ast.AST | None:
    """Return the autocast block, or the function with that decorator, around a loop with losses and steps."""
    contexts = {id(e.block): e.context for e in of_type(events, AutocastEntered)}
    for index, guard in enumerate(step.guards):
        context = contexts.get(id(guard.node)) if guard.kind == "with" else None
        if context is None or not context.is_certain:
            continue
        loops = [g.node for g in step.guards[index + 1 :] if g.kind == "loop"]
        backwards = [e for e in events if isinstance(e, Backward | ManagedBackward)]
        computes = any(
            e.is_inside(loop) and (e.is_inside(guard.node) or _is_computed_inside(e))
            for e in backwards
            for loop in loops
        )
        return guard.node if context.caches and computes else None
    return None


def _is_computed_inside(event: Backward | ManagedBackward) -> bool:
    return isinstance(event.loss, Tensor) and event.loss.computed_under != ""


@rule("AMP854", EntryPointFollowed, of_dtypes=True)
def _model_outside(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    forwards = of_type(followed.events, ModelCall)
    if any(e.autocast.enabled is not False for e in forwards):
        return
    for loss in of_type(followed.events, LossInside):
        for event in forwards:
            info = flow.point.script.classes.get(event.model.origin)
            enters_autocast = info is not None and mentions(info.node, "autocast")
            if not enters_autocast and id(event.node) in loss.outputs:
                yield Mistake(
                    event.node,
                    f"the model is called outside autocast, and only the loss of its output, at line"
                    f" {line_of(loss.node)}, inside: it runs in float32",
                    "begin the autocast block before the model is called",
                )


@rule("AMP875", EntryPointFollowed)
def _cached_without_gradients(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check that no weights are cast under ``no_grad`` that the same autocast block needs with gradients.

    Fixed by pull request 165068 of pytorch, of December 2025; reported in issues 65766, 105211 and 112583.
    """
    if not any(isinstance(event, Backward | ManagedBackward | UnknownBackward) for event in followed.events):
        return
    blocks = {id(e.block) for e in of_type(followed.events, AutocastEntered) if e.context.caches}
    calls = of_type(followed.events, ModelCall)
    nodes = {event.node for event in calls}
    # the modules inside a model and inside its copy have the same keys: within which call each was called
    within = {id(event): [guard for guard in event.guards if guard.node in nodes] for event in calls}
    reported: set[ast.withitem | None] = set()
    for index, event in enumerate(calls):
        start = next((i for i, guard in enumerate(event.guards) if id(guard.node) in blocks), None)
        context = event.autocast
        if start is None or "no_grad" not in event.grad_modes or not (context.is_certain and context.caches):
            continue
        # the no_grad inside the autocast block that the call is in; there is none for a decorator
        withs = [guard.node for guard in event.guards[start + 1 :] if isinstance(guard.node, ast.With)]
        items = (item for node in withs for item in node.items)
        block = next((item for item in items if mentions(item.context_expr, "no_grad")), None)
        same_block = event.guards[: start + 1]
        same_weights = (
            other
            for other in calls
            if other.guards[: start + 1] == same_block
            and not other.grad_modes
            and within[id(other)] == within[id(event)]
            and other.model.key == event.model.key
            and not excludes(branch_of(flow, None, event), branch_of(flow, None, other))
        )
        first = next(same_weights, None)
        if first is None or calls.index(first) < index:
            continue  # a call before it has cast the weights with gradients
        # the name of a model from elsewhere may stand for several
        is_same = event.model.node is not None or first.callee == event.callee
        if is_same and block not in reported:
            reported.add(block)
            yield Mistake(
                event.node if block is None else block.context_expr,
                "autocast keeps the casts of weights that are made here without gradients, and the call at "
                f"line {line_of(first.node)} uses them: in older versions of torch, these get no gradients",
                "use an autocast block of its own for what needs no gradients, or cache_enabled=False",
                certainty=Certainty.LIKELY,
            )


@rule("AMP818", EntryPointFollowed)
def _scaler_for_any_dtype(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    entered = _autocasts(followed.events)
    dtype = keyword_value(entered[0], "dtype") if len(entered) == 1 else None
    name = dotted_name(dtype) if dtype is not None else ""
    conditional = {
        e.scaler for e in of_type(followed.events, ScalerMade) if any(g.kind == "if" for g in e.guards)
    }
    for scaler in _scalers(flow, followed.events) if name else ():
        is_always_on = (
            isinstance(scaler.node, ast.Call) and not scaler.node.keywords and scaler.key not in conditional
        )
        if scaler.node is not None and is_always_on and name in flow.point.script.dtype_choices:
            yield Mistake(
                scaler.node,
                f"this scaler is on also where {name} is bfloat16, whose gradients need no loss scale",
                f"create it with enabled={name} == torch.float16",
                certainty=Certainty.LIKELY,
            )


@rule("AMP856", EntryPointFollowed)
def _autocast_of_default_dtype(flow: Interpreter, followed: EntryPointFollowed) -> Iterator[Mistake]:
    """Check for autocast with its default dtype where the scaler or a name has the dtype that was chosen."""
    for call in _autocasts(followed.events) if of_type(followed.events, Backward) else ():
        if (
            flow.linked.mentions("set_autocast")
            or len(call.args) > 1
            or any(keyword.arg in ("dtype", None) for keyword in call.keywords)
        ):
            continue
        calls = [scaler.node for scaler in _scalers(flow, followed.events)]
        switches = [keyword_value(node, "enabled") for node in calls if isinstance(node, ast.Call)]
        reasons = [
            f"the scaler at line {switch.lineno} is on only for one of several dtypes"
            for switch in switches
            if isinstance(switch, ast.Compare) and mentions(switch.left, "dtype")
        ]
        choices = flow.point.script.dtype_choices.items()
        reasons += [
            f"line {value.lineno} chooses one as {name}"
            for name, value in choices
            if is_in_scope(flow.linked, value, call) or "." in name
        ]
        if reasons:
            yield Mistake(
                call,
                "this autocast computes in its default dtype, float16 on CUDA, although " + reasons[0],
                "pass the configured dtype to autocast as well",
                certainty=Certainty.LIKELY,
            )


def _autocasts(events: list[Event]) -> list[ast.Call]:
    """Return the calls that make the autocast contexts that are entered, if they may be on."""
    contexts = [e.context for e in of_type(events, AutocastEntered)]
    return [c.node for c in contexts if isinstance(c.node, ast.Call) and c.enabled is not False]


def _scalers(flow: Interpreter, events: list[Event]) -> list[Scaler]:
    """Return the scalers that scale a loss."""
    keys = dict.fromkeys(event.scaler for event in of_type(events, ScalerScale))
    return [flow.scalers[key] for key in keys if key in flow.scalers]


@rule("AMP847", ModelCall)
def _another_device(flow: Interpreter, event: ModelCall) -> Iterator[Mistake]:
    if not applies_to_device(flow, event.model):
        device = flow.state.get(DEVICE, event.model.key)
        yield Mistake(
            event.autocast.node or event.node,
            f"autocast is for {event.autocast.device}, but the model called at line {line_of(event.node)} is "
            f"on {device}, so nothing is cast",
            f'use torch.autocast("{device}")',
        )


@rule("AMP847", AutocastMade)
def _no_device(flow: Interpreter, event: AutocastMade) -> Iterator[Mistake]:
    call, node = event.call, event.call.node
    first = call.get(0, "device_type")
    text = literal_of(first)
    is_flag = isinstance(first, DeviceValue) or isinstance(text, bool)
    has_more = "**" in call.keywords or any(isinstance(a, ast.Starred) for a in node.args)
    is_known = isinstance(node.func, ast.Attribute) or bool(
        flow.point.script.imports & {"torch.amp.autocast", "torch.autocast"}
    )
    names_index = isinstance(text, str) and ":" in text  # a device, and not its type
    if (is_known and not has_more and (first is None or is_flag)) or names_index:
        fails = "older versions of torch raise with an index" if names_index else "it raises without"
        yield Mistake(
            node,
            f'torch.autocast takes the device type as a string, such as "cuda": {fails}',
            'write torch.autocast("cuda", ...), or torch.autocast(device.type, ...)',
            certainty=Certainty.LIKELY if names_index else Certainty.KNOWN,
        )


_DECORATORS: Final = {"forward": "custom_fwd", "backward": "custom_bwd"}
_PRODUCTS: Final = frozenset(
    "matmul mm bmm einsum addmm baddbmm linear conv1d conv2d conv3d conv_transpose2d mv".split()
)


@rule("AMP850", ScriptFollowed)
def _autograd_functions(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    """Report functions with matrix products that lack ``custom_fwd`` or ``custom_bwd``."""
    script = flow.linked.main
    is_used = "autocast" in script.text or any(managed.autocast for managed in flow.managers)
    if not is_used or "Function" not in script.text:
        return
    for info in script.classes.values():
        methods = {name: info.methods[name] for name in _DECORATORS if name in info.methods}
        if len(methods) < 2 or "Function" not in map(last_component, info.bases):
            continue
        if isinstance(methods["backward"].node.body[-1], ast.Raise):
            continue
        missing = [
            _DECORATORS[name]
            for name, method in methods.items()
            if not any(mentions(decorator, _DECORATORS[name]) for decorator in method.node.decorator_list)
        ]
        if not missing and "setup_context" in info.methods:
            yield Mistake(
                methods["forward"].node.decorator_list[-1],
                "custom_fwd keeps the state of autocast in forward's first argument, which is no ctx beside"
                " setup_context: custom_bwd does not find it and raises",
                "write forward(ctx, ...) and drop setup_context",
            )
        always_raises = missing == ["custom_fwd"]
        in_other_dtypes = (
            missing
            and (len(missing) == 1 or not any(map(_chooses_dtypes, _decisive(methods))))
            and any(_multiplies(method.node) for method in methods.values())
            and _runs_under_autocast(script, info.node.name)
        )
        if always_raises or in_other_dtypes:
            is_fixable = len(missing) == 2 and all(method.is_static for method in methods.values())
            yield Mistake(
                info.node,
                f"{info.node.name} has no {' and '.join(missing)}: its backward runs without autocast, "
                "on whatever dtypes the forward saved",
                'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with'
                ' torch.amp.custom_bwd(device_type="cuda")',
                # torch has these decorators since 2.4
                Fix("decorate", *position_of(info.node), is_safe=False) if is_fixable else None,
            )


def _decisive(methods: Mapping[str, FunctionInfo]) -> list[ast.AST]:
    """Return a backward, and what its forward saves for it or casts to a fixed dtype."""
    forward, backward = (methods[name].node for name in _DECORATORS)
    statements = [node for node in ast.walk(forward) if isinstance(node, ast.Assign | ast.Expr | ast.Return)]
    saving = [node for node in statements if calls(node, "save_for_backward")]
    saved = {"ctx"}.union(*map(names_in, saving))

    def decides(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        return calls(node, "float", "half", "bfloat16") or any(saved & names_in(t) for t in targets)

    return [backward, *saving, *filter(decides, statements)]


def _chooses_dtypes(node: ast.AST) -> bool:
    return (
        mentions(node, "autocast", "dtype")
        or calls(node, "to", "float", "type_as")
        or any(isinstance(part, ast.keyword) and part.arg == "dtype" for part in ast.walk(node))
    )


def _multiplies(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.MatMult) or (isinstance(node, ast.Call) and simple_name(node.func) in _PRODUCTS)
        for node in ast.walk(function)
    )


def _runs_under_autocast(script: Script, name: str) -> bool:
    """Return whether it is applied in an autocast block, in a module, or by a function called in one."""
    contexts = {item.name for item in script.assignments if mentions(item.value, "autocast")}
    aliases = {item.name for item in script.assignments if dotted_name(item.value) == f"{name}.apply"}
    applied = {f"{name}.apply", *aliases}
    blocks = [
        block
        for block in script.of_type(ast.With)
        if enters_autocast(block) or any(dotted_name(i.context_expr) in contexts for i in block.items)
    ]
    inside = {dotted_name(node) for block in blocks for node in ast.walk(block)} - {""}

    def is_entered(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(dotted_name(target) in inside for target in node.targets)
        if isinstance(node, ast.ClassDef):
            return node.name in script.classes and script.classes[node.name].is_module
        return isinstance(node, ast.FunctionDef) and (
            node.name in inside or any(mentions(d, "autocast") for d in node.decorator_list)
        )

    def applies(node: ast.AST) -> bool:
        return any(dotted_name(part) in applied for part in ast.walk(node))

    return bool(applied & inside) or any(is_entered(node) and applies(node) for node in script.nodes())
