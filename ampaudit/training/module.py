"""A module that computes a model in mixed precision, traced once for each kind of input."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ampaudit.core.errors import TraceFailed, UsageError
from ampaudit.core.formats import NumberFormat
from ampaudit.core.session import silent
from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, RuleSet
from ampaudit.run.audit import measure
from ampaudit.run.backends import rounded
from ampaudit.run.config import RunConfig
from ampaudit.run.program import passes_gradients
from ampaudit.source import Batch
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.backward.tracer import CHECKPOINT
from ampaudit.trace.entry import OutputStructure, layer_path, tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.flatten import as_module
from ampaudit.trace.functional import OnCopy, functionalized
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.state import PythonState, TraceCache, apply_changes, call_key
from ampaudit.trace.values import LOW_PRECISION_DTYPES, node_dtype, torch_dtype, widened
from ampaudit.training.model_proxy import (
    OWN_CODE,
    Executable,
    ModelProxy,
    by_parts,
    in_float32,
    is_spread,
    on_shards,
    replicated,
    without_plan,
)

KEEPS_ACTIVATIONS = "activations that the model's code recomputes are kept: the same values, in more memory"
_MAX_RETRACES = 3  # after more traces, warn that the model is traced again for each call


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """The configuration of a mixed-precision module."""

    rules: RuleSet
    author_rules: RuleSet  # of the model's own autocast regions
    number_format: NumberFormat  # of 16 bits
    emulate: bool = False  # whether 16 bits are emulated in float32

    @property
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format as a torch dtype."""
        return torch_dtype(self.number_format)


@dataclass(frozen=True, slots=True)
class _Compiled:
    run: Executable
    traced: TracedModel
    structure: OutputStructure
    names: Mapping[str, str]  # names of parameters and buffers, from the graph's to the module's


