"""Traces a model under a policy, op by op or, for policies that decide on whole graphs, in two passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from ampaudit.core.errors import InputError, SourceError
from ampaudit.core.sites import SiteId
from ampaudit.core.untrusted import describe
from ampaudit.policy import plain_fp32
from ampaudit.policy.decide import PlanSite, plan_graph
from ampaudit.trace.backward.tracer import separate_backwards
from ampaudit.trace.capture import TraceConfig, capture
from ampaudit.trace.entry import layer_path, named_inputs, tensor_leaves
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.path.recorder import PathTracing
from ampaudit.trace.replay import REPLAYED, Replayer
from ampaudit.trace.values import float_value

_FLOAT_FUNCTIONALS = ("FloatFunctional", "FXFloatFunctional")  # in that package, but plain
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
# subclasses of which torch knows how to trace every op
_TRACED = (FakeTensor, DTensor)


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], config: TraceConfig
) -> TracedModel:
    """Trace a model on inputs like these, with the policy's casts in the graph.

    A policy of level *calls* acts while the model's code runs. One of level *graph* acts as converters do:
    the model is traced in FP32, so that its code never sees a 16-bit tensor, decisions are made on that graph
    as a whole, and the graph is replayed under them. The model is in the mode (train or eval) to audit, and
    is not changed. Only shapes and dtypes of the inputs matter, unless a path is followed.

    Raises:
        TraceFailed: torch.export refuses the model; the message names the line.
        SourceError: The model itself fails, or cannot be traced by design.
        InputError: An input cannot be traced by design.
    """
    rules = config.rules
    refuse_unsupported(model, args, kwargs, packed=config.path is PathTracing.OFF)
    if rules.file.level == "calls":
        return separate_backwards(capture(model, args, kwargs, config))
    uncast = plain_fp32(whole=rules.op_names)
    fp32_trace = capture(model, args, kwargs, replace(config, rules=uncast, author_rules=uncast, planned={}))
    sites = _plan_sites(fp32_trace)
    decisions = plan_graph(rules, sites)
    graph_decisions = {
        SiteId(site.facts.site): decision for site, decision in zip(sites, decisions, strict=True)
    }
    replay = Fp32Replay(model, fp32_trace)
    replay.training = model.training
    inputs = tuple(tensor_leaves(args, kwargs))
    config = replace(
        config,
        author_rules=uncast,
        planned={**graph_decisions, **config.planned},
        edits={},
        follow_backward=None,
        path=PathTracing.OFF if fp32_trace.path is None else PathTracing.ON,
    )
    traced = capture(replay, inputs, {}, config)
    return separate_backwards(
        replace(
            traced,
            outputs=fp32_trace.outputs,
            structure=fp32_trace.structure,
            paths=fp32_trace.paths,
            custom_functions=fp32_trace.custom_functions,
            notes=(*traced.notes, *fp32_trace.notes),
            changes=fp32_trace.changes,
            random_constants=fp32_trace.random_constants,
            custom_backwards=fp32_trace.custom_backwards,
            backward_notes=fp32_trace.backward_notes,
            path=fp32_trace.path,
        )
    )


def _plan_sites(traced: TracedModel) -> list[PlanSite]:
    """List the ops of a graph as the policy sees them, with the flow of floats between them."""
    index: dict[fx.Node, int] = {}
    sites: list[PlanSite] = []
    by_node = traced.site_of_node
    for node in traced.graph.nodes:
        floats = (n for n in node.all_input_nodes if float_value(n.meta.get("val")) is not None)
        sources = {index[n] for n in floats if n in index}
        site = by_node.get(node.name)
        if site is not None and site.facts is not None:
            index[node] = len(sites)
            sites.append(PlanSite(site.facts, tuple(sorted(sources))))
        elif len(sources) == 1:
            index[node] = sources.pop()  # a cast, or one item of a result
    return sites


class Fp32Replay(nn.Module):
    """Replays an FP32 trace as a model of flat tensors, so that it can be traced again under decisions."""

    def __init__(self, model: nn.Module, traced: TracedModel) -> None:
        super().__init__()
        setattr(self, REPLAYED, model)
        self._graph = traced.graph
        self._placeholders = traced.placeholders
        for placeholder in traced.placeholders:
            if placeholder.slot is Slot.CONSTANT:
                self.register_buffer(placeholder.node, traced.tensors[placeholder.node], persistent=False)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take tensors in the order of the trace's inputs; return its outputs in their order."""
        tensors = {layer_path(name): tensor for name, tensor in named_tensors(self).items()}
        remaining = iter(inputs)
        values = [
            next(remaining)
            if placeholder.slot is Slot.INPUT
            else tensors[placeholder.node if placeholder.slot is Slot.CONSTANT else placeholder.name]
            for placeholder in self._placeholders
        ]
        replayer = Replayer(self, self._graph, converting=True)
        return tuple(replayer.run(*values, enable_io_processing=False))


