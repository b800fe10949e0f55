"""Exports a folded graph as a program (``.pt2``) with the model's calling convention."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ampaudit.core.errors import AuditError, RunFailed, first_line
from ampaudit.core.text import share_db, signal_to_noise_db
from ampaudit.core.untrusted import describe
from ampaudit.export.fold import FoldedGraph
from ampaudit.report.conversion import OutputRecord
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.capture import Dimensions, NarrowedDimensions, export_module
from ampaudit.trace.converted import identity
from ampaudit.trace.entry import flatten_outputs, tensor_leaves
from ampaudit.trace.fake_model import place_tensor
from ampaudit.trace.flatten import as_module
from ampaudit.trace.graph import Placeholder, Slot
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.stack import model_frames
from ampaudit.trace.values import components, dtype_name

ExampleCall = tuple[tuple[Any, ...], dict[str, Any]]
_CONSTANTS = {bool, int, float, str, type(None)}
_SEQUENCES, _MAPPINGS = {list, tuple, torch.Size}, {dict, OrderedDict}
_ITEM = re.compile(r"^output\[(\d+)\]$")


class _DeferringFile(io.BufferedWriter):
    """A file that defers write errors, because an exception in torch's zip writer aborts the process."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            super().write(data)
        except OSError as error:
            self.failure = error
        return memoryview(data).nbytes


def save_program(program: ExportedProgram, path: Path) -> None:
    """Write an exported program.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
        RunFailed: Torch cannot save the program.
    """
    with _DeferringFile(io.FileIO(path, "wb")) as stream:
        try:
            torch.export.save(program, stream)
        except OSError:
            raise
        except Exception as error:  # for example, for flex_attention
            raise RunFailed(
                f"torch cannot save the converted program: {describe(first_line(error))}",
                hint="leave the program out with --no-program",
            ) from error
        if stream.failure is not None:
            raise stream.failure


class GraphModel(nn.Module):
    """Runs a folded graph, with parameters and buffers under the model's names.

    It takes the model's arguments, in which tensors may be nested. Other arguments are ignored: the graph
    contains their values from the traced batch. The output is a tensor or a tuple of tensors if the model's
    is, and otherwise a dict from the path of each tensor in the model's output.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        values: Mapping[str, torch.Tensor],
        outputs: Mapping[str, int],
        *,
        train: bool,
    ) -> None:
        super().__init__()
        paths = {p.node: p.node if p.slot is Slot.CONSTANT else p.name for p in folded.placeholders}
        # a single attribute, to avoid clashes with names of the model's layers
        self._ampaudit = (as_module(folded.graph), folded.placeholders, outputs, paths)
        parameters: dict[tuple[object, ...], nn.Parameter] = {}
        for place in folded.placeholders:
            if place.slot is Slot.INPUT:
                continue
            value = values[place.node].detach()
            if place.slot is Slot.PARAMETER and value.is_floating_point():
                value = parameters.setdefault(identity(value), nn.Parameter(value, requires_grad=train))
            place_tensor(self, paths[place.node], value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's outputs."""
        code, places, outputs, paths = self._ampaudit
        inputs = iter(tensor_leaves(args, kwargs))
        values = [
            _cast_input(next(inputs), place)
            if place.slot is Slot.INPUT
            else attrgetter(paths[place.node])(self)
            for place in places
        ]
        results = code(*values)
        return as_structure(tuple(outputs), tuple(results[number] for number in outputs.values()))


def _cast_input(tensor: torch.Tensor, place: Placeholder) -> torch.Tensor:
    """Cast an input to the policy's dtype for it."""
    return tensor if place.dtype in (None, tensor.dtype) else tensor.to(place.dtype)


