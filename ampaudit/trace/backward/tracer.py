"""Traces custom backwards, of autograd functions and hooks, at the end of a model's trace.

A backward is called on gradients without values. The tracer of the forward pass records its ops, whose inputs
may be saved values of that pass.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ampaudit.core.sites import SourceLine
from ampaudit.trace.failure import failing_lines, plain_reason
from ampaudit.trace.flatten import (
    BACKWARD_END,
    BACKWARD_START,
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    OUTPUT_GRADIENT,
    TENSOR_HOOK,
    has_effect,
    mark_number,
    saved_values,
)
from ampaudit.trace.graph import CustomBackward, FunctionCall, Placeholder, Slot, TracedModel, build_sites
from ampaudit.trace.internals import (
    BackwardHookFunction,
    FakeTensor,
    Replacement,
    function_apply,
    function_base,
    patched,
    recompute,
)
from ampaudit.trace.stack import code_line, is_tool_file
from ampaudit.trace.values import node_dtype, storage_id

_LOST = "it reads a tensor that no op of the trace computes"
CHECKPOINT = "checkpoint"
HOOK = "a hook on a tensor"
ON_NODES = "hooks of autograd's own nodes, such as grad_fn.register_hook, are not followed"
TWICE = "a hook inside a checkpoint runs once here; autograd may register it again when it recomputes"
AFTER_ACCUMULATION = "hooks that run once a parameter has its gradient are not followed"


class BackwardTracer:
    """Collects custom backwards while a model is traced, and then traces them, or reports each as failed."""

    def __init__(self, follow: bool = True) -> None:
        self.follow = follow
        self.tracing = False
        self.records: list[FunctionApplication | TensorHook] = []
        self.backwards: list[CustomBackward] = []

    def enter(self, function: Any, args: tuple[Any, ...], layer: str) -> FunctionApplication:
        """Register a call of a custom function before it runs."""
        application = FunctionApplication(len(self.records), layer, function, args)
        FUNCTION_INPUTS(application.inputs, application.number)
        self.records.append(application)
        return application

    def leave(self, application: FunctionApplication, result: Any) -> None:
        """Register what the call returned."""
        application.outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        application.differentiable = tuple(
            index
            for index, output in enumerate(application.outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad
        )
        outputs = [application.outputs[index] for index in application.differentiable]
        for output in outputs:
            node: Any = output.grad_fn
            if isinstance(node, BackwardCFunction) and type(node) is application.function._backward_cls:
                application.context = node
        FUNCTION_OUTPUTS(outputs, application.number)

    def hook(self, value: torch.Tensor, function: Callable[..., Any], layer: str) -> RemovableHandle:
        """Register a hook on a tensor's gradient."""
        item = TensorHook(len(self.records), layer, value)
        TENSOR_HOOK([value], item.number)
        self.records.append(item)
        return item.hooks.register(function)

    def trace(
        self,
        loss: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        within: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Trace all custom backwards in the order of autograd, the last one first.

        A backward may add gradients to the parameters. It is traced ``within`` a context made from its name.
        """
        reached = _reached_outputs(loss)
        self.tracing = True
        try:
            with torch.no_grad():
                for item in reversed(self.records):
                    if isinstance(item, FunctionApplication) and item.context is None:
                        continue  # none of its inputs requires a gradient
                    failure, line = None, None
                    BACKWARD_START(item.inputs[:1], item.number)
                    with within(f"{item.layer}/{item.name}" if item.layer else item.name):
                        gradients, leaves = self._traced(item, reached, parameters)
                    if isinstance(gradients, Exception):
                        failure = plain_reason(gradients)
                        user_line, library = failing_lines(gradients.__traceback__)
                        line = library or user_line
                        gradients, leaves = [], []
                    BACKWARD_END(gradients, item.number, leaves)
                    source = line or item.source
                    self.backwards.append(
                        CustomBackward(item.number, item.name, item.layer, source, failure, item.call)
                    )
        finally:
            self.tracing = False

    def _traced(
        self,
        item: FunctionApplication | TensorHook,
        reached: Mapping[int, frozenset[int]],
        parameters: Sequence[torch.Tensor],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return the gradients, those of leaves last, and these leaves; or the error."""
        if not self.follow:
            return RuntimeError("torch.export cannot record it"), []
        if isinstance(item, FunctionApplication) and not item.dirty and id(item.context) not in reached:
            return RuntimeError("autograd does not reach it from the loss"), []
        try:
            gradients: list[torch.Tensor | None] = item.trace_gradients(reached)
            leaves = [parameter for parameter in parameters if parameter.grad is not None]
            return [*gradients, *(leaf.grad for leaf in leaves)], leaves
        except Exception as error:  # the model's code may raise anything on tensors without values
            return error, []
        finally:
            for parameter in parameters:
                parameter.grad = None


def _reached_outputs(loss: torch.Tensor) -> dict[int, frozenset[int]]:
    """Map each autograd node behind a value, by identity, to its outputs with a gradient."""
    outputs: defaultdict[int, set[int]] = defaultdict(set)
    pending: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    visited: dict[int, Any] = {}  # keeps the nodes alive
    while pending:
        node, index = pending.pop()
        if node is None:
            continue
        outputs[id(node)].add(index)
        if id(node) not in visited:
            visited[id(node)] = node
            pending += node.next_functions
    return {key: frozenset(indices) for key, indices in outputs.items()}


class Tracked:
    """Maps tensors that autograd returns, new objects for known memory, to the values of the trace there."""

    def __init__(self, tensors: Mapping[torch.Tensor, Any]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Replace tensors among an op's arguments by the corresponding values of the trace."""
        return pytree.tree_map_only(torch.Tensor, self._value, value)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._tensors or not isinstance(tensor, FakeTensor):
            return tensor
        if _memory(tensor) not in self._known:
            self._known = {_memory(value): value for value in self._tensors}
        return self._known.get(_memory(tensor), tensor)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = storage_id(tensor), tensor.storage_offset()
    return *where, tuple(tensor.shape), tensor.stride(), tensor.dtype


class Hooks(OrderedDict[int, Callable[..., Any]]):
    """Hooks in the order of their registration, each until its handle removes it."""

    def register(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


@dataclass(slots=True, eq=False)
class FunctionApplication:
    """One call of a custom autograd function."""

    number: int  # in the graph's marks
    layer: str  # path of the layer that calls the function
    function: Any  # its class
    args: tuple[Any, ...]
    context: Any = None  # its ``ctx``, which is its node in autograd's graph
    outputs: tuple[Any, ...] = ()
    differentiable: tuple[int, ...] = ()  # positions of the outputs that require a gradient
    saved: tuple[Any, ...] | None = None  # tensors for the backward; ``None`` if the function saved none
    dirty: bool = False  # whether the function writes to its inputs
    materializes: bool = True  # whether missing gradients are passed as zeros
    before: Hooks = field(default_factory=Hooks)  # on the gradients that the backward takes
    after: Hooks = field(default_factory=Hooks)  # on the gradients that the backward returns

    @property
    def name(self) -> str:
        """The name for messages."""
        hooks = self.function is BackwardHookFunction
        return "the module's backward hook" if hooks else f"{self.function.__name__}.backward"

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]

    @property
    def source(self) -> SourceLine | None:
        """The line that defines its backward."""
        return _definition(self.context._get_user_fn())

    @property
    def call(self) -> FunctionCall | None:
        """How to call it on other tensors; ``None`` where it takes modules or other objects."""
        leaves = pytree.tree_leaves([arg for arg in self.args if not isinstance(arg, torch.Tensor)])
        plain = (type(None), bool, int, float, str, torch.dtype, torch.device)
        if self.dirty or not all(isinstance(leaf, plain) for leaf in leaves):
            return None
        fixed = tuple(None if isinstance(arg, torch.Tensor) else arg for arg in self.args)
        tensors = tuple(i for i, arg in enumerate(self.args) if isinstance(arg, torch.Tensor))
        return FunctionCall(self.function, fixed, tensors, self.differentiable)

    def trace_gradients(self, reached: Mapping[int, frozenset[int]]) -> list[torch.Tensor | None]:
        """Trace the backward, and return the gradients of the inputs."""
        indices = reached.get(id(self.context), frozenset(self.differentiable if self.dirty else ()))
        incoming = tuple(
            self._output_gradient(index, output, indices) for index, output in enumerate(self.outputs)
        )
        for hook in self.before.values():
            incoming = _result_or_input(hook(incoming), incoming)
        results: Any = self.context.apply(*incoming)
        results = results if isinstance(results, tuple | list) else (results,)
        tensors = [index for index, arg in enumerate(self.args) if isinstance(arg, torch.Tensor)]
        gradients = tuple(results[index] if index < len(results) else None for index in tensors)
        for hook in self.after.values():
            gradients = _result_or_input(hook(gradients, incoming), gradients)
        return [_fitting(gradient, value) for gradient, value in zip(gradients, self.inputs, strict=True)]

    def _output_gradient(self, index: int, output: Any, reached: frozenset[int]) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor):
            return None
        if index in self.differentiable and index in reached:
            gradient: torch.Tensor = OUTPUT_GRADIENT(output, self.number, self.differentiable.index(index))
            return gradient
        return (
            torch.zeros(output.shape, dtype=output.dtype, device=output.device) if self.materializes else None
        )


@dataclass(slots=True, eq=False)
class TensorHook:
    """A hook on a tensor's gradient."""

    number: int
    layer: str
    value: torch.Tensor
    hooks: Hooks = field(default_factory=Hooks)
    call: None = None  # hooks are not called on their own

    @property
    def name(self) -> str:
        """The name for messages."""
        return next((getattr(hook, "__qualname__", "hook") for hook in self.hooks.values()), "hook")

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensor."""
        return [self.value]

    @property
    def source(self) -> SourceLine | None:
        """The line that defines the hook."""
        return next((_definition(hook) for hook in self.hooks.values()), None)

    def trace_gradients(self, reached: Mapping[int, frozenset[int]]) -> list[torch.Tensor | None]:
        """Trace the hooks, and return the gradient that autograd passes on."""
        del reached
        gradient = OUTPUT_GRADIENT(self.value, self.number, 0)
        for hook in self.hooks.values():
            if _is_tool_code(hook):
                continue  # it collects gradients, or sends them elsewhere
            result = hook(gradient)
            gradient = gradient if result is None else result
        return [_fitting(gradient, self.value)]


def _definition(function: Any) -> SourceLine | None:
    code = _code(function)
    return (
        None if code is None or _is_tool_code(function) else code_line(code.co_filename, code.co_firstlineno)
    )


def _is_tool_code(function: Any) -> bool:
    code = _code(function)
    return code is not None and is_tool_file(code.co_filename)


def _code(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _result_or_input(result: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of a hook, or its input if it returns nothing."""
    if result is None:
        return before
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _fitting(gradient: Any, value: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient as autograd uses it: summed over broadcast axes, in the value's dtype."""
    if gradient is None:
        return None
    total: torch.Tensor = gradient if gradient.shape == value.shape else gradient.sum_to_size(value.shape)
    return total if total.dtype == value.dtype else total.to(value.dtype)


class CustomCode:
    """Records the custom backward code that a model uses, and registers it with a tracer, if any."""

    def __init__(self, tracer: BackwardTracer | None, layer: Callable[[], str]) -> None:
        # custom functions that were called, ``checkpoint`` for recomputed activations, or a hook
        self.names: dict[str, None] = {}
        self.notes: dict[str, None] = {}  # what the trace of the backward leaves out
        self._tracer = tracer
        self._layer = layer
        self._open_checkpoints = 0
        self._running: list[FunctionApplication | None] = []  # functions whose forward is running

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record while active."""
        methods = (*self._function_calls(), *self._tensor_hooks(), *self._contexts())
        with patched((*methods, *_tensor_attributes(lambda: self._note(ON_NODES)))):
            yield

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _function_calls(self) -> Iterator[Replacement]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(cls, function_apply.__get__(None, cls), args, kwargs)

        def recomputed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.names[CHECKPOINT] = None
            with self._checkpoint():
                yield from recompute(*args, **kwargs)

        yield Replacement(function_base, "apply", classmethod(apply))
        yield Replacement(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", recomputed)

    def _call(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names[CHECKPOINT if cls is CheckpointFunction else cls.__name__] = None
        tracer = self._tracer
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        )
        if cls is CheckpointFunction and needs_gradient and not (tracer is not None and tracer.tracing):
            run, _preserve, *inputs = args
            with self._checkpoint():
                return run(*inputs)  # recomputing gives the same values
        if tracer is None or tracer.tracing or not needs_gradient:
            application = None
        else:
            application = tracer.enter(cls, args, self._layer())
        self._running.append(application)
        try:
            result = call(*args, **kwargs)
        finally:
            self._running.pop()
        if tracer is not None and application is not None:
            tracer.leave(application, result)
        return result

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Count open checkpoints, whose code runs twice in training."""
        self._open_checkpoints += 1
        try:
            yield
        finally:
            self._open_checkpoints -= 1

    def _tensor_hooks(self) -> Iterator[Replacement]:
        tensor: Any = torch.Tensor
        hook, retain, enter = tensor.register_hook, tensor.retain_grad, saved_tensors_hooks.__enter__

        def register_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.names[HOOK] = None
            if self._tracer is None and not value.requires_grad:
                return RemovableHandle(Hooks())  # this trace has no gradients; training does
            if self._tracer is None or self._tracer.tracing or not value.requires_grad:
                return hook(value, function)
            if self._open_checkpoints:
                self._note(TWICE)
            return self._tracer.hook(value, function, self._layer())

        def retain_grad(value: torch.Tensor) -> None:
            if self._tracer is not None or value.requires_grad:
                retain(value)

        def register_post_accumulate_grad_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.names[HOOK] = None
            self._note(AFTER_ACCUMULATION)
            return RemovableHandle(Hooks())

        def entered(packing: saved_tensors_hooks) -> None:
            if type(packing) is saved_tensors_hooks:
                self._note("saved_tensors_hooks: tensors are audited as they were saved")
            enter(packing)

        yield Replacement(tensor, "register_hook", register_hook)
        yield Replacement(tensor, "retain_grad", retain_grad)
        yield Replacement(tensor, "register_post_accumulate_grad_hook", register_post_accumulate_grad_hook)
        yield Replacement(saved_tensors_hooks, "__enter__", entered)

    def _contexts(self) -> Iterator[Replacement]:
        """Record what a ``ctx`` saves, since C++ returns tensors that are no values of the trace."""
        node = BackwardCFunction
        saved: Any = node.saved_tensors

        def setting(method: Callable[..., None], name: str, value_of: Callable[..., Any]) -> Any:
            def call(ctx: Any, *args: Any, **kwargs: Any) -> None:
                application = self._running[-1] if self._running else None
                if application is not None and isinstance(ctx, BackwardCFunction):
                    application.context = ctx
                    setattr(application, name, value_of(*args, **kwargs))
                method(ctx, *args, **kwargs)

            return Replacement(FunctionCtx, method.__name__, call)

        def saved_tensors(ctx: Any) -> Any:
            application = self._application(ctx)
            return (
                saved.__get__(ctx) if application is None or application.saved is None else application.saved
            )

        def hooking(method: Callable[..., Any], name: str) -> Any:
            def register(ctx: Any, hook: Callable[..., Any]) -> Any:
                application = self._application(ctx)
                return method(ctx, hook) if application is None else getattr(application, name).register(hook)

            return Replacement(node, method.__name__, register)

        yield setting(FunctionCtx.save_for_backward, "saved", lambda *tensors: tensors)
        yield setting(FunctionCtx.mark_dirty, "dirty", lambda *tensors: bool(tensors))
        yield setting(FunctionCtx.set_materialize_grads, "materializes", lambda value: value)
        yield Replacement(node, "saved_tensors", property(saved_tensors))
        yield hooking(node.register_hook, "after")
        yield hooking(node.register_prehook, "before")

    def _application(self, ctx: Any) -> FunctionApplication | None:
        records = () if self._tracer is None else self._tracer.records
        return next((a for a in records if isinstance(a, FunctionApplication) and a.context is ctx), None)


def _tensor_attributes(hooked: Callable[[], None]) -> Iterator[Replacement]:
    """Replace ``Tensor.data``, which shares memory without an op, and ``Tensor.grad_fn``, to note hooks."""
    tensor: Any = torch.Tensor
    data, grad_fn = tensor.data, tensor.grad_fn

    def get_data(value: torch.Tensor) -> Any:
        return value.detach() if isinstance(value, FakeTensor) else data.__get__(value)

    def set_data(value: torch.Tensor, other: torch.Tensor) -> None:
        alike = isinstance(value, FakeTensor) and isinstance(other, FakeTensor)
        if alike and value.shape == other.shape and value.dtype == other.dtype:
            with torch.no_grad():
                value.copy_(other)
        else:
            data.__set__(value, other)

    def get_grad_fn(value: torch.Tensor) -> Any:
        node = grad_fn.__get__(value)
        from_tool = is_tool_file(sys._getframe(1).f_code.co_filename)
        return node if node is None or from_tool else _Node(node, hooked)

    yield Replacement(tensor, "data", property(get_data, set_data))
    yield Replacement(tensor, "grad_fn", property(get_grad_fn))


class _Node:
    """An autograd node that reports hooks; nodes of custom functions report theirs directly."""

    def __init__(self, node: Any, hooked: Callable[[], None]) -> None:
        self._node = node
        self._hooked = hooked

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook") and not isinstance(self._node, BackwardCFunction):
            self._hooked()
        return getattr(self._node, name)


@dataclass(slots=True)
class _Section:
    """The nodes of one custom backward, which are consecutive."""

    number: int
    nodes: list[fx.Node]
    gradients: list[Any]  # that it returns, ``None`` if absent; those of leaves come last
    leaves: list[fx.Node]  # whose gradient it sets
    values: list[fx.Node] = field(default_factory=list)  # read from the forward pass or another backward
    shared: list[fx.Node] = field(default_factory=list)  # read by another backward


def separate_backwards(traced: TracedModel) -> TracedModel:
    """Move custom backwards into graphs of their own; a mark saves the values that each of them needs."""
    if not traced.custom_backwards:
        return traced
    sections = {section.number: section for section in _sections(traced.graph)}
    owner = {node: number for number, section in sections.items() for node in section.nodes}
    for number, section in sections.items():
        used = dict.fromkeys(n for node in section.nodes for n in node.all_input_nodes)
        used |= dict.fromkeys(node for node in section.gradients if node is not None)
        section.values = [node for node in used if owner.get(node) != number]
        for node in section.values:
            if node in owner and node not in sections[owner[node]].shared:
                sections[owner[node]].shared.append(node)
    followed = list(_with_failures(traced, sections, owner))
    for backward in followed:
        if backward.failure is not None:
            sections[backward.number].values.clear()
    graph, leaves = _forward_graph(traced.graph, sections, owner)
    inside = {node.name for node in owner}
    backwards = [
        _separated(replace(backward, leaves=leaves[backward.number]), sections, owner, traced)
        for backward in followed
    ]
    return replace(
        traced,
        graph=graph,
        sites=tuple(site for site in traced.sites if site.node not in inside),
        custom_backwards=tuple(backwards),
    )


def _with_failures(
    traced: TracedModel, sections: dict[int, _Section], owner: dict[fx.Node, int]
) -> Iterator[CustomBackward]:
    """Yield the custom backwards in order; one that reads an unknown or failed value fails as well."""
    failed: dict[int, str] = {}
    for backward in traced.custom_backwards:
        values = sections[backward.number].values
        broken = next((failed[owner[node]] for node in values if owner.get(node) in failed), None)
        unknown = any(isinstance(traced.tensors.get(node.name), FakeTensor) for node in values)
        result = replace(backward, failure=backward.failure or broken or (_LOST if unknown else None))
        if result.failure is not None:
            failed[backward.number] = result.failure
        yield result


def _sections(graph: fx.Graph) -> Iterator[_Section]:
    nodes: list[fx.Node] | None = None
    for node in graph.nodes:
        if node.target is BACKWARD_START:
            nodes = []
        elif node.target is BACKWARD_END:
            assert nodes is not None, "a backward starts before it ends"
            gradients, number, leaves = node.args
            yield _Section(number, nodes, list(gradients), list(leaves))
            nodes = None
        elif nodes is not None:
            nodes.append(node)


def _forward_graph(
    graph: fx.Graph, sections: dict[int, _Section], owner: dict[fx.Node, int]
) -> tuple[fx.Graph, dict[int, tuple[int, ...]]]:
    """Return the graph with marks for each backward's saved values, and the positions of leaves."""
    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    positions: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.target is BACKWARD_END:
            number = mark_number(node)
            saved_nodes = [value for value in sections[number].values if value not in owner]
            leaves = sections[number].leaves
            positions[number] = tuple(range(len(saved_nodes), len(saved_nodes) + len(leaves)))
            forward.call_function(saved_values, ([env[value] for value in (*saved_nodes, *leaves)], number))
        elif node.op == "output":
            forward.output(fx.node.map_arg(node.args[0], lambda n: env[n]))
        elif node not in owner and node.target is not BACKWARD_START:
            env[node] = forward.node_copy(node, lambda n: env[n])
    forward.lint()
    return forward, positions


def _separated(
    backward: CustomBackward, sections: dict[int, _Section], owner: dict[fx.Node, int], traced: TracedModel
) -> CustomBackward:
    """Return the backward with its own graph, unless it could not be traced."""
    if backward.failure is not None:
        return backward
    section = sections[backward.number]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[tuple[str, int | str]] = []
    placeholders: list[Placeholder] = []
    gradients = [node for node in section.nodes if node.target is OUTPUT_GRADIENT]
    saved_nodes = [node for node in section.values if node not in owner]
    for node in (*gradients, *section.values):
        env[node] = graph.create_node("placeholder", node.name, (), {}, name=node.name)
        env[node].meta = dict(node.meta)
        placeholders.append(Placeholder(env[node].name, Slot.INPUT, node.name, node_dtype(node)))
        if node in owner:
            source = ("gradient", node.args[2]) if node in gradients else ("shared", node.name)
        else:
            source = ("value", saved_nodes.index(node))
        inputs.append(source)  # type: ignore[arg-type]
    for node in section.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    returned = section.gradients
    count = len(returned) - len(section.leaves)
    gradient_nodes = [node for node in returned[:count] if node is not None]
    numbers = iter(range(len(gradient_nodes)))
    returns = tuple(None if node is None else next(numbers) for node in returned[:count])
    graph.output(tuple(env[node] for node in (*gradient_nodes, *returned[count:], *section.shared)))
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    sites = tuple(replace(site, layer=backward.layer) for site in build_sites(graph, placeholders))
    inside = replace(
        traced,
        graph=graph,
        placeholders=tuple(placeholders),
        tensors={},
        sites=sites,
        custom_backwards=(),
        outputs=(),
        structure=None,
    )
    return replace(
        backward,
        traced=inside,
        inputs=tuple(inputs),
        returns=returns,
        shares=tuple(node.name for node in section.shared),
    )
