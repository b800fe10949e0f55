"""Functions and classes of torch and its neighbours, by their dotted names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ampaudit.lint.diagnostic import Fix
from ampaudit.lint.flow import gradients, objects, optimizers, tensors
from ampaudit.lint.flow.constructors import autocast, made_scaler
from ampaudit.lint.flow.joining import part_of
from ampaudit.lint.flow.names import AUTOCASTS, LOSS_FUNCTIONS, MATRIX, NO_HALF, SCALERS
from ampaudit.lint.flow.values import (
    OPAQUE,
    UNKNOWN,
    Const,
    Context,
    Entries,
    Gradients,
    Listed,
    Loss,
    Managed,
    Model,
    ParamGrad,
    Params,
    Scaler,
    Scheduler,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.calls import Arguments
    from ampaudit.lint.flow.machine import Machine

__all__ = ["loss_call", "symbol_call"]

_CLIPS: Final = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"})
_MANAGED: Final = (
    "accelerate.Accelerator",
    "lightning.Fabric",
    "lightning.fabric.Fabric",
    "deepspeed.initialize",
)
_MODELS: Final = (
    "torchvision.models.",
    "timm.",
    "transformers.Auto",
    "segmentation_models_pytorch.",
    "monai.networks.",
)
_PASSES_ON: Final = frozenset({"builtins.list", "builtins.tuple", "builtins.iter", "builtins.reversed"})
Handler = Callable[["Machine", ast.Call, "Arguments"], Value]


def symbol_call(machine: Machine, node: ast.Call, path: str, arguments: Arguments) -> Value:
    """The value of a call of something imported, or built in."""
    name = path.rpartition(".")[2]
    if path in _EXACT:
        return _EXACT[path](machine, node, arguments)
    if path in AUTOCASTS:
        return autocast(machine, node, AUTOCASTS[path], arguments)
    if path in SCALERS:
        return made_scaler(machine, node, arguments)
    if name in _CLIPS:
        return gradients.clip(machine, node, name, arguments)
    if path.startswith("torch."):
        return _of_torch(machine, node, path, name, arguments)
    if path.startswith(_MANAGED):
        return Listed((Managed(),) * 4) if path.endswith("initialize") else Managed()
    if path.startswith(_MODELS):
        return objects.made_model(machine, node, path, arguments)
    if path in _PASSES_ON:
        return arguments.positional[0] if arguments.positional else UNKNOWN
    if path.startswith("builtins."):
        return _builtin(machine, node, name, arguments)
    from ampaudit.lint.flow.calls import unknown_call

    return unknown_call(machine, node, path, arguments)


def _of_torch(machine: Machine, node: ast.Call, path: str, name: str, arguments: Arguments) -> Value:
    if path in MATRIX:
        return tensors.product(machine, node, arguments.all())
    if path in NO_HALF:
        return _no_half(machine, node, path, arguments)
    if path.startswith("torch.nn.functional.") and name in LOSS_FUNCTIONS:
        return loss_call(machine, node, Loss(name, None, _reduction(arguments)), arguments)
    if path.startswith("torch.optim.lr_scheduler."):
        return Scheduler(f"L{node.lineno}") if "Plateau" not in name else UNKNOWN
    if path.startswith("torch.optim.") and name[:1].isupper() and "swa" not in path:
        return optimizers.made_optimizer(machine, node, name, arguments)
    if path.startswith("torch.nn.") and name.endswith("Loss"):
        return Loss(name, node, _reduction(arguments))
    if path.startswith(("torch.nn.parallel.", "torch.distributed.fsdp.Fully")) and name[:1].isupper():
        inner = arguments.get(0, "module")
        known = inner if isinstance(inner, Model) else Model(f"L{node.lineno}:{node.col_offset}", node)
        return objects.wrapped(known, name)
    if (
        path.startswith("torch.nn.")
        and name[:1].isupper()
        and "functional" not in path
        and "utils" not in path
    ):
        return objects.made_model(machine, node, path, arguments)
    return _function(machine, node, path, name, arguments)


def _function(machine: Machine, node: ast.Call, path: str, name: str, arguments: Arguments) -> Value:
    given = arguments.all()
    first = arguments.positional[0] if arguments.positional else UNKNOWN
    inner = part_of(first) if isinstance(first, Listed) else first
    if isinstance(inner, Gradients):
        return tensors.norm_of(machine, node, inner) if tensors.is_norm(name) else inner
    if isinstance(inner, ParamGrad) and "distributed" not in path:
        return tensors.gradient_method(machine, node, name)
    if name == "sigmoid":
        return Tensor(sigmoid=node, roots=inner.roots if isinstance(inner, Tensor) else None, node=node)
    if not path.startswith(("torch.nn.functional.", "torch.")) or path.count(".") > 3:
        return UNKNOWN
    tensor = [value for value in given if isinstance(value, Tensor)]
    if not tensor:
        return OPAQUE if not any(isinstance(value, Scaler) for value in given) else UNKNOWN
    return Tensor(scaled=tensors.mixed(tensor), roots=tensors.all_roots(tensor), node=node)


def _reduction(arguments: Arguments) -> str:
    value = arguments.keywords.get("reduction")
    if value is None:
        return "mean"
    return str(value.value) if isinstance(value, Const) else "?"


def loss_call(machine: Machine, node: ast.Call, loss: Loss, arguments: Arguments) -> Value:
    """A loss of torch's is computed."""
    given = [value for value in arguments.all() if isinstance(value, Tensor)]
    first = arguments.positional[0] if arguments.positional else UNKNOWN
    here = machine.autocast
    if (
        loss.name in ("BCELoss", "binary_cross_entropy")
        and here.enabled is True
        and here.device != "cpu"
        and not here.switch
    ):
        _bce(machine, node, loss, first)
    elif here.enabled is False and isinstance(first, Tensor) and first.cast:
        machine.say(
            "AMP842",
            node,
            f"the model's output is {first.cast} under autocast, and this loss is computed outside of it, in"
            f" {first.cast}, too",
            "move the loss into the autocast block, or give it output.float()",
        )
    under = tensors.lowered(machine) or next((t.under for t in given if t.under), "")
    roots = tensors.all_roots(given) if given else None
    divided = False if loss.reduction == "mean" else None
    return Tensor(under=under, roots=roots, loss=loss.name, divided=divided, node=node)


