"""The exported program as ONNX, with the casts where the plan put them; checked, and run beside torch."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.export.onnx_notes import Notes, annotate, mark_nodes
from ampaudit.trace.opnames import converts

__all__ = ["OnnxFile", "input_names", "write_onnx"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """What was written.

    Attributes:
        casts: conversions between float formats in the file.
        planned: those in the program.
        outputs: what ONNX Runtime computes from the inputs, without optimizations; empty if it cannot.
        note: why it cannot.
    """

    casts: int
    planned: int
    outputs: tuple[torch.Tensor, ...]
    note: str


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """Names of the model's own parameters for its inputs; ``None`` where one is nested or has no name."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    tensors = [name for name, value in bound.items() if isinstance(value, torch.Tensor)]
    every = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    in_order = [bound[name] for name in tensors] if len(tensors) == len(every) else []
    return tensors if in_order and all(a is b for a, b in zip(in_order, every, strict=True)) else None


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    given: Sequence[str] | None = None,
    notes: Notes | None = None,
    about: Mapping[str, str] | None = None,
) -> OnnxFile:
    """Export, check, count the casts, and run.

    The exporter's optimizer is off: it drops ``x + eps`` for small eps, and may move casts. ONNX
    Runtime's CPU kernels compute many 16-bit ops in FP32, so its result says that the file means the
    same, and nothing about range.

    Args:
        program: of the converted graph, with its weights.
        path: the new file.
        inputs: the tensors of the batch, in order.
        names: of the outputs.
        given: names of the inputs; torch's if there are none.
        notes: on nodes of the program by name, for the metadata of those of the file.
        about: the same for the whole model.

    Raises:
        RunFailed: torch cannot export it, onnx finds it invalid, or casts are missing.
    """
    import onnx

    labels = [name.removeprefix("output").lstrip(".") or "output" for name in names]
    try:
        mark_nodes(program, notes or {})
        exported = _export(program, labels, given)
        annotate(exported, notes or {}, about or {})
        exported.save(path, external_data=_bytes_of(program) > 1 << 30)
        onnx.checker.check_model(str(path))
    except Exception as error:
        raise RunFailed(
            f"the converted program could not be exported to ONNX: {_reason(error)}",
            hint="leave out --onnx; the other files do not need it",
        ) from error
    found, planned = _casts_in(onnx.load(path, load_external_data=False)), _planned_casts(program)
    lost = {to: count for to, count in planned.items() if found[to] < count}
    if lost:
        raise RunFailed(f"the ONNX file lacks casts of the plan: {lost}", hint="leave out --onnx")
    try:
        outputs, note = _run(path, inputs), ""
    except Exception as error:
        outputs, note = (), f"ONNX Runtime cannot run it here: {first_line(error)}"
    return OnnxFile(sum(found.values()), sum(planned.values()), outputs, note)


def _reason(error: Exception) -> str:
    """What the exporter stumbled over: its own message wraps that in advice about reporting bugs."""
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return _COLOUR.sub("", first_line(inner))


def _export(program: ExportedProgram, names: Sequence[str], given: Sequence[str] | None) -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # which of torchvision's ops are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=list(given) if given else None,
                output_names=list(names),
            )
    finally:
        logging.disable(before)


def _bytes_of(program: ExportedProgram) -> int:
    tensors = [*program.state_dict.values(), *program.constants.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _planned_casts(program: ExportedProgram) -> Counter[str]:
    """Conversions between float formats, by the format that they convert to."""
    found: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function" and converts(node.target):
            to = node.meta["val"].dtype
            given = node.all_input_nodes[0].meta["val"].dtype
            if to in _FLOATS and given in _FLOATS and to != given:
                found[str(to).removeprefix("torch.")] += 1
    return found


def _casts_in(model: Any) -> Counter[str]:
    import onnx

    kinds = {
        onnx.TensorProto.FLOAT: "float32",
        onnx.TensorProto.FLOAT16: "float16",
        onnx.TensorProto.BFLOAT16: "bfloat16",
    }
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    targets = [attribute.i for node in casts for attribute in node.attribute if attribute.name == "to"]
    return Counter(kinds[to] for to in targets if to in kinds)


def _run(path: Path, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = zip(session.get_inputs(), inputs, strict=True)
    feeds = {place.name: tensor.detach().cpu().numpy() for place, tensor in given}
    return tuple(torch.from_numpy(found) for found in session.run(None, feeds))