def refuse_unsupported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, packed: bool = True
) -> None:
    """Raise for models and inputs that torch.export cannot trace, naming the layer or the input.

    Without ``packed``, packed sequences pass: a trace along one path follows them.

    Raises:
        SourceError: The model is TorchScript, quantized, without values, or has special tensors.
        InputError: An input is a special tensor.
    """
    for path, module in model.named_modules():
        _refuse_module(module, f"layer {describe(path)}" if path else f"the model ({type(module).__name__})")
    for name, tensor in named_tensors(model).items():
        what = _special(tensor)
        if what is not None:
            raise SourceError(f"{describe(name)} is {what[0]}", hint=what[1])
    for name, value in named_inputs(args, kwargs):
        if isinstance(value, DTensor):
            raise InputError(
                f"{describe(name)} is spread over processes (a DTensor)",
                hint="give the whole tensor to each process: full_tensor()",
            )
        what = None if isinstance(value, PackedSequence) and not packed else _special(value)
        if what is not None:
            raise InputError(f"{describe(name)} is {what[0]}", hint=what[1])


def _refuse_module(module: nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{name} is TorchScript that was traced, frozen or loaded: its Python code is not known",
            hint="return the nn.Module from which it was made",
        )
    if type(module).__module__.startswith(_QUANTIZED) and type(module).__name__ not in _FLOAT_FUNCTIONALS:
        raise SourceError(
            f"{name} is quantized ({type(module).__name__}): its weights are integers",
            hint="return the model as it is before it is quantized; 16 bits are an alternative to int8",
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise SourceError(
            f"{name} is a lazy layer without a shape yet",
            hint="call the model once on its inputs before get_model() returns it",
        )


def _special(value: Any) -> tuple[str, str] | None:
    """Describe a tensor that cannot be traced, with a remedy; ``None`` for plain tensors and other values."""
    if isinstance(value, PackedSequence):
        return (
            "a packed sequence, which torch.export does not trace",
            "pass the padded batch (pad_packed_sequence) to the recurrent layer while you audit it",
        )
    if not isinstance(value, torch.Tensor) or isinstance(value, _TRACED):
        return None
    if value.is_meta:
        return (
            "on the meta device: it has no values",
            "create the model and its inputs with values, or load weights with --stream --weights FILE; "
            "leave out --stream if it is computed from weights",
        )
    if value.is_nested:
        return (
            "a nested tensor, which ampaudit does not trace",
            "pad it to one length (to_padded_tensor), with a mask if the model takes one",
        )
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.").replace("_", " ")
        return (
            f"a tensor of layout {layout}, which ampaudit does not trace",
            "give it as a dense tensor (to_dense), or audit the part of the model after it",
        )
    if value.is_quantized or hasattr(value, "__tensor_flatten__"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        what = "a quantized tensor" if value.is_quantized else f"a tensor subclass ({describe(kind)})"
        return (
            f"{what}, which computes in formats of its own",
            "audit the model as it is before the weights are converted (torchao's quantize_, for example)",
        )
    return None