def _bce(machine: Machine, node: ast.Call, loss: Loss, first: Value) -> None:
    fix = None
    argument = node.args[0] if node.args else None
    direct = isinstance(first, Tensor) and first.sigmoid is argument and argument is not None
    if direct and loss.name == "binary_cross_entropy" and isinstance(argument, ast.Call):
        fix = Fix.at(node, "with logits")
    machine.say(
        "AMP844",
        node,
        "autocast refuses binary cross entropy on probabilities: in float16 log(0) is too near",
        "give the logits to BCEWithLogitsLoss or F.binary_cross_entropy_with_logits, and drop the sigmoid",
        fix,
    )


def _no_half(machine: Machine, node: ast.Call, path: str, arguments: Arguments) -> Value:
    first = arguments.positional[0] if arguments.positional else UNKNOWN
    # the CPU's autocast computes these in float32
    cast_here = machine.autocast.enabled is not False and machine.autocast.device == "cpu"
    if isinstance(first, Tensor) and first.cast and not cast_here:
        machine.say(
            "AMP846",
            node,
            f"{path} has no {first.cast} kernel, and autocast made its input {first.cast}",
            "compute it from float32 inputs under 'with torch.autocast(device_type, enabled=False):'",
        )
    return OPAQUE


def _builtin(machine: Machine, node: ast.Call, name: str, arguments: Arguments) -> Value:
    first = arguments.positional[0] if arguments.positional else UNKNOWN
    if name == "float" and isinstance(first, Tensor) and first.node is not None:
        machine.note("item", node, value=first)
        return OPAQUE
    if name == "dict" and not arguments.positional:
        return Entries(tuple(arguments.keywords.values()), node)
    if name == "sum" and isinstance(first, Listed | Tensor):
        return part_of(first)
    if name in ("enumerate", "zip"):
        return Listed(
            (
                Listed(
                    (
                        UNKNOWN if name == "enumerate" else part_of(first),
                        *map(part_of, ([first] if name == "enumerate" else arguments.positional[1:])),
                    )
                ),
            ),
            one=True,
        )
    if name == "next" and isinstance(first, Params):
        return first
    return (
        OPAQUE if name in ("len", "range", "int", "str", "min", "max", "round", "abs", "print") else UNKNOWN
    )


def _context(kind: str) -> Handler:
    return lambda machine, node, arguments: Context(kind)


def _save(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    what = arguments.get(0, "obj")
    if isinstance(what, Entries):
        machine.note("save", node, entries=what)
    return UNKNOWN


def _thread(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    machine.note("thread", node, target=arguments.get(1, "target"), autocast=machine.autocast)
    return UNKNOWN


def _null(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    return Context("null")


def _grad_mode(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    value = arguments.get(0, "mode")
    return Context("no_grad" if isinstance(value, Const) and value.value is False else "unsure")


def _device(machine: Machine, node: ast.Call, arguments: Arguments) -> Value:
    value = arguments.get(0, "type")
    return value if isinstance(value, Const) else UNKNOWN


_EXACT: Final[dict[str, Handler]] = {
    "torch.no_grad": _context("no_grad"),
    "torch.inference_mode": _context("no_grad"),
    "torch.enable_grad": _context("grad"),
    "torch.set_grad_enabled": _grad_mode,
    "contextlib.nullcontext": _null,
    "torch.autograd.grad": lambda machine, node, arguments: gradients.autograd_grad(machine, node, arguments),
    "torch.save": _save,
    "torch.device": _device,
    "torch.compile": lambda machine, node, arguments: arguments.get(0, "model") or UNKNOWN,
    "threading.Thread": _thread,
    "itertools.chain": lambda machine, node, arguments: _chained(arguments),
}


def _chained(arguments: Arguments) -> Value:
    models: frozenset[str] | None = frozenset()
    for value in arguments.positional:
        known = value.models if isinstance(value, Params) else None
        models = None if models is None or known is None else models | known
    return Params(models)