def as_structure(names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Arrange outputs for the caller of a program: a tensor, a tuple, or a dict by path."""
    if names == ("output",):
        return values[0]
    items = [_ITEM.match(name) for name in names]
    if all(items) and [int(m[1]) for m in items if m] == list(range(len(names))):
        return tuple(values)
    keys = (re.sub(r"^output\.?", "", name) for name in names)
    return dict(zip(keys, values, strict=True))


def export_program(
    folded: FoldedGraph,
    values: Mapping[str, torch.Tensor],
    outputs: Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool = False,
    dimensions: Dimensions | None = None,
) -> ExportedProgram:
    """Export a program for inputs of these shapes, with layers and source lines on its nodes.

    ``dimensions`` are the dynamic dimensions of a graph that was traced with them.

    Raises:
        RunFailed: Torch cannot export the converted graph.
    """
    model = GraphModel(folded, values, outputs, train=train)
    model.train(train)
    try:
        with torch.no_grad() if not train else torch.enable_grad():
            program = _exported(model, args, exportable_arguments(kwargs), dimensions)
    except AuditError:
        raise
    except Exception as error:
        raise RunFailed(
            f"the converted graph could not be exported: {first_line(error)}",
            hint="run again with --debug, or leave the program out with --no-program",
        ) from error
    for node in list(program.graph.nodes):
        # drop torch's checks of dtypes before conversions, since another policy may change the dtype
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    for ours, theirs in same_nodes(folded.graph, program.graph):
        theirs.meta |= {key: ours.meta[key] for key in ("nn_module_stack", "stack_trace") if key in ours.meta}
    # frames of torch and ampaudit would name folders of this machine and lines of these versions
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if trace := model_frames(node.meta.pop("stack_trace", None) or ""):
                node.meta["stack_trace"] = trace
    return program


def _exported(
    model: GraphModel, args: tuple[Any, ...], kwargs: dict[str, Any], dimensions: Dimensions | None
) -> ExportedProgram:
    if dimensions is None:
        return export_module(model, args, kwargs)
    names = [f"args_{index}" for index in range(len(args))]
    _set_signature(model, names, list(kwargs))
    remaining = iter(dimensions)
    shapes = pytree.tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, torch.Tensor) else None,
        {**dict(zip(names, args, strict=True)), **kwargs},
    )
    while True:
        try:
            return export_module(model, args, kwargs, shapes=shapes)
        except NarrowedDimensions as narrowed:
            shapes = narrowed.shapes


def _set_signature(model: GraphModel, positional: list[str], keywords: list[str]) -> None:
    """Set an explicit signature for one export, since torch.export counts ``**kwargs`` twice."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return GraphModel.forward(model, *args, **kwargs)

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY) for name in keywords]
    vars(forward)["__signature__"] = Signature(parameters)
    vars(model)["forward"] = forward


def names_of_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """Name the inputs like the arguments of the model's forward; ``None`` if one is nested or unnamed."""
    try:
        bound = signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    tensors = [name for name, value in bound.items() if isinstance(value, torch.Tensor)]
    every = tensor_leaves(args, kwargs)
    in_order = [bound[name] for name in tensors] if len(tensors) == len(every) else []
    return tensors if in_order and all(a is b for a, b in zip(in_order, every, strict=True)) else None


def exportable_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that a program takes: tensors, and constants, which it compares.

    Other objects are left out: their values are fixed in the graph.
    """
    return {
        name: value
        for name, value in kwargs.items()
        if _is_constant(value) or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
    }


def _is_constant(value: Any) -> bool:
    """Return whether torch can save a value; it cannot save enums or named tuples, which are subclasses."""
    if type(value) in _MAPPINGS:
        return set(map(type, value)) <= _CONSTANTS and all(map(_is_constant, value.values()))
    return all(map(_is_constant, value)) if type(value) in _SEQUENCES else type(value) in _CONSTANTS


def same_nodes(old: fx.Graph, new: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Pair the ops of a folded graph with those of its program; empty if their order differs."""
    before = [node for node in old.nodes if node.op == "call_function"]
    after = [node for node in new.nodes if node.op == "call_function"]
    after = after[len(after) - len(before) :]  # inputs that are cast come first
    same = [node.target for node in before] == [node.target for node in after]
    return list(zip(before, after, strict=True)) if same else []


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """The inputs and outputs of one run of a program."""

    tensors: dict[str, torch.Tensor]  # ``input[i]``, ``output[i]``, and the model's outputs as ``fp32[i]``
    outputs: tuple[OutputRecord, ...]  # empty if the program cannot run here
    note: str  # why it cannot