class MixedModule(ModelProxy):
    """Compute a model with a policy's casts in its graph.

    Parameters are the model's own FP32 masters; each forward pass makes 16-bit working copies from them.
    The model is traced once for each combination of shapes, dtypes, names, arguments other than tensors, and
    state that the model's code can read, such as modes, attributes and hooks. A model that counts its calls,
    or draws random numbers in Python, is traced for each call. A policy's measured rules decide once, on the
    first inputs.
    """

    def __init__(self, model: nn.Module, config: ModuleConfig) -> None:
        super().__init__(model)
        self._ampaudit_config = config
        self._ampaudit_compiled: TraceCache[_Compiled] = TraceCache()
        self._ampaudit_retraced, self._ampaudit_stored, self._ampaudit_keeps = 0, False, False
        self._ampaudit_measured: Mapping[SiteId, Measurement] | None = None

    @property
    def low_dtype(self) -> torch.dtype:
        """The format of the policy."""
        return self._ampaudit_config.low_dtype

    @property
    def keeps_activations(self) -> bool:
        """Whether a graph keeps activations that the model's code recomputes."""
        return self._ampaudit_keeps

    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph for these inputs, and return its outputs as float32."""
        compiled = self._compiled(args, kwargs)
        outputs = on_shards(compiled.run, self._values(compiled, tensor_leaves(args, kwargs)))
        self._round_buffers(compiled)
        if compiled.traced.changes:
            apply_changes(compiled.traced.changes, PythonState(self.original))
        return in_float32(compiled.structure.filled(outputs))

    def traced(self, *args: Any, **kwargs: Any) -> TracedModel:
        """Return the graph for these inputs."""
        return self._compiled(args, kwargs).traced

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compiled:
        key = (torch.is_grad_enabled(), *call_key(args, kwargs))
        compiled = self._ampaudit_compiled.find(key)
        if compiled is None:
            state = PythonState(self.original)
            try:
                compiled = self._compile(args, kwargs)
            except TraceFailed as error:
                error.hint = f"rewrite that line, or {OWN_CODE}, which runs the model's own code"
                raise
            if not compiled.traced.random_constants:
                self._ampaudit_compiled.keep(key, state, compiled)
            self._warn(compiled.traced)
        return compiled

    def _warn(self, traced: TracedModel) -> None:
        """Warn once about code that the graph leaves out, or about repeated tracing."""
        self._ampaudit_retraced += traced.random_constants or any(change.plain for change in traced.changes)
        stored = [change.name for change in traced.changes if not change.plain]
        if stored and not self._ampaudit_stored:
            warnings.warn(
                f"forward stores tensors or objects in {', '.join(stored)}; a prepared model does not",
                stacklevel=5,
            )
        self._ampaudit_stored |= bool(stored)
        if CHECKPOINT in traced.custom_functions and not self._ampaudit_keeps:
            warnings.warn(f"{KEEPS_ACTIVATIONS}; how='autocast' recomputes them", stacklevel=5)
            self._ampaudit_keeps = True
        if self._ampaudit_retraced == _MAX_RETRACES:
            warnings.warn(
                f"{'; '.join(traced.notes)}: how='autocast' is faster for such a model", stacklevel=5
            )

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compiled:
        config = self._ampaudit_config
        setting = config.rules, config.author_rules, config.number_format
        model = self._whole()
        if config.rules.measured and self._ampaudit_measured is None:
            self._ampaudit_measured = self._measure(args, kwargs)
        measured = self._ampaudit_measured
        gradients = torch.is_grad_enabled()
        traced = trace(model, args, kwargs, TraceConfig(*setting, measured or {}, differentiated=gradients))
        if traced.changes and model is not self.original:
            raise UsageError(
                f"forward changes {traced.changes[0].name}, and parameters are spread over processes",
                hint=OWN_CODE,
            )
        functions = [name for name in traced.custom_functions if name != CHECKPOINT]
        if functions:
            raise UsageError(
                f"the model defines its own backward ({', '.join(functions)}), which a graph cannot contain",
                hint=OWN_CODE,
            )
        if traced.structure is None or traced.structure.has_objects:
            raise UsageError(
                "the model returns tensors in an object that torch cannot take apart",
                hint="return tensors, tuples, dicts, or a class registered with torch.utils._pytree",
            )
        make = emulated if config.emulate else native
        names = {layer_path(name): name for name in named_tensors(self.original)}
        return _Compiled(make(traced), traced, traced.structure, names)

    def _whole(self) -> nn.Module:
        """Return the model to trace, without the hooks that redistribute activations."""
        if not is_spread(self.original):
            return self.original
        if self._ampaudit_config.rules.measured:
            raise UsageError(
                f"policy {self._ampaudit_config.rules.name!r} has measured rules, and parameters are sharded",
                hint="choose a policy without them, such as apex-o2; 'ampaudit rules list' names all",
            )
        return without_plan(self.original)

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[SiteId, Measurement]:
        """Measure the first batch, for a policy with measured rules."""
        config = self._ampaudit_config
        device = next(iter(self.original.parameters()), torch.empty(0)).device
        plan = RunConfig(config.rules, config.author_rules, config.number_format, device)
        measurements, _ = measure(self.original, [Batch(args, kwargs)], plan, silent)
        return measurements

    def _values(self, compiled: _Compiled, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Look up each placeholder's value by name, since FSDP swaps parameters during a call."""
        traced, remaining = compiled.traced, iter(inputs)
        values: list[torch.Tensor] = []
        for place in traced.placeholders:
            if place.slot is Slot.INPUT:
                value = next(remaining)
            elif place.slot is Slot.CONSTANT:
                value = traced.tensors[place.node]
            else:
                owner, _, leaf = compiled.names[place.name].rpartition(".")
                value = getattr(self.get_submodule(owner), leaf)
            values.append(self._in_stored_dtype(value, place.dtype))
        return values

    def _in_stored_dtype(self, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Cast differentiably to the stored dtypes that native graphs take."""
        if self._ampaudit_config.emulate and dtype in LOW_PRECISION_DTYPES and value.dtype is torch.float64:
            return value.float()
        if self._ampaudit_config.emulate or dtype is None or not value.is_floating_point():
            return value
        return value if value.dtype == dtype else value.to(dtype)

    def _round_buffers(self, compiled: _Compiled) -> None:
        """Round buffers stored in 16 bits after they are written."""
        if not (self._ampaudit_config.emulate and self.training):
            return
        for place in compiled.traced.placeholders:
            if place.slot is Slot.BUFFER and place.dtype is self._ampaudit_config.low_dtype:
                buffer = self.get_buffer(compiled.names[place.name])
                # batch norm keeps them for its backward, which in training does not read them
                buffer.data.copy_(buffer.to(place.dtype))


class _RoundFunction(torch.autograd.Function):
    """Round a value and its gradient to the format."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return by_parts(partial(rounded, dtype=dtype), value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _RoundFunction.apply(gradients[0], ctx.dtype), None


def round_through(value: torch.Tensor, dtype: torch.dtype) -> Any:
    """Round a float32 tensor, and later its gradient, to the 16-bit format."""
    return _RoundFunction.apply(value, dtype)


def native(traced: TracedModel) -> Executable:
    """Return a function that runs the graph in its own dtypes, on a value for each placeholder."""
    return _transformed(traced, lambda graph, node, copied: copied)


def emulated(traced: TracedModel) -> Executable:
    """Return a function that runs the graph in float32 and rounds each 16-bit value and gradient.

    Where several ops use a value, their gradients are summed before they are rounded.
    """
    # buffers are rounded by their owner: a copy could not be written to
    stored = {place.node: place.dtype for place in traced.placeholders if place.slot is not Slot.BUFFER}

    def round_result(graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
        copied.args, copied.kwargs = widened(copied.args), widened(dict(copied.kwargs))
        dtype = stored.get(node.name) if node.op == "placeholder" else node_dtype(node)
        if dtype not in LOW_PRECISION_DTYPES:
            return copied
        return graph.call_function(round_through, (copied, dtype))

    return _transformed(functionalized(traced, write_back=True), round_result)


def _transformed(
    traced: TracedModel, transform: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]
) -> Executable:
    """Copy the graph with each result transformed; gradients stop where the model's code stops them."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: copies[n]))
            continue
        copies[node] = transform(graph, node, graph.node_copy(node, lambda n: copies[n]))
        if node.op == "call_function" and not passes_gradients(node):
            copies[node] = _detached(graph, node, copies[node])
    _replicate_constants(graph)
    graph.lint()
    for node in graph.nodes:
        node.meta = {}  # fake tensors and stack traces are not needed any more
    run: Callable[..., Any] = as_module(graph).forward
    return lambda values: tuple(run(*values))


def _replicate_constants(graph: fx.Graph) -> None:
    """Replicate the graph's constants over the mesh of its inputs, so that DTensor accepts them."""
    like = next((node for node in graph.nodes if node.op == "placeholder"), None)
    for node in list(graph.nodes):
        if like is not None and node.op == "call_function" and not node.all_input_nodes:
            with graph.inserting_after(node):
                constant = graph.call_function(replicated, (node, like))
            node.replace_all_uses_with(constant, lambda user, constant=constant: user is not constant)


def _detached(graph: fx.Graph, node: fx.Node, copied: fx.Node) -> fx.Node:
    """Detach a result that the model's code computes with gradients off."""
    value = node.meta.get("val")
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    if not is_float or node.target is operator.getitem or isinstance(node.target, OnCopy):
        return copied
    return graph.call_function(torch.ops.aten.detach.default, (copied,))
