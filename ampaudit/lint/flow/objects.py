"""Models, schedulers and objects of the file's own classes: how they are made, moved, called."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.lint.flow.facts import no_gradients
from ampaudit.lint.flow.inlining import enter
from ampaudit.lint.flow.script import dotted
from ampaudit.lint.flow.tensors import cast_of, dtype_of, lowered
from ampaudit.lint.flow.values import (
    MAYBE,
    UNKNOWN,
    ClassInfo,
    Const,
    Context,
    Instance,
    Model,
    Params,
    Scheduler,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = [
    "MODULE_METHODS",
    "device_of",
    "forward",
    "instance",
    "made_model",
    "model_method",
    "scheduler_method",
    "wrapped",
]

MODULE_METHODS: Final = frozenset(
    "train eval to cuda cpu half float parameters named_parameters modules children state_dict"
    " load_state_dict register_buffer register_parameter zero_grad apply requires_grad_ log log_dict".split()
)
_NOT_A_FORWARD: Final = MODULE_METHODS | frozenset(
    "named_modules named_children get_parameter buffers named_buffers compile share_memory"
    " gradient_checkpointing_enable enable_input_require_grads save_pretrained push_to_hub"
    " print_trainable_parameters set_epoch init_weights freeze unfreeze add_module load_adapter".split()
)


def made_model(machine: Machine, node: ast.Call, origin: str, arguments: Arguments) -> Model:
    """A model that is constructed or loaded here."""
    model = Model(f"L{node.lineno}:{node.col_offset}", node, origin=origin)
    for name in ("dtype", "torch_dtype"):
        if dtype_of(arguments.keywords.get(name, UNKNOWN)) == "float16":
            machine.live.put(node, "half", model.key)
    return model


def wrapped(model: Model, wrap: str) -> Model:
    """The model inside a parallel wrapper: the same parameters."""
    return Model(model.key, model.node, wrap, model.origin)


def model_method(machine: Machine, node: ast.Call, model: Model, name: str, arguments: Arguments) -> Value:
    """What a method of a model does."""
    state = machine.live
    if name in ("half", "float", "bfloat16", "double", "to", "type"):
        _cast(machine, node, model, name, arguments)
        _move(machine, model, arguments)
        return model
    if name in ("cuda", "cpu"):
        state.put(name, "device", model.key)
        return model
    if name in ("parameters", "named_parameters"):
        return Params(frozenset({model.key}))
    if name == "zero_grad":
        no_gradients(machine)
        machine.note("zero_grad", node, optimizer="", many=True)
        return UNKNOWN
    if name in ("clip_grad_norm_", "clip_grad_value_"):
        from ampaudit.lint.flow.gradients import clip

        return clip(machine, node, name, arguments)
    if name == "no_sync":
        return Context("no_sync")
    if name in ("train", "eval", "requires_grad_", "apply"):
        return model
    if name in _NOT_A_FORWARD:
        return UNKNOWN
    value = forward(machine, node, model, arguments)
    return value if name in ("forward", "__call__") else Tensor(roots=value.roots, under=value.under)


def _cast(machine: Machine, node: ast.Call, model: Model, name: str, arguments: Arguments) -> None:
    wanted = cast_of(name, arguments)
    if wanted:
        machine.live.put(node if wanted == "float16" else None, "half", model.key)
    elif (
        any(value is UNKNOWN for value in arguments.all()) and machine.live.get("half", model.key) is not None
    ):
        machine.live.put(MAYBE, "half", model.key)


def _move(machine: Machine, model: Model, arguments: Arguments) -> None:
    for value in arguments.all():
        device = device_of(value)
        if device:
            machine.live.put(device, "device", model.key)
        elif value is UNKNOWN:
            machine.live.put(MAYBE, "device", model.key)


def device_of(value: Value | None) -> str:
    """``cuda`` of ``"cuda:0"``; empty for what is no literal device."""
    text = value.value if isinstance(value, Const) else ""
    if isinstance(text, str):
        head = text.partition(":")[0]
        return head if head in ("cuda", "cpu", "mps", "xpu") else ""
    return "cuda" if isinstance(text, int) and not isinstance(text, bool) else ""


def forward(machine: Machine, node: ast.Call, model: Model, arguments: Arguments) -> Tensor:
    """A model is called: what it returns was computed as autocast says here."""
    cast = lowered(machine) if _check_device(machine, node, model) else ""
    root = f"{model.key} at L{node.lineno}:{node.col_offset}{machine.callers}"
    given: frozenset[str] | None = frozenset({root})
    for value in arguments.all():
        if isinstance(value, Tensor) and given is not None:
            given = (
                None
                if value.roots is None and value.node is not None
                else given | (value.roots or frozenset())
            )
    machine.live.put(None, "freed", root)
    called = not isinstance(node.func, ast.Attribute) or node.func.attr in ("forward", "__call__", "module")
    called = called or machine.script.ducks.is_model(dotted(node.func))
    about = {"autocast": machine.autocast, "grad": tuple(machine.grad), "called": called}
    machine.note("forward", node, model=model, **about)
    halved = machine.live.get("half", model.key)
    if cast and isinstance(halved, ast.AST):
        machine.note("half.autocast", halved, call=node)
    return Tensor(cast=cast if _keeps_cast(machine, model) else "", under=cast, roots=given, node=node)


def _keeps_cast(machine: Machine, model: Model) -> bool:
    """Whether what the model returns is in autocast's dtype, as far as its class in this file shows."""
    info = machine.script.classes.get(model.origin)
    method = info.method("forward") if info is not None else None
    if method is None:
        return True
    returned = [n.value for n in ast.walk(method.node) if isinstance(n, ast.Return) and n.value is not None]
    text = " ".join(ast.unparse(value) for value in returned)
    plain = all(isinstance(value, ast.Call | ast.Name) for value in returned)
    return plain and not any(word in text for word in ("float(", "softmax", "float32", "norm", "loss"))


def _check_device(machine: Machine, node: ast.Call, model: Model) -> bool:
    """Whether autocast acts on the model, as far as is known."""
    here, device = machine.autocast, machine.live.get("device", model.key)
    if (
        here.enabled is not True
        or not here.device
        or not isinstance(device, str)
        or device in (MAYBE, here.device)
    ):
        return True
    place = here.node if here.node is not None else node
    machine.say(
        "AMP847",
        place,
        f"autocast is for {here.device}, but the model it surrounds at line {node.lineno} is on {device}: it"
        " casts nothing",
        f'use torch.autocast("{device}")',
    )
    return False


def scheduler_method(
    machine: Machine, node: ast.Call, scheduler: Scheduler, name: str, arguments: Arguments
) -> Value:
    """A step of a learning-rate scheduler; one with arguments is of another kind than torch's."""
    if name == "step" and not arguments.all():
        machine.note("scheduler.step", node, scheduler=scheduler.key)
    return UNKNOWN


def instance(machine: Machine, node: ast.Call, info: ClassInfo, arguments: Arguments) -> Value:
    """An object of a class of the file."""
    if info.derives("Module", "LightningModule"):
        return made_model(machine, node, info.node.name, arguments)
    if info.derives("Optimizer"):
        return UNKNOWN
    made = Instance(f"{info.node.name} L{node.lineno}:{node.col_offset}", info)
    start = info.method("__init__")
    if start is not None and start.busy:
        enter(machine, start, node, arguments.named(), made, 0)
    return made
