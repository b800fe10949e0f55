"""Writes the exported program as ONNX with the casts of the plan, checks it, and compares it with torch."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from torch import fx
from torch.export import ExportedProgram

from ampaudit.core.errors import AuditError, RunFailed, first_line
from ampaudit.core.text import escape_control, format_bound, format_number
from ampaudit.export.fold import FoldedGraph
from ampaudit.export.onnx.check import checking
from ampaudit.export.onnx.types import SlotType, node_types
from ampaudit.export.onnx.write import casts_in, run_onnx, write_model
from ampaudit.export.program import ReferenceOutputs, compare_output, same_nodes
from ampaudit.report.model import Report, SiteReport
from ampaudit.source.onnx.names import NodeNames
from ampaudit.trace.capture import quiet
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.opnames import base_name, converts, named_arguments
from ampaudit.trace.values import dtype_name, tensors_in

PREFIX = "ampaudit."
_KEY = "ampaudit_node"
_NODE = re.compile(r"^%(?P<name>[\w.]+)\s*:")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MIN_DB = 25.0  # a few roundings of bfloat16 are above it, a norm without its eps or cast is below
_BFLOAT16_OPSET = 22  # the first whose convolutions, pooling, resizing and norms support the format
_SPLITS = frozenset({"split", "split_with_sizes", "unsafe_split", "chunk", "unbind", "tensor_split"})
_SQUEEZES = frozenset({"squeeze", "squeeze_"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class ExportedOnnx:
    """A written ``model.onnx``."""

    casts: int  # between float formats in the file
    outputs: tuple[torch.Tensor, ...]  # of ONNX Runtime without optimizations; empty if it cannot run it
    note: str  # why it cannot run the file; empty if it can

    def max_error(self, reference: ReferenceOutputs) -> float | None:
        """Return the largest difference from torch's outputs; ``None`` if torch or ONNX Runtime has none.

        Raises:
            RunFailed: They differ so much that the file computes something else.
        """
        if not self.outputs or not reference.outputs:
            return None
        expected = [
            (record.name, reference.tensors[f"output[{index}]"])
            for index, record in enumerate(reference.outputs)
        ]
        return max_difference(self.outputs, expected)


def max_difference(outputs: Sequence[torch.Tensor], expected: Sequence[tuple[str, torch.Tensor]]) -> float:
    """Return the largest difference of ONNX Runtime's outputs from torch's.

    Raises:
        RunFailed: They differ so much that the file computes something else.
    """
    largest = 0.0
    for ours, (name, theirs) in zip(outputs, expected, strict=True):
        if not theirs.isfinite().all():
            continue  # the audit has reported it, and the user wants the file anyway
        error, accuracy = compare_output(ours, theirs)
        if error is None or (accuracy is not None and accuracy < _MIN_DB):
            what = "is not finite" if error is None else f"agrees to {accuracy:.0f} dB only"
            raise RunFailed(
                f"model.onnx computes something else than the program: {name} {what}",
                hint="leave out --onnx, and report it: torch's exporter, or ours, is wrong about an op",
            )
        largest = max(largest, error)
    return largest


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: Sequence[torch.Tensor],
    *,
    input_names: list[str] | None,
    output_names: Sequence[str],
    metadata: OnnxMetadata,
    axis_names: Sequence[Mapping[int, str]],
) -> ExportedOnnx:
    """Export a program to ONNX, check the file, count its casts, and run it.

    The exporter's optimizer is off: it drops ``x + eps`` for small eps, and may move casts. ONNX Runtime's
    CPU kernels compute many 16-bit ops in FP32, so its result validates the computation, not the range.

    Args:
        program: Program of the converted graph, with its weights.
        path: File to write.
        inputs: Tensors of the batch, in order.
        input_names: Names of the inputs; by default those of torch.
        output_names: Paths in the model's output.
        metadata: Metadata of the program's nodes and of the model.
        axis_names: Names of the variable axes of each input.

    Raises:
        RunFailed: Torch cannot export it, onnx rejects it, or casts are missing.
    """
    labels = [name.removeprefix("output").lstrip(".") or "output" for name in output_names]
    try:
        metadata.mark_nodes(program)
        exported = _export(program, input_names)
        _name_outputs(exported.model, labels)
        NameFixPass()(exported.model)  # an output may be called like an input or a value
        _name_axes(exported, axis_names)
        _inline_known_branches(exported.model)
        _widen_bfloat16(exported.model)
        metadata.annotate(exported)
        write_model(exported.model, path)
        with checking(path, runtime=False):
            pass
    except AuditError:
        raise
    except Exception as error:
        raise RunFailed(
            f"the converted program could not be exported to ONNX: {_reason(error)}",
            hint="leave out --onnx; the other files do not need it",
        ) from error
    casts = casts_in(exported.model)
    missing = {to: count for to, count in _planned_casts(program).items() if casts[to] < count}
    if missing:
        raise RunFailed(f"the ONNX file lacks casts of the plan: {missing}", hint="leave out --onnx")
    try:
        outputs, note = run_onnx(path, inputs), ""
    except Exception as error:
        outputs, note = (), f"ONNX Runtime cannot run it here: {first_line(error)}"
    return ExportedOnnx(sum(casts.values()), outputs, note)


def _reason(error: Exception) -> str:
    """Return the root cause, without the exporter's advice about reporting bugs."""
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return _COLOR.sub("", first_line(inner))


