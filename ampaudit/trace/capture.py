"""Exports a model while a caster casts its ops, and builds the traced model from the result."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ampaudit.core.errors import AuditError
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import Decision, Measurement, RuleSet
from ampaudit.trace.autocast_state import autocast_visible
from ampaudit.trace.backward.patches import AFTER_ACCUMULATION, watch_custom_backwards
from ampaudit.trace.backward.tracer import BackwardTracer
from ampaudit.trace.caster import Caster
from ampaudit.trace.dynamic import Dimensions, NarrowedDimensions, export_module
from ampaudit.trace.edits import Edit
from ampaudit.trace.entry import ENTRY_NAME, Entry, flatten_outputs, layer_path, tensor_leaves
from ampaudit.trace.facts import FactFinder
from ampaudit.trace.failure import trace_failure
from ampaudit.trace.fake_model import constant_masters, fake_like, make_fake_model, named_tensors
from ampaudit.trace.flatten import flat_graph
from ampaudit.trace.graph import Placeholder, Slot, TracedModel
from ampaudit.trace.internals import FakeTensorMode, ShapeEnv
from ampaudit.trace.interpose import DispatchHook, current_layer, same_module
from ampaudit.trace.isolation import seeded
from ampaudit.trace.precision_reads import PrecisionReads, conversions_of
from ampaudit.trace.site_table import build_sites
from ampaudit.trace.state import StateChange
from ampaudit.trace.storage import is_cast, own_conversion, split_ties, storage_notes, stored_dtypes
from ampaudit.trace.values import torch_dtype

__all__ = ["TraceConfig", "capture", "input_signature", "quiet"]

_SLOTS = {
    InputKind.PARAMETER: Slot.PARAMETER,
    InputKind.BUFFER: Slot.BUFFER,
    InputKind.CONSTANT_TENSOR: Slot.CONSTANT,
    InputKind.USER_INPUT: Slot.INPUT,
}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The configuration of one trace.

    Attributes:
        rules: the policy.
        author_rules: the rules inside an autocast region of the model's code (CUDA autocast's rules).
        number_format: the 16-bit format of the run.
        measured: measurements of a run, by site; empty before the first run.
        planned: decisions made on the whole graph, by site.
        edits: ops to rewrite, by site, to try a change of the model's code.
        differentiated: whether to note where the model's code switches gradients off.
        follow_backward: whether custom backwards are traced; ``None`` if no gradients are requested.
        seed: seeds the random numbers that the model's code draws; ``None`` to continue the generators.
        dynamic: axes of each input tensor that may vary; ``None`` if the graph is for these shapes only.
    """

    rules: RuleSet
    author_rules: RuleSet
    number_format: NumberFormat
    measured: Mapping[SiteId, Measurement] = field(default_factory=dict)
    planned: Mapping[SiteId, Decision] = field(default_factory=dict)
    edits: Mapping[SiteId, Edit] = field(default_factory=dict)
    differentiated: bool = False
    follow_backward: bool | None = None
    seed: int | None = None
    dynamic: Dimensions | None = None

    @property
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format as torch's dtype."""
        return torch_dtype(self.number_format)


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], config: TraceConfig
) -> TracedModel:
    """Export a model for inputs like these, with the casts that the configuration decides.

    The export runs under the casts themselves, on fake tensors that have the stored dtypes: code such as
    ``x.to(weight.dtype)`` or ``if x.dtype == torch.float16`` does what it will do after conversion.

    Args:
        model: in the mode (train or eval) to audit; not changed.
        args: positional inputs; only shapes and dtypes of tensors matter.
        kwargs: keyword inputs.
        config: the policy, and what else decides.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
    """
    file, low_dtype = config.rules.file, config.low_dtype
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    reads = PrecisionReads()
    with quiet():
        convert = own_conversion(file.weights, low_dtype)
        tracer = None if config.follow_backward is None else BackwardTracer(config.follow_backward)
        dtypes = stored_dtypes(model, file.weights, low_dtype)
        kept = {"trained": config.differentiated, "hooked": tracer is not None}
        fake_model, hooks = make_fake_model(model, mode, dtypes, convert, **kept)
        entry = Entry(
            *(fake_model, args, kwargs, _placed(file.weights.outputs, low_dtype), reads.watching),
            None
            if tracer is None
            else lambda traced, output: _trace_backward(tracer, caster, traced, output, hooks),
        )
    entry.train(model.training)
    _copy_modes(model, fake_model)
    given = _placed(file.weights.inputs, low_dtype)
    inputs = tuple(
        fake_like(t, mode, given if given is not None and is_cast(t.dtype, file.weights) else t.dtype)
        for t in tensor_leaves(args, kwargs)
    )
    facts = FactFinder(entry, config.number_format.name, config.measured)
    caster = Caster(config.rules, config.author_rules, low_dtype, facts, config.planned, config.edits)
    try:
        with _tracing(config, caster), watch_custom_backwards(tracer, current_layer) as custom_code:
            program = export_module(entry, inputs, shapes=config.dynamic and (config.dynamic,))
    except NarrowedDimensions as narrowed:
        return capture(model, args, kwargs, replace(config, dynamic=narrowed.shapes[0]))
    except AuditError:
        raise
    except (Exception, SystemExit) as error:
        if tracer is not None and tracer.follow and tracer.found:
            return capture(model, args, kwargs, replace(config, follow_backward=False))
        raise trace_failure(error, model, args, kwargs, config.rules.name) from error
    notes = storage_notes(model, file.weights, low_dtype)
    made = _assemble(program, entry, model, config, input_signature(args, kwargs), notes)
    reads.lines += [] if convert is None else conversions_of(model)
    return replace(
        made,
        custom_functions=tuple(custom_code.names),
        custom_backwards=() if tracer is None else tuple(tracer.backwards),
        backward_notes=(*custom_code.notes, *(_unseen_hooks(model) if tracer is not None else ())),
        reads=tuple(reads.lines),
    )