def record_reference(
    program: ExportedProgram,
    model: nn.Module,
    model_call: ExampleCall,
    call: ExampleCall,
    names: Sequence[str],
    seed: int,
) -> ReferenceOutputs:
    """Run the program in its own dtypes, and the model in FP32, on one batch and from one seed.

    ``call`` are the inputs of the program, without the arguments of ``model_call`` that are fixed in it.

    Raises:
        SourceError: The model itself fails.
        RunFailed: Torch cannot turn the program into a module.
    """
    inputs = [t.detach().cpu().contiguous() for t in tensor_leaves(*call)]
    tensors = {f"input[{i}]": t.clone() for i, t in enumerate(inputs)}
    # including caches, which the program does not return
    with calling_user_code("the model"):
        every = dict(flatten_outputs(call_unchanged(model, *model_call, seed=seed), once=False))
    exact = [every[name] for name in names]
    tensors |= {f"fp32[{i}]": t.clone().contiguous() for i, t in enumerate(exact)}
    try:
        module = program.module()
    except Exception as error:  # for example, for layers named class, graph or meta
        raise RunFailed(
            f"torch cannot run the exported program: {first_line(error)}",
            hint="rename the layer that it names, or leave out the program: --no-program",
        ) from error
    results = run_program(module, call, seed)
    if isinstance(results, str):
        return ReferenceOutputs(tensors, (), results)
    tensors |= {f"output[{i}]": t.clone().contiguous() for i, t in enumerate(results)}
    outputs = tuple(
        OutputRecord(name, dtype_name(ours.dtype), digest_of_tensors([ours]), *compare_output(ours, ref))
        for name, ours, ref in zip(names, results, exact, strict=True)
    )
    return ReferenceOutputs(tensors, outputs, "")


def run_program(program: nn.Module, call: ExampleCall, seed: int) -> list[torch.Tensor] | str:
    """Return a program's outputs on the CPU as a flat list, or the reason why it failed."""
    try:
        return flat_outputs(call_unchanged(program, *call, seed=seed))
    except (RuntimeError, NotImplementedError) as error:
        return f"this machine's CPU cannot run the program in its dtypes: {first_line(error)}"


def flat_outputs(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output in order, detached and on the CPU."""
    leaves = tensor_leaves((output,), {})
    return [tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in leaves]


def compare_output(ours: torch.Tensor, reference: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest absolute error, and the SQNR in dB.

    The error is ``None`` if it is not finite, and the SQNR is if the output is exact or the error is not
    finite. Both are if the shapes differ. The SQNR of integers is their ``share_db``, as in a scan; a complex
    number counts as two floats.
    """
    ours, reference = components(ours.detach()), components(reference.detach())
    if ours.shape != reference.shape:
        return None, None
    if not ours.numel():
        return 0.0, None
    if not ours.is_floating_point():
        largest = float((ours.double() - reference.double()).abs().amax())
        db = share_db(float((ours != reference).double().mean()))
        return largest, None if db is None else round(db, 2)
    wide = torch.float64 if torch.float64 in (ours.dtype, reference.dtype) else torch.float32
    error = ours.to(wide) - reference.to(wide)
    if not error.isfinite().all():  # where both are infinite, or NaN, they agree
        same = (ours == reference) | (ours.isnan() & reference.isnan())
        error, reference = error.masked_fill(same, 0.0), reference[reference.isfinite()]
    largest = float(torch.linalg.vector_norm(error, math.inf))
    if not math.isfinite(largest):
        return None, None
    noise, signal = (
        float(torch.linalg.vector_norm(t.to(wide), dtype=torch.float64)) for t in (error, reference)
    )
    db = signal_to_noise_db(signal**2, noise**2)
    return largest, None if db is None else round(db, 2)


def digest_of_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        whole = tensor.detach().cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # a tensor of one element may have any stride
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