def _export(program: ExportedProgram, input_names: list[str] | None) -> Any:
    with quiet():  # the exporter logs which ops of torchvision are missing
        return torch.onnx.export(
            _expressible(program),
            dynamo=True,
            optimize=False,
            verbose=False,
            input_names=input_names,
            opset_version=_BFLOAT16_OPSET if _has_bfloat16(program) else None,
        )


def _expressible(program: ExportedProgram) -> ExportedProgram:
    """Return a copy of a program without the ops that the exporter writes as invalid or different ONNX.

    The exporter does not promote tensors of different dtypes in a list, so they are cast here. It writes the
    results of a split as a sequence, and ONNX has no sequences of bfloat16, so slices replace the split. It
    normalizes batches with the running statistics even in training, so they get those of the batch. ONNX
    squeezes only dimensions of size 1; elsewhere torch returns the tensor as it is.
    """
    copied = copy.copy(program)
    graph = copy.deepcopy(program.graph)
    for node in list(graph.nodes):
        op, value = overload_of(node.target) if node.op == "call_function" else None, node.meta.get("val")
        if op is None:
            continue
        with graph.inserting_before(node):
            if isinstance(value, torch.Tensor):
                node.args = tuple(_promoted(graph, item, value.dtype) for item in node.args)
                if base_name(op) == "batch_norm":
                    _take_statistics(graph, node)
                elif base_name(op) in _SQUEEZES and value.dim() == node.args[0].meta["val"].dim():
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)  # which eliminate_dead_code keeps, if it is in place
            elif base_name(op) in _SPLITS and value is not None:
                axis = named_arguments(op, node.args, node.kwargs).get("dim", 0)
                _take_slices(graph, node, axis, value)
    graph.eliminate_dead_code()
    copied._graph_module = fx.GraphModule(program.graph_module, graph)
    return copied


def _promoted(graph: fx.Graph, joined: Any, dtype: torch.dtype) -> Any:
    """Cast a list of tensors with different dtypes to one dtype; return other arguments unchanged."""
    if not isinstance(joined, list | tuple) or not all(isinstance(item, fx.Node) for item in joined):
        return joined
    dtypes = [item.meta["val"].dtype for item in joined]
    if len(set(dtypes)) < 2 or not any(each.is_floating_point for each in dtypes):
        return joined
    return [_cast(graph, item, dtype) for item in joined]


def _take_slices(graph: fx.Graph, node: fx.Node, axis: int, parts: Sequence[torch.Tensor]) -> None:
    """Replace the results of a split by slices of the tensor, if their sizes are known."""
    if not all(isinstance(size, int) for part in parts for size in part.shape):
        return
    whole, start = node.all_input_nodes[0], 0
    for index, part in enumerate(parts):
        if part.dim() < whole.meta["val"].dim():
            piece = _insert_call(graph, whole, torch.ops.aten.select.int, axis, index)
        else:
            piece = _insert_call(
                graph, whole, torch.ops.aten.slice.Tensor, axis, start, start + part.shape[axis]
            )
            start += part.shape[axis]
        for item in [user for user in node.users if user.args[1] == index]:
            piece.meta["custom"] = item.meta.get("custom", {})
            item.replace_all_uses_with(piece)


