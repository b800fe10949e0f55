"""Exports a model under a policy and builds the traced model from what comes out."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ampaudit.errors import AuditError
from ampaudit.formats import NumberFormat
from ampaudit.policy import RuleSet
from ampaudit.trace.autocast_state import autocast_visible
from ampaudit.trace.caster import Caster
from ampaudit.trace.entry import ENTRY_NAME, Entry, layer_path, tensor_leaves
from ampaudit.trace.failure import trace_failure
from ampaudit.trace.flatten import flat_graph
from ampaudit.trace.graph import Placeholder, Slot, TracedModel
from ampaudit.trace.interpose import interposed
from ampaudit.trace.opnames import CASTABLE
from ampaudit.trace.shadow import fake_like, kept_in_fp32, named_tensors, shadow_of
from ampaudit.trace.site_table import build_sites

__all__ = ["input_signature", "trace"]

_SLOTS = {
    InputKind.PARAMETER: Slot.PARAMETER,
    InputKind.BUFFER: Slot.BUFFER,
    InputKind.CONSTANT_TENSOR: Slot.CONSTANT,
    InputKind.USER_INPUT: Slot.INPUT,
}


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rules: RuleSet,
    author_rules: RuleSet,
    number_format: NumberFormat,
) -> TracedModel:
    """The model's graph for inputs like these, with the policy's casts in it.

    The export runs under the casts themselves, on fake tensors that have the stored dtypes: code such as
    ``x.to(weight.dtype)`` or ``if x.dtype == torch.float16`` does what it will do after conversion.

    Args:
        model: in the mode (train or eval) that is to be audited; not changed.
        args: positional inputs; only shapes and dtypes of tensors matter.
        kwargs: keyword inputs.
        rules: the policy.
        author_rules: what an autocast region of the author's own means (CUDA autocast's rules).
        number_format: the 16-bit format of the run.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
    """
    lower = getattr(torch, number_format.name)
    weights = rules.file.weights
    storage = lower if weights.storage == "lower" else None
    listed = kept_in_fp32(model)
    keep = listed if weights.keep_fp32_modules == "respect" else ()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with _quiet():
        entry = Entry(shadow_of(model, mode, storage, keep), args, kwargs)
    entry.train(model.training)
    _copy_modes(model, getattr(entry, ENTRY_NAME))
    inputs = tuple(
        fake_like(t, mode, lower if weights.inputs == "lower" and t.dtype in CASTABLE else t.dtype)
        for t in tensor_leaves(args, kwargs)
    )
    caster = Caster(rules, author_rules, lower)
    try:
        with _quiet(), torch.no_grad(), autocast_visible(rules.file.autocast, lower), interposed(caster):
            program = torch.export.export(entry, inputs, strict=False)
    except AuditError:
        raise
    except Exception as error:
        raise trace_failure(error, type(model).__name__) from error
    notes = _notes(storage, listed, bool(keep))
    return _assemble(program, entry, model, rules, lower, input_signature(args, kwargs), notes)


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Shapes and dtypes of a batch: two batches with equal signatures can share a trace."""
    return tuple((tuple(t.shape), t.dtype) for t in tensor_leaves(args, kwargs))


def _assemble(
    program: ExportedProgram,
    entry: Entry,
    model: nn.Module,
    rules: RuleSet,
    lower: torch.dtype,
    signature: tuple[Any, ...],
    notes: tuple[str, ...],
) -> TracedModel:
    graph = flat_graph(program)
    placeholders, tensors = _placeholders(program, graph, model)
    return TracedModel(
        graph=graph,
        placeholders=placeholders,
        tensors=tensors,
        sites=build_sites(graph, placeholders),
        outputs=entry.outputs.names,
        signature=signature,
        policy=rules.name,
        dtype=lower,
        notes=notes,
    )


def _placeholders(
    program: ExportedProgram, graph: fx.Graph, model: nn.Module
) -> tuple[tuple[Placeholder, ...], dict[str, torch.Tensor]]:
    real = {layer_path(name): tensor for name, tensor in named_tensors(model).items()}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    slots: list[Placeholder] = []
    tensors: dict[str, torch.Tensor] = {}
    count = 0
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        slot = _SLOTS[spec.kind]
        name = layer_path(str(spec.target)) if spec.target else f"input[{count}]"
        count += slot is Slot.INPUT
        if slot is not Slot.INPUT:
            constant = program.constants.get(str(spec.target))
            tensors[node.name] = real[name] if name in real else _real(constant)
        value = node.meta.get("val")
        slots.append(Placeholder(node.name, slot, name, getattr(value, "dtype", None)))
    return tuple(slots), tensors


def _real(constant: Any) -> torch.Tensor:
    assert isinstance(constant, torch.Tensor), constant
    return constant


def _copy_modes(model: nn.Module, shadow: nn.Module) -> None:
    for ours, theirs in zip(shadow.modules(), model.modules(), strict=True):
        ours.training = theirs.training


def _notes(storage: torch.dtype | None, listed: tuple[str, ...], kept: bool) -> tuple[str, ...]:
    if storage is None or not listed:
        return ()
    what = "kept in FP32 as the author asks" if kept else "cast all the same, as this policy says"
    return (f"the model asks to keep {', '.join(listed)} in FP32: {what}",)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep stdout for the report. What the model's code prints goes to stderr when tracing succeeds.

    When it fails, torch prints its half-made graph and logs a traceback; the error we raise says it once.
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
