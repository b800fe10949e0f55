"""Interprets calls: of methods, of functions of torch, of packages or of the file, and of unknown code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ampaudit.linter.diagnostic import Certainty, file_number, key_of
from ampaudit.linter.flow import events, gradients, objects, tensors
from ampaudit.linter.flow.gradients import gradient_method, scaler_method, use_loss_gradients
from ampaudit.linter.flow.inlining import follow_callback, inline_call
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.managed import make_managed, make_trainer, managed_method
from ampaudit.linter.flow.objects import call_model, copies_method
from ampaudit.linter.flow.state import (
    BFLOAT16_WEIGHTS,
    HALF_WEIGHTS,
    PERHAPS,
    UNKNOWN_GRADIENTS,
    UNUSED,
    choice_of_dtypes,
    flattened,
    item_of,
    join_items,
)
from ampaudit.linter.flow.syntax import dotted_name, keyword_value
from ampaudit.linter.flow.torch_names import (
    AUTOCASTS,
    FRAMEWORKS,
    HARMLESS_METHODS,
    LOSS_FUNCTIONS,
    MAKES_TENSORS,
    MATRIX_PRODUCTS,
    NAMESPACES,
    SCALERS,
    makes_model,
    makes_optimizer,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    NUMBER,
    UNKNOWN,
    UNSCALED_TENSOR,
    Autocast,
    Call,
    Class,
    ContextManager,
    DeviceValue,
    DictLiteral,
    DtypeChoice,
    Function,
    FunctionInfo,
    GradAttribute,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    LossFunction,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Partial,
    Scaler,
    Scheduler,
    StateDict,
    Tensor,
    Unknown,
    Value,
    device_of,
    literal_of,
)

_CLIPS: Final = frozenset("clip_grad_norm clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_".split())
_PASS_THROUGH: Final = frozenset(
    {*(f"builtins.{name}" for name in ("list", "tuple", "iter", "reversed")), "tqdm.tqdm", "tqdm.auto.tqdm"}
)
Handler = Callable[["Interpreter", "Call"], Value]


def call_imported(interpreter: Interpreter, call: Call, path: str) -> Value:
    """Interpret a call of an imported or built-in name."""
    name = path.rpartition(".")[2]
    if path in _BY_PATH:
        return _BY_PATH[path](interpreter, call)
    if path in AUTOCASTS:
        return make_autocast(interpreter, call, AUTOCASTS[path])
    if path in SCALERS:
        return make_scaler(interpreter, call, path)
    if name in _CLIPS:
        interpreter.record(events.Clip, call.node, path, call)
        return UNKNOWN
    if path.startswith("torch."):
        return _call_torch(interpreter, call, path, name)
    for framework in FRAMEWORKS:
        if path in framework.constructors:
            return make_managed(interpreter, call, framework)
    if path == "apex.amp.initialize":
        interpreter.record(events.ApexInitialized, call.node, call.get(0, "models"))
    if makes_optimizer(path):
        return objects.optimizer_value(interpreter, call, "")
    if makes_model(path):
        return objects.make_model(interpreter, call, path)
    if path.startswith("torchvision.datasets.") and _yields_tensors(interpreter):
        return KnownItems((KnownItems((Tensor(dtype="float32", node=call.node), UNKNOWN)),), repeated=True)
    copied = call.get(0, "x") if path == "copy.deepcopy" else None
    copied = copied.model if isinstance(copied, Managed) else copied
    if isinstance(copied, Model):
        return objects.copy_model(interpreter, call.node, copied)
    if path == objects.WITH_ADAPTERS and isinstance(model := call.get(0, "model"), Model):
        return objects.with_adapters(interpreter, call.node, model)
    if path in _PASS_THROUGH or isinstance(copied, StateDict):
        return call.first
    if path.startswith("math."):
        return NUMBER
    if path.startswith("builtins."):
        return _call_builtin(interpreter, call, name)
    return unknown_call(interpreter, call, path)


def _yields_tensors(interpreter: Interpreter) -> bool:
    """Return whether images become tensors, which ToTensor makes float32, and keep that dtype."""
    mentions = interpreter.linked.mentions
    return mentions("totensor") and not mentions("convertimagedtype", "todtype")


def _call_torch(interpreter: Interpreter, call: Call, path: str, name: str) -> Value:
    made_in = call.keywords.get("dtype", UNKNOWN)
    is_class = name[:1].isupper()
    if is_class and path.startswith("torch.nn.") and tensors.dtype_named(made_in) == "float16":
        interpreter.record(events.HalfLayer, call.node)
    if path == "torch.outer" or (path == "torch.einsum" and not _sums(call.get(0, "equation"))):
        return tensors.outer_product(interpreter, call.node, call.all())
    if path in MATRIX_PRODUCTS:
        return tensors.matrix_product(interpreter, call.node, call.all())
    if path.startswith("torch.nn.functional.") and name in LOSS_FUNCTIONS:
        return call_loss_function(interpreter, call, LossFunction(name))
    is_list = path in ("torch.nn.ModuleList", "torch.nn.ParameterList")
    if is_list and call.positional and isinstance(call.first, KnownItems):
        return call.first
    if name == "AveragedModel" and isinstance(averaged := call.get(0, "model"), Model):
        return objects.copy_model(interpreter, call.node, averaged)
    if path == "torch.utils.data.DataLoader" and "collate_fn" not in call.keywords:
        dataset = call.get(0, "dataset")
        if isinstance(dataset, KnownItems):
            return dataset
    if path in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
        data = call.get(0, "data")
        if isinstance(data, Tensor) and data.dtype == "float16" and not data.computed_under:
            interpreter.half_parameter = call.node
        return data or UNKNOWN
    if path.startswith("torch.optim.lr_scheduler."):
        return Scheduler() if "Plateau" not in name else UNKNOWN
    if is_class and path.startswith("torch.optim.") and "swa" not in path:
        return objects.optimizer_value(interpreter, call, name)
    if path.startswith("torch.nn.") and name.endswith("Loss"):
        return LossFunction(name, call.node)
    if is_class and path.startswith(("torch.nn.parallel.", "torch.distributed.fsdp.Fully")):
        inner = call.get(0, "module")
        model = inner if isinstance(inner, Model) else Model(key_of(call.node), call.node)
        (interpreter.sharded if name.startswith("Fully") else interpreter.replicated).add(model.key)
        return replace(model, wrapper=name)
    if path.startswith("torch.distributed.") and name.startswith("MixedPrecision"):  # of both FSDPs
        interpreter.sharded_dtype = tensors.dtype_named(call.get(0, "param_dtype") or UNKNOWN)
        return UNKNOWN
    if is_class and path.startswith("torch.nn.") and "functional" not in path and "utils" not in path:
        return objects.make_model(interpreter, call, path)
    return _function(interpreter, call, path, name)


def _function(interpreter: Interpreter, call: Call, path: str, name: str) -> Value:
    values = call.all()
    first = call.first
    inner = item_of(first) if isinstance(first, KnownItems) else first
    if isinstance(inner, LossGradients):
        return use_loss_gradients(interpreter, call.node, inner, name)
    if isinstance(inner, GradAttribute) and "distributed" not in path:
        return gradient_method(interpreter, call.node, name)
    tensors.call_op(interpreter, call.node, path, values)
    if name in MAKES_TENSORS and path == f"torch.{name}":
        default = ImportedName("torch.float32") if MAKES_TENSORS[name] else UNKNOWN
        dtype = tensors.dtype_named(call.keywords.get("dtype", default))
        is_rounded = name in ("arange", "linspace") and dtype in ("float16", "bfloat16")
        is_rounded &= not interpreter.assumptions  # an option that nothing else shows to be on
        return Tensor(dtype=dtype, rounded=call.node if is_rounded else None, node=call.node)
    if name == "sigmoid":
        operand = inner if isinstance(inner, Tensor) else Tensor(model_calls=None)
        return Tensor(sigmoid=call.node, model_calls=operand.model_calls, dtype=operand.dtype, node=call.node)
    if not path.startswith(("torch.nn.functional.", "torch.")) or path.count(".") > 3:
        return UNKNOWN
    tensor = [value for value in flattened(values) if isinstance(value, Tensor)]
    interpreter.record_dtypes(call.node, tensor)
    if not tensor:
        return UNSCALED_TENSOR if not any(isinstance(value, Scaler) for value in values) else UNKNOWN
    return Tensor(
        scaler_key=tensors.common_scale(tensor),
        dtype=_dtype(interpreter, name, tensor, call.keywords.get("dtype")),
        weights_dtype=tensor[0].weights_dtype if tensors.keeps_dtype(interpreter, name) else "",
        computed_under=tensors.computed_under(interpreter, tensor),
        model_calls=tensors.all_model_calls(tensor),
        rounded=tensors.first_rounded(tensor),
        node=call.node,
    )


def _sums(equation: Value | None) -> bool:
    """Return whether an equation of ``einsum`` sums over an index, so that it is a matrix product."""
    text = literal_of(equation)
    if not isinstance(text, str) or "->" not in text:
        return True
    indices, _, result = text.partition("->")
    return bool(set(filter(str.isalpha, indices)) - set(result))


def _dtype(interpreter: Interpreter, name: str, operands: list[Tensor], chosen: Value | None) -> str:
    """Return the dtype of what a function returns for some tensors; empty if it is not certain."""
    if chosen is not None:
        return tensors.dtype_named(chosen)
    if by_autocast := tensors.dtype_of_result(interpreter, name):
        return by_autocast
    dtypes = {value.dtype for value in operands if value.dtype != "number"}
    return dtypes.pop() if len(dtypes) == 1 and tensors.keeps_dtype(interpreter, name) else ""


def _context(kind: str) -> Handler:
    return lambda interpreter, call: ContextManager(kind)


def _save(interpreter: Interpreter, call: Call) -> Value:
    what = call.get(0, "obj")
    if isinstance(what, DictLiteral):
        interpreter.record(events.CheckpointSaved, call.node, what)
    return UNKNOWN


def _device(interpreter: Interpreter, call: Call) -> Value:
    value = call.get(0, "type")
    text = literal_of(value)
    has_index = call.get(1, "index") is not None or (isinstance(text, str) and ":" in text)
    return DeviceValue(device_of(value), has_index)


def _chain(interpreter: Interpreter, call: Call) -> Value:
    parts = [value.models if isinstance(value, Parameters) else None for value in call.positional]
    return Parameters(None if None in parts else frozenset[str]().union(*(models or () for models in parts)))


def _namespace(interpreter: Interpreter, call: Call) -> Value:
    if isinstance(call.first, DictLiteral):
        return call.first
    return DictLiteral(tuple(call.keywords.values()), call.node, tuple(call.keywords))


def _partial(interpreter: Interpreter, call: Call) -> Value:
    positional = call.positional
    has_all = not any(isinstance(a, ast.Starred) for a in call.node.args) and "**" not in call.keywords
    if not positional or not has_all or isinstance(positional[0], Unknown):
        return UNKNOWN
    return Partial(positional[0], tuple(positional[1:]), tuple(call.keywords.items()), call.node)


_BY_PATH: Final[dict[str, Handler]] = {
    "torch.no_grad": _context("no_grad"),
    "torch.inference_mode": _context("no_grad"),
    "torch.enable_grad": _context("grad"),
    "torch.set_grad_enabled": lambda interpreter, call: ContextManager(
        "no_grad" if literal_of(call.get(0, "mode")) is False else "unsure"
    ),
    "contextlib.nullcontext": _context("null"),
    "torch.autograd.grad": gradients.autograd_grad,
    "torch.save": _save,
    "torch.device": _device,
    "torch.compile": lambda interpreter, call: call.get(0, "model") or UNKNOWN,
    **dict.fromkeys(NAMESPACES, _namespace),
    "functools.partial": _partial,
    "itertools.chain": _chain,
}


def _call_builtin(interpreter: Interpreter, call: Call, name: str) -> Value:
    first = call.first
    if name == "float" and isinstance(first, Tensor) and first.node is not None:
        interpreter.record(events.NumberRead, call.node, first)
        return UNSCALED_TENSOR
    if name == "str" and isinstance(first, DeviceValue) and first.has_index:
        return LiteralValue(f"{first.type}:0")
    if name == "dict" and not call.positional:
        return _namespace(interpreter, call)
    if name == "sum" and isinstance(first, KnownItems | Tensor):
        return item_of(first)
    if name in ("enumerate", "zip"):
        of_each = [item_of(value) for value in call.positional] or [UNKNOWN]
        pair = (UNKNOWN, of_each[0]) if name == "enumerate" else tuple(of_each)
        return KnownItems((KnownItems(pair),), repeated=True)
    if name == "filter" and isinstance(parameters := call.get(1, "iterable"), Parameters):
        return parameters
    if name == "getattr" and isinstance(attribute := literal_of(call.get(1, "name")), str):
        return interpreter.evaluate(
            ast.copy_location(ast.Attribute(call.node.args[0], attribute, ast.Load()), call.node)
        )
    if name == "len":
        return NUMBER
    return UNSCALED_TENSOR if name in _NUMBERS_AND_TEXTS else UNKNOWN


_NUMBERS_AND_TEXTS: Final = frozenset("range int str min max round abs print".split())


def unknown_call(interpreter: Interpreter, call: Call, name: str) -> Value:
    """Interpret a call of code that is not in this file."""
    last = name.rpartition(".")[2]
    if last.endswith("GradScaler"):  # another package's, or one of two that are imported
        return make_scaler(interpreter, call, name)
    if last == "backward":
        gradients.unknown_backward(interpreter)
        return UNKNOWN
    values = call.all()
    for function in [v for v in values if isinstance(v, Function) and v.owner is None]:
        if function.info.relevant and function.info not in interpreter.called:
            follow_callback(interpreter, function, call.node)
    if _LOSS.search(last.lower()):
        record_loss(interpreter, call.node, values)
    for value in values if last in _LOGS else ():
        for entry in _items_of_dict(value):
            if isinstance(entry, Tensor):
                interpreter.record(events.NumberRead, call.node, entry)
    # what gets neither a scaler nor what may hold one cannot unscale
    may_unscale = any(isinstance(value, Scaler | Optimizer | Instance | Managed) for value in values)
    gets_weights = any(isinstance(value, Parameters | Model) for value in values)
    if _CLIPS_GRADIENTS.search(last.lower()) and gets_weights and not may_unscale:
        interpreter.record(events.Clip, call.node, name, call, Certainty.LIKELY)
    if last not in HARMLESS_METHODS:
        assume_any_effect(interpreter, name, values)
    state_dict = next((value for value in values if isinstance(value, StateDict)), None)
    if state_dict is not None:
        return state_dict  # moved or converted
    tensor_arguments = [value for value in values if isinstance(value, Tensor)]
    may_scale = any(isinstance(value, Scaler | Instance) for value in values)
    if may_scale or any(value.scaler_key for value in tensor_arguments):
        return UNKNOWN
    return _result_of(interpreter, tensor_arguments)


def _result_of(interpreter: Interpreter, values: Sequence[Value]) -> Tensor:
    """Return what unknown code computes from some values, none of which has a loss scale."""
    under = tensors.computed_under(interpreter, [value for value in values if isinstance(value, Tensor)])
    return Tensor(computed_under=under) if under else UNSCALED_TENSOR


def assume_any_effect(interpreter: Interpreter, name: str, values: list[Value]) -> None:
    """Invalidate every fact that unknown code may change through its arguments."""
    last = name.rpartition(".")[2].lower()
    state = interpreter.state
    flat = [item for value in values for item in (value.items if isinstance(value, KnownItems) else (value,))]
    instances = [value for value in flat if isinstance(value, Instance)]
    for owner in instances:
        flat += state.scopes.get(owner.key, {}).values()
    for value in flat if _CASTS_PARAMETERS.search(last) else ():
        if isinstance(value, Model) and state.get(HALF_WEIGHTS, value.key) is not None:
            state.set_fact(HALF_WEIGHTS, PERHAPS, value.key)
        if isinstance(value, Model):
            state.set_fact(BFLOAT16_WEIGHTS, None, value.key)
    interpreter.escaped.update(value.key for value in flat if isinstance(value, Scaler | Optimizer))
    state.assume_any_call()
    reaches = any(isinstance(value, Scaler | Optimizer) for value in flat)
    trains = "backward" in last or last.endswith("step") or ("train" in last and bool(values))
    handles = any(isinstance(value, Scaler) for value in values) or _HANDLES_GRADIENTS.search(last)
    if reaches or trains:
        interpreter.record(events.UnknownEffect, interpreter.statement or interpreter.point.script.tree)
        weakened = UNKNOWN_GRADIENTS if trains or handles else state.gradients.weakened()
        state.assume_any_step()
        state.gradients = weakened


_CASTS_PARAMETERS = re.compile(r"cast|float|fp32|convert|precision|lora|peft|adapter")
_CLIPS_GRADIENTS = re.compile(r"clip.*(grad|norm)|grad.*clip")
_LOGS: Final = frozenset("add_scalar add_scalars log log_dict log_metrics set_postfix".split())
_LOSS = re.compile(r"loss|criterion|^crit$|^cost$")
_HANDLES_GRADIENTS = re.compile(r"scale|clip|norm|update|optim|amp")


def make_autocast(interpreter: Interpreter, call: Call, device: str | None) -> Autocast:
    """Interpret ``torch.autocast(device_type, dtype, enabled)``, or an older name for one device."""
    if device is None:
        interpreter.record(events.AutocastMade, call.node, call)
    names = ("enabled", "dtype") if device is not None else ("device_type", "dtype", "enabled")
    values: dict[str, Value | None] = {name: call.get(i, name) for i, name in enumerate(names)}
    device_type = device_of(values.get("device_type")) if device is None else device
    chosen = values["dtype"]
    by_default = chosen is None or (isinstance(chosen, LiteralValue) and chosen.value is None)
    by_default = by_default and not interpreter.linked.mentions("set_autocast")
    dtype = "" if by_default else tensors.dtype_named(chosen or UNKNOWN) or None
    if dtype in ("float32", "float64"):
        return Autocast(False, device_type or None, "", call.node)  # torch warns, and switches it off
    enabled = _enabled(interpreter, values["enabled"], call.expression(names.index("enabled"), "enabled"))
    if isinstance(chosen, DtypeChoice) and len(chosen.names - {"float32"}) == 1:
        (dtype,), enabled = chosen.names - {"float32"}, None if enabled else enabled
    conditional = values["enabled"] is not None and not isinstance(values["enabled"], LiteralValue)
    caches = literal_of(call.keywords.get("cache_enabled", LiteralValue(True))) is True
    return Autocast(enabled, device_type or None, dtype, call.node, conditional=conditional, caches=caches)


def _enabled(interpreter: Interpreter, value: Value | None, expression: ast.expr | None) -> bool | None:
    """Return whether it is enabled; where that depends on a setting, the setting is assumed to be on."""
    if value is None or expression is None:
        return True
    if isinstance(value, LiteralValue) and (value.is_given or isinstance(expression, ast.Constant)):
        return bool(value.value)
    assumed = interpreter.assumed_truth(expression)
    if assumed is None and literal_of(value) is False:
        return None
    return True if assumed is None and isinstance(expression, ast.Name | ast.Attribute) else assumed


def make_scaler(interpreter: Interpreter, call: Call, path: str) -> Value:
    """Interpret ``GradScaler(...)`` and the assignment to a name."""
    expression = keyword_value(call.node, "enabled")
    enabled = _enabled(interpreter, call.keywords.get("enabled"), expression)
    statement = interpreter.statement
    target = (
        statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    )
    text = dotted_name(target) if target is not None else ""
    key = key_of(call.node) + interpreter.call_path
    if expression is not None and not isinstance(expression, ast.Constant) and enabled is True:
        enabled = True if interpreter.assumed_truth(expression) else None  # by a switch
    scaler = Scaler(key, call.node, enabled, text, "Sharded" in path)
    interpreter.record(events.ScalerMade, call.node, scaler)
    if not any(info.is_property for info in interpreter.point.stack):  # made where it is first used
        interpreter.state.set_fact(UNUSED, True, key)
    return interpreter.register_scaler(scaler) if enabled is not False else scaler


def record_loss(interpreter: Interpreter, node: ast.AST, values: Sequence[Value]) -> None:
    """Record a loss that is computed under autocast from what a model has returned outside."""
    autocast = interpreter.point.autocast
    tensors_here = [value for value in values if isinstance(value, Tensor)]
    outside = frozenset(id(v.node) for v in tensors_here if not (v.computed_under or v.weights_dtype))
    if outside and autocast.enabled is True and autocast.explicit:
        interpreter.record(events.LossInside, node, outside)


def call_loss_function(interpreter: Interpreter, call: Call, loss: LossFunction) -> Value:
    """Interpret a loss function of torch."""
    tensor_arguments = [value for value in call.all() if isinstance(value, Tensor)]
    record_loss(interpreter, call.node, tensor_arguments)
    interpreter.record(events.LossCalled, call.node, loss, call.first)
    computed_under = tensors.computed_under(interpreter, tensor_arguments)
    roots = tensors.all_model_calls(tensor_arguments) if tensor_arguments else None
    return Tensor(
        weights_dtype=next((value.weights_dtype for value in tensor_arguments), ""),
        computed_under=computed_under,
        model_calls=roots,
        loss=loss.name,
        node=call.node,
    )


def _arguments(interpreter: Interpreter, node: ast.Call) -> Call:
    positional = list(map(interpreter.evaluate, node.args))
    if LiteralValue in map(type, positional):
        for argument, value in zip(node.args, positional, strict=True):
            interpreter.record_number(argument, value)
    if not node.keywords:
        return Call(positional, {}, node)
    keywords = {k.arg or "**": interpreter.evaluate(k.value) for k in node.keywords}
    if LiteralValue in map(type, keywords.values()):
        for keyword in node.keywords:
            interpreter.record_number(keyword.value, keywords[keyword.arg or "**"])
    entries = keywords.get("**")
    if isinstance(entries, DictLiteral):
        keywords |= {n: v for n, v in zip(entries.names, entries.items, strict=True) if n is not None}
    return Call(positional, keywords, node)


def evaluate_call(interpreter: Interpreter, node: ast.Call) -> Value:
    """Apply the effects of a call to the state and return its value."""
    if isinstance(node.func, ast.Attribute):
        base = interpreter.evaluate(node.func.value)
        if not isinstance(base, ImportedName):
            return _method(interpreter, node, base, node.func.attr)
        function = interpreter.member(base.path, node.func.attr)
    else:
        function = interpreter.evaluate(node.func)
    return _call(interpreter, node, function)


def _method(interpreter: Interpreter, node: ast.Call, base: Value, name: str) -> Value:
    if isinstance(base, Instance):
        return _instance_method(interpreter, node, base, name)
    if isinstance(base, Tensor) and base is UNSCALED_TENSOR and isinstance(node.func, ast.Attribute):
        base = interpreter.infer_from_usage(base, dotted_name(node.func.value))
    if base is UNSCALED_TENSOR and _MAKES.search(name):
        base = UNKNOWN
    call = _arguments(interpreter, node)
    method = _METHODS.get(type(base))
    if method is not None:
        return method(interpreter, call, base, name)
    if name in ("parameters", "named_parameters") and not isinstance(base, DictLiteral):
        return Parameters(_owners(interpreter, node.func))
    if base is UNKNOWN and name in _CASTS_MODELS and (text := _assigned_model(interpreter, node)):
        return objects.model_method(interpreter, call, Model(f"name {text}"), name)
    casts = name in ("to", "type") and any(tensors.dtype_named(value) for value in call.all())
    if base is UNKNOWN and (casts or name in tensors.ON_ANY_TENSOR):
        return tensors.tensor_method(interpreter, call, Tensor(scaler_key=MAYBE), name)
    if name == "enter_context" and interpreter.enter(call.first):  # of an ExitStack
        return UNKNOWN
    if isinstance(base, DictLiteral) and name == "get":
        return choice_of_dtypes(*base.items, *call.positional[1:])
    if isinstance(base, DictLiteral) and name == "items":
        return KnownItems(
            tuple(KnownItems((LiteralValue(k), v)) for k, v in zip(base.names, base.items, strict=True))
        )
    if isinstance(base, Parameters):
        return copies_method(interpreter, call, base, name)
    if isinstance(base, KnownItems) and name == "append" and isinstance(node.func, ast.Attribute):
        added = join_items(base, call.get(0, "object") or UNKNOWN)
        if dotted_name(node.func.value):
            interpreter.assign(node.func.value, added)
        return UNKNOWN
    if isinstance(base, LossFunction | KnownItems):
        return base if name in ("to", "cuda", "cpu", "values", "items") else UNKNOWN
    return unknown_call(interpreter, call, name)


_MAKES = re.compile(r"[A-Z]|^(build|configure|create|get|init|make|prepare|setup)")  # no tensor has these
_CASTS_MODELS: Final = frozenset({"half", "float", "bfloat16", "to", "cuda"})


def _assigned_model(interpreter: Interpreter, node: ast.Call) -> str:
    """Return the name of a model to which a call is assigned, as ``net`` in ``net = build().half()``."""
    statement = interpreter.statement
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    value: ast.expr = statement.value
    while value is not node and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    text = dotted_name(statement.targets[0]) if value is node else ""
    return text if text and interpreter.point.script.usage.kind(text) == "model" else ""


def _owners(interpreter: Interpreter, part: ast.expr) -> frozenset[str] | None:
    """Return the model of which an expression names a part, as in ``model.layers[0]``."""
    while isinstance(part, ast.Attribute | ast.Subscript):
        part = part.value
        if isinstance(owner := interpreter.evaluate(part), Model):
            return frozenset({owner.key})
    return None


_METHODS: Final[dict[type, Callable[[Interpreter, Call, Any, str], Value]]] = {
    Scaler: scaler_method,
    Optimizer: objects.optimizer_method,
    Model: objects.model_method,
    Scheduler: lambda interpreter, call, base, name: UNKNOWN,
    StateDict: lambda interpreter, call, base, name: base,  # a copy, or a part of it
    LossGradients: lambda interpreter, call, base, name: use_loss_gradients(
        interpreter, call.node, base, name
    ),
    GradAttribute: lambda interpreter, call, base, name: gradient_method(interpreter, call.node, name),
    Tensor: tensors.tensor_method,
    Managed: managed_method,
}


def _instance_method(interpreter: Interpreter, node: ast.Call, base: Instance, name: str) -> Value:
    method = base.info.method(name)
    if method is not None:
        return _call(interpreter, node, Function(method, owner=base))
    stored = interpreter.state.value(base.key, name)
    value = interpreter.infer_from_usage(stored or UNKNOWN, dotted_name(node.func))
    if stored is not None or value is not UNKNOWN:
        return _call(interpreter, node, value)
    call = _arguments(interpreter, node)
    if name not in HARMLESS_METHODS and not (base.info.is_module and name in objects.MODULE_METHODS):
        assume_any_effect(interpreter, f"self.{name}", [*call.all(), base])
    return UNKNOWN


def _call(interpreter: Interpreter, node: ast.Call, function: Value) -> Value:
    call = _arguments(interpreter, node)
    if isinstance(function, Partial):
        call = _completed(interpreter, function, call)
        node, function = call.node, function.function
    make_trainer(interpreter, call)
    if isinstance(function, Function):
        info = function.info
        if not interpreter.budget.allows(info.node):
            return unknown_call(interpreter, call, info.node.name)
        if not _is_followed(interpreter, info, call):
            return _result_of(interpreter, call.all())
        owner = None if info.is_static else function.owner
        return inline_call(interpreter, info, node, call.named(), owner, function.frame)
    if isinstance(function, Class):
        return objects.make_instance(interpreter, call, function.info)
    if isinstance(function, ImportedName):
        return call_imported(interpreter, call, function.path)
    if isinstance(function, Model):
        return call_model(interpreter, call, function)
    if isinstance(function, LossFunction):
        return call_loss_function(interpreter, call, function)
    if isinstance(function, Managed):
        tensors.call_op(interpreter, node, "torch.nn.Module", call.all())
        objects.check_input(interpreter, call, "Model", function.weights_dtype)
        if function.model is not None and function.autocast:
            # it calls the model under autocast, and casts what that returns to float32
            with interpreter.entered(interpreter.point):
                if interpreter.point.autocast.enabled is not True:
                    interpreter.enter(Autocast(True, None, function.autocast, explicit=False))
                call_model(interpreter, call, function.model)
        return Tensor(weights_dtype=function.weights_dtype, model_calls=None, node=node)
    if isinstance(function, Instance):
        method = function.info.method("__call__") or function.info.method("forward")
        return UNKNOWN if method is None else _call(interpreter, node, Function(method, owner=function))
    return unknown_call(interpreter, call, dotted_name(call.node.func))


def _completed(interpreter: Interpreter, partial: Partial, completion: Call) -> Call:
    """Return the arguments of a partial together with those of a call that completes them."""
    creation, node = partial.node, completion.node
    keywords = [*(k for k in creation.keywords if k.arg not in completion.keywords), *node.keywords]
    whole = ast.Call(func=creation.args[0], args=[*creation.args[1:], *node.args], keywords=keywords)
    # one node for each pair, as events are told apart by their nodes
    whole = interpreter.completed_calls.setdefault((creation, node), ast.copy_location(whole, node))
    interpreter.point.script.parents.setdefault(whole, node)
    positional = [*partial.positional, *completion.positional]
    return Call(positional, {**dict(partial.keywords), **completion.keywords}, whole)


def _items_of_dict(value: Value) -> tuple[Value, ...]:
    return value.items if isinstance(value, DictLiteral) else (value,)


def _is_followed(interpreter: Interpreter, info: FunctionInfo, call: Call) -> bool:
    """Return whether a function is worth following; ops in this file may have a 16-bit dtype."""
    is_16_bit = interpreter.point.autocast.enabled is True or any(
        value.cast
        if isinstance(value, Tensor)
        else any(tensors.dtype_named(v) in ("float16", "bfloat16") for v in _items_of_dict(value))
        or (isinstance(value, Model) and interpreter.state.weights_cast(value.key))
        for value in call.all()
    )
    is_expression = isinstance(info.node.body[0], ast.Return)
    return info.relevant or ((is_16_bit or is_expression) and not file_number(info.node))
