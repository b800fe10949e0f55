"""Exports a model while a caster casts its ops."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import AuditError
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SiteNumbering
from ampaudit.policy import Decision, Measurement, RuleSet
from ampaudit.trace.assemble import assembled
from ampaudit.trace.autocast_state import autocast_visible, mixed_recurrent_inputs
from ampaudit.trace.backward.patches import AFTER_ACCUMULATION, watch_custom_backwards
from ampaudit.trace.backward.tracer import BackwardTracer
from ampaudit.trace.caster import Caster
from ampaudit.trace.dynamic import Dimensions, NarrowedDimensions, export_module
from ampaudit.trace.edits import Edit
from ampaudit.trace.entry import Entry, flatten_outputs, layer_path, tensor_leaves
from ampaudit.trace.facts import FactFinder
from ampaudit.trace.failure import trace_failure
from ampaudit.trace.fake_model import fake_like, make_fake_model
from ampaudit.trace.graph import Site, TracedModel
from ampaudit.trace.internals import FakeTensorMode, ShapeEnv
from ampaudit.trace.interpose import DispatchHook, current_layer, same_module
from ampaudit.trace.isolation import seeded
from ampaudit.trace.path.numbering import PathNumbering
from ampaudit.trace.path.recorder import GivenValues, PathRecorder, PathTracing
from ampaudit.trace.precision_reads import PrecisionReads, conversions_of
from ampaudit.trace.storage import is_cast, own_conversion, rounded_names, stored_dtypes
from ampaudit.trace.values import torch_dtype

__all__ = ["TraceConfig", "capture", "input_signature", "quiet"]


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
        values: what decides the path, where that is not the inputs and the model as it is.
        dynamic: axes of each input tensor that may vary; ``None`` if the graph is for these shapes only.
        path: whether to trace along the path that the inputs take.
        known: sites of the paths that other inputs take.
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
    path: PathTracing = PathTracing.OFF
    known: Sequence[Site] = ()
    values: GivenValues | None = None

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
        args: positional inputs; only shapes and dtypes of tensors matter, but for a trace along their path.
        kwargs: keyword inputs.
        config: the policy, and what else decides.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
    """
    file, low_dtype = config.rules.file, config.low_dtype
    path = PathRecorder() if config.path is PathTracing.ON else None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    values = config.values or GivenValues(tensor_leaves(args, kwargs), {})
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
            None
            if path is None
            else lambda fakes: path.begin(model, fake_model, values.inputs, fakes, values.buffers),
        )
    entry.train(model.training)
    _copy_modes(model, fake_model)
    given = _placed(file.weights.inputs, low_dtype)
    inputs = tuple(
        fake_like(t, mode, given if given is not None and is_cast(t.dtype, file.weights) else t.dtype)
        for t in tensor_leaves(args, kwargs)
    )
    rounded = rounded_names(model, file.weights, low_dtype)
    facts = FactFinder(entry, config.number_format.name, config.measured, rounded)
    numbering = SiteNumbering if path is None else partial(PathNumbering, config.known)
    deciding = (config.rules, config.author_rules, low_dtype, facts, config.planned, config.edits)
    caster = Caster(*deciding, numbering)
    try:
        with _tracing(config, caster, path), watch_custom_backwards(tracer, current_layer) as custom_code:
            program = export_module(entry, inputs, shapes=config.dynamic and (config.dynamic,))
    except NarrowedDimensions as narrowed:
        return capture(model, args, kwargs, replace(config, dynamic=narrowed.shapes[0]))
    except AuditError:
        raise
    except (Exception, SystemExit) as error:
        if config.path is PathTracing.FALLBACK:
            return capture(model, args, kwargs, replace(config, path=PathTracing.ON))
        if tracer is not None and tracer.follow and tracer.found:
            return capture(model, args, kwargs, replace(config, follow_backward=False))
        raise trace_failure(error, model, args, kwargs, config.rules.name) from error
    made = assembled(program, entry, model, config.rules, low_dtype, input_signature(args, kwargs))
    reads.lines += [] if convert is None else conversions_of(model)
    return replace(
        made,
        custom_functions=tuple(custom_code.names),
        custom_backwards=() if tracer is None else tuple(tracer.backwards),
        backward_notes=(*custom_code.notes, *(_unseen_hooks(model) if tracer is not None else ())),
        reads=tuple(reads.lines),
        path=None if path is None else tuple(path.reads.reads),
        rounded=rounded,
    )


@contextlib.contextmanager
def _tracing(config: TraceConfig, caster: Caster, path: PathRecorder | None) -> Iterator[None]:
    """Set up torch's state for an export under a caster."""
    rounds = config.rules.file.weights.storage == "rounded"
    with (
        quiet(),
        contextlib.nullcontext() if config.seed is None else seeded(config.seed),
        torch.set_grad_enabled(config.differentiated),
        autocast_visible(config.rules.file.autocast, config.low_dtype),
        mixed_recurrent_inputs() if rounds else contextlib.nullcontext(),
        DispatchHook(caster, path).installed(),
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