def _take_statistics(graph: fx.Graph, node: fx.Node) -> None:
    """Let a batch norm in training read its batch's statistics, in float32, as running ones."""
    x, *affine, training, momentum, eps, cudnn = node.args
    if not training:
        return
    assert isinstance(x, fx.Node)
    axes = [axis for axis in range(x.meta["val"].dim()) if axis != 1]
    wide = _cast(graph, x, torch.float32)
    mean = _insert_call(graph, wide, torch.ops.aten.mean.dim, axes)
    variance = _insert_call(graph, wide, torch.ops.aten.var.correction, axes, correction=0)
    node.args = (x, *affine[:2], mean, variance, False, momentum, eps, cudnn)


def _cast(graph: fx.Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return _insert_call(graph, value, torch.ops.aten._to_copy.default, dtype=dtype)


def _insert_call(graph: fx.Graph, value: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    called = graph.call_function(op, (value, *args), kwargs)
    called.meta["val"] = op(value.meta["val"], *args, **kwargs)
    return called


def _has_bfloat16(program: ExportedProgram) -> bool:
    tensors = (tensor for node in program.graph.nodes for tensor in tensors_in(node.meta.get("val")))
    return any(tensor.dtype is torch.bfloat16 for tensor in tensors)


def _name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Name the outputs; what is an input or another output as well is copied, as it keeps that name."""
    taken = set(model.graph.inputs)
    for index, (value, name) in enumerate(zip(model.graph.outputs, names, strict=True)):
        if value in taken and value.name != name:
            copied = ir.node("Identity", [value])
            model.graph.append(copied)
            copied.outputs[0].shape, copied.outputs[0].type = value.shape, value.type
            value = model.graph.outputs[index] = copied.outputs[0]
        value.name = name
        taken.add(value)


def _name_axes(exported: Any, names: Sequence[Mapping[int, str]]) -> None:
    """Replace the exporter's symbols for the axes of inputs by the user's names, also in outputs."""
    symbols: dict[str, str] = {}
    for value, axes in zip(exported.model.graph.inputs, names, strict=False):
        symbols |= {str(value.shape[axis]): name for axis, name in axes.items()}
    for value in (*exported.model.graph.inputs, *exported.model.graph.outputs):
        for axis, size in enumerate(value.shape or ()):
            if str(size) in symbols:
                value.shape[axis] = symbols[str(size)]


def _inline_known_branches(model: ir.Model) -> None:
    """Replace each ``If`` whose condition is known by its branch.

    The exporter leaves them where it inlines functions, such as that of embedding bags. ONNX Runtime crashes
    when it inlines nested ones itself. Floats are not folded, so that casts stay where the plan puts them.
    """
    from onnxscript.optimizer import fold_constants

    def should_fold(node: ir.Node) -> bool | None:
        constants = [value.const_value for value in node.inputs if value is not None]
        return False if any(each and each.dtype.is_floating_point() for each in constants) else None

    if any(node.op_type == "If" for node in model.graph.all_nodes()):
        fold_constants(model, should_fold=should_fold)


def _widen_bfloat16(model: ir.Model) -> None:
    """Let operators that ONNX does not define for bfloat16, such as TopK and Einsum, compute in float32."""
    wide, low = ir.DataType.FLOAT, ir.DataType.BFLOAT16

    def cast(value: ir.Value, to: ir.DataType) -> ir.Node:
        node = ir.node("Cast", [value], attributes={"to": to.value})
        node.outputs[0].shape, node.outputs[0].type = value.shape, ir.TensorType(to)
        return node

    for node in list(model.graph.all_nodes()):
        if not any(value is not None and value.dtype == low for value in (*node.inputs, *node.outputs)):
            continue
        types = node_types(node, node.version or model.opset_imports.get(node.domain, 1), "bfloat16")
        graph = node.graph
        assert graph is not None
        for index, (value, slot) in enumerate(zip(node.inputs, types.inputs, strict=True)):
            if value is not None and value.type == ir.TensorType(low) and slot is SlotType.FLOAT32:
                widening = cast(value, wide)
                graph.insert_before(node, widening)
                node.replace_input_with(index, widening.outputs[0])
        for value, slot in zip(node.outputs, types.outputs, strict=True):
            if value.type == ir.TensorType(low) and slot is SlotType.FLOAT32:
                uses, narrowing = list(value.uses()), cast(value, low)
                narrowed = narrowing.outputs[0]
                for use in uses:
                    use.node.replace_input_with(use.idx, narrowed)
                graph.outputs[:] = [narrowed if output is value else output for output in graph.outputs]
                narrowed.name, value.name = value.name, f"{value.name}_float32"
                value.type = ir.TensorType(wide)
                graph.insert_after(node, narrowing)


def _planned_casts(program: ExportedProgram) -> Counter[str]:
    """Count conversions between float formats by target format."""
    casts: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function" and converts(node.target):
            to = node.meta["val"].dtype
            source = node.all_input_nodes[0].meta["val"].dtype
            if to in _FLOATS and source in _FLOATS and to != source:
                casts[dtype_name(to)] += 1
    return casts


@dataclass(frozen=True, slots=True)
class OnnxMetadata:
    """Short texts by key, for the nodes of a program by name and for the whole model."""

    nodes: Mapping[str, Mapping[str, str]]
    model: Mapping[str, str]

    def mark_nodes(self, program: ExportedProgram) -> None:
        """Mark nodes that have metadata; marks survive the exporter's decompositions, and names do not."""
        for node in program.graph.nodes:
            if node.name in self.nodes:
                node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: node.name}

    def annotate(self, exported: Any) -> None:
        """Write the metadata into the ONNX export of a program with marked nodes."""
        decomposed = exported.exported_program
        nodes = decomposed.graph.nodes if decomposed is not None else ()
        origins = {node.name: node.meta.get("custom", {}).get(_KEY) for node in nodes}
        for node in exported.model.graph.all_nodes():
            match = _NODE.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
            origin = origins.get(match["name"], "") if match is not None else ""
            if origin in self.nodes:
                node.metadata_props.update(_prefixed(self.nodes[origin]))
        exported.model.metadata_props.update(_prefixed(self.model))


def annotate_graph(model: ir.Model, report: Report, names: NodeNames) -> None:
    """Write a report's entries into the audited graph; each node gets the entry of its first op."""
    first: dict[str, SiteReport] = {}
    for site in report.sites:
        first.setdefault(site.layer, site)
    codes = report.codes_by_site
    for node in model.graph.all_nodes():
        entry = first.get(names.of(node))
        if entry is not None:
            node.metadata_props.update(_prefixed(_about_site(entry, codes[entry.site])))
    model.metadata_props.update(_prefixed(_about_model(report)))


def _prefixed(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{PREFIX}{key}": text for key, text in texts.items()}


def metadata_of(
    report: Report, traced: TracedModel, folded: FoldedGraph, program: ExportedProgram
) -> OnnxMetadata:
    """Collect a report's entries for the model and for the ops of its program."""
    sites = {site.site: site for site in report.sites}
    codes = report.codes_by_site
    nodes: dict[str, dict[str, str]] = {}
    for ours, theirs in same_nodes(folded.graph, program.graph):
        site = traced.site_of_node.get(ours.name)
        if site is not None and site.id in sites:
            nodes[theirs.name] = _about_site(sites[site.id], codes[site.id])
    return OnnxMetadata(nodes, _about_model(report))


def _about_model(report: Report) -> dict[str, str]:
    least = report.least_headroom
    texts = {
        "version": report.tool.version,
        "policy": escape_control(report.run.policy),
        "dtype": report.run.dtype,
        "verdict": report.verdict,
        "batches": str(report.run.batches),
    }
    if least is not None:
        texts["least_headroom"] = f"{least.headroom_bits:.1f} bits at {escape_control(least.site)}"
    return texts


def _about_site(site: SiteReport, codes: list[str]) -> dict[str, str]:
    texts = {
        "site": escape_control(site.site),
        "precision": site.precision,
        "rule": escape_control(site.rule or ""),
        "why": escape_control(site.why),
        "verdict": site.verdict,
        "findings": " ".join(codes),
    }
    forward = site.forward
    if forward is not None:
        texts["peak"] = format_number(forward.peak)
        texts["headroom"] = f"{forward.headroom_bits:.1f} bits" if forward.headroom_bits is not None else ""
        texts["accuracy"] = f"{forward.sqnr_db:.0f} dB" if forward.sqnr_db is not None else "exact"
    if site.bound is not None:
        texts["proved_bound"] = format_bound(site.bound)
    return {key: text for key, text in texts.items() if text}