@contextlib.contextmanager
def _tracing(config: TraceConfig, caster: Caster) -> Iterator[None]:
    """Set up torch's state for an export under a caster."""
    with (
        quiet(),
        contextlib.nullcontext() if config.seed is None else seeded(config.seed),
        torch.set_grad_enabled(config.differentiated),
        autocast_visible(config.rules.file.autocast, config.low_dtype),
        DispatchHook(caster).installed(),
    ):
        yield


def _trace_backward(
    tracer: BackwardTracer, caster: Caster, model: nn.Module, output: Any, hooks: Mapping[str, Sequence[Any]]
) -> None:
    """Trace custom backwards from the loss, outside autocast, as training code runs them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, functions in hooks.items():
        for function in functions:
            tracer.hook(parameters[name], function, layer_path(name).rpartition(".")[0])

    @contextlib.contextmanager
    def within(name: str) -> Iterator[None]:
        with caster.in_backward(name), same_module():
            yield

    loss = flatten_outputs(output)[-1][1]
    with autocast_visible(False, caster.dtype):
        tracer.trace(loss, list(parameters.values()), within)


def _unseen_hooks(model: nn.Module) -> Iterator[str]:
    """Return the names of hooks that no trace sees: on autograd's nodes, or after accumulation."""
    if any(module._backward_hooks and module._is_full_backward_hook is False for module in model.modules()):
        yield "backward hooks of modules that are not full ones are not followed"
    if any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
        yield AFTER_ACCUMULATION


def _placed(placement: str, low_dtype: torch.dtype) -> torch.dtype | None:
    return {"lower": low_dtype, "float32": torch.float32}.get(placement)


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes and dtypes of a batch: batches with equal signatures can share a trace."""
    return tuple((tuple(t.shape), t.dtype) for t in tensor_leaves(args, kwargs))


def _assemble(
    program: ExportedProgram,
    entry: Entry,
    model: nn.Module,
    config: TraceConfig,
    signature: tuple[Any, ...],
    notes: tuple[str, ...],
) -> TracedModel:
    graph = flat_graph(program)
    changes = tuple(_lasting(entry.outputs.changes, program, graph))
    placeholders, tensors = _placeholders(program, graph, model, getattr(entry, ENTRY_NAME))
    return TracedModel(
        graph=graph,
        placeholders=placeholders,
        tensors=tensors,
        sites=build_sites(graph, placeholders),
        outputs=entry.outputs.names,
        structure=entry.outputs.structure,
        signature=signature,
        changes=changes,
        random_constants=entry.outputs.random_constants,
        policy=config.rules.name,
        dtype=config.low_dtype,
        notes=(*notes, *_state_notes(changes, entry.outputs.random_constants)),
        clip=config.rules.file.weights.clip,
        split_ties=split_ties(model, config.rules.file.weights, config.low_dtype),
    )


def _placeholders(
    program: ExportedProgram, graph: fx.Graph, model: nn.Module, fake_model: nn.Module
) -> tuple[tuple[Placeholder, ...], dict[str, torch.Tensor]]:
    real = {layer_path(name): tensor for name, tensor in named_tensors(model).items()}
    masters = constant_masters(model, fake_model)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    slots: list[Placeholder] = []
    tensors: dict[str, torch.Tensor] = {}
    count = 0
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        slot = _SLOTS[spec.kind]
        if slot is Slot.CONSTANT and not node.users:
            graph.erase_node(node)  # left of a composite op that was split (nn.LSTM), without values
            continue
        name = layer_path(str(spec.target)) if spec.target else f"input[{count}]"
        count += slot is Slot.INPUT
        if slot is not Slot.INPUT:
            constant = program.constants.get(str(spec.target))
            tensors[node.name] = real[name] if name in real else _real(masters.get(id(constant), constant))
        value = node.meta.get("val")
        slots.append(Placeholder(node.name, slot, name, getattr(value, "dtype", None)))
    return tuple(slots), tensors


def _lasting(
    changes: Sequence[StateChange], program: ExportedProgram, graph: fx.Graph
) -> Iterator[StateChange]:
    """Return changes that a later call may read, without tensors that each call recomputes."""
    used = {node.name for node in graph.find_nodes(op="placeholder") if node.users}
    specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name in used]
    read = {id(program.constants.get(str(spec.target))) for spec in specs}
    for change in changes:
        if change.plain:
            yield change
        elif change.stale is None or any(id(tensor) in read for tensor in change.stale):
            yield StateChange(change.number, change.name, None, None, plain=False)


def _state_notes(changes: Sequence[StateChange], random_constants: bool) -> tuple[str, ...]:
    """Explain why the trace is valid for this call only."""
    plain = ", ".join(change.name for change in changes if change.plain)
    stored = ", ".join(change.name for change in changes if not change.plain)
    notes = [f"forward changes {plain}: traced again for each of its values"] if plain else []
    if random_constants:
        notes.append("forward draws Python's or NumPy's random numbers: each call is traced again")
    if stored:
        notes.append(f"forward stores tensors or objects in {stored}: each call is traced without them")
    return tuple(notes)


def _real(constant: Any) -> torch.Tensor:
    assert isinstance(constant, torch.Tensor), constant
    return constant


def _copy_modes(model: nn.Module, fake_model: nn.Module) -> None:
    for ours, theirs in zip(fake_model.modules(), model.modules(), strict=True):
        ours.training = theirs.training


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Redirect prints of the model's code to stderr, and silence logs and warnings.

    When tracing fails, torch prints an unfinished graph and a traceback; the raised error says it once.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())
