"""Checks an ONNX file in a process of its own: structure, types, and that a runtime takes it.

Nothing here loads torch, so that the process starts quickly while the file is run elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampaudit.core.errors import CouldNotAudit, RunFailed, first_line
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.source.onnx.names import STANDARD
from ampaudit.source.onnx.wire import LARGE, OWN_FILE, write_with_values

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "ONNX_FLOATS",
    "casts_in",
    "check_in_sandbox",
    "checking",
    "open_session",
    "run_onnx",
    "write_model",
]

_ONE_FILE = 1 << 30  # bytes: from there on, weights are in a file of their own
ONNX_FLOATS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
_SECONDS = 3600.0
_REPORT = "report it with the model"
_RUNTIME = "com.microsoft"


@contextmanager
def checking(path: Path, *, runtime: bool, strangers: Collection[str] = ()) -> Iterator[None]:
    """Check a file while the context is active, and wait for the result at its end.

    Args:
        path: of the file.
        runtime: whether ONNX Runtime must take it; its CPU provider has no bfloat16 kernels.
        strangers: operators in the standard's domain that are not in the standard, and that a runtime knows.

    Raises:
        RunFailed: the file is not valid, or ONNX Runtime refuses it.
    """
    target = "ampaudit.export.onnx.check:check_in_sandbox"
    imports = ("onnx", "onnxruntime") if runtime else ("onnx",)
    with _as_the_standard_knows_it(path.resolve(), strangers) as checked:
        request = {"path": str(path.resolve()), "checked": str(checked), "runtime": runtime}
        with Sandbox(target, request, SandboxLimits(_SECONDS), imports=imports) as sandbox:
            yield
            fault = sandbox.answer("could not be checked", CouldNotAudit, _REPORT)
    if fault:
        raise RunFailed(f"{path.name} {fault}", hint=_REPORT)


def check_in_sandbox(request: dict[str, Any]) -> Callable[[], str]:
    """Return a function that returns what is wrong with the file, or nothing."""
    import onnx

    def check() -> str:
        path = Path(request["path"])
        try:  # in full: structure, order of nodes, and inferred types against those that it states
            onnx.checker.check_model(request["checked"], full_check=True)
        except Exception as error:  # several kinds, which share no base
            return f"is not valid: {first_line(error)}"
        try:
            if request["runtime"]:
                open_session(path)
        except Exception as error:
            return f"is refused by ONNX Runtime: {first_line(error)}"
        return ""

    return check


@contextmanager
def _as_the_standard_knows_it(path: Path, strangers: Collection[str]) -> Iterator[Path]:
    """Yield a file in which operators of ONNX Runtime are in its own domain: a copy, if there are any."""
    if not strangers:
        yield path
        return
    import onnx
    import onnx_ir as ir

    from ampaudit.source.onnx.names import STANDARD

    model = ir.load(path)
    for node in model.graph.all_nodes():
        if node.domain in STANDARD and node.op_type in strangers:
            node.domain = _RUNTIME
    model.opset_imports.setdefault(_RUNTIME, 1)
    copy = path.with_name(f"{path.stem}.checked.onnx")  # beside the files of its weights
    onnx.save(ir.to_proto(model), copy)
    try:
        yield copy
    finally:
        copy.unlink()


def open_session(path: Path) -> Any:
    """Open a file with ONNX Runtime, which checks types, names and operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def write_model(model: ir.Model, path: Path) -> None:
    """Write a model in topological order, weight by weight; more than a gigabyte goes to a file beside it."""
    import onnx_ir as ir
    from onnx_ir.passes.common import TopologicalSortPass

    TopologicalSortPass()(model)
    large: dict[str, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and value.const_value.nbytes > LARGE:
            large[name] = value.const_value
    if sum(tensor.nbytes for tensor in large.values()) > _ONE_FILE:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        _save(model, path, large)


def _save(model: ir.Model, path: Path, large: Mapping[str, ir.TensorProtocol]) -> None:
    """Write one file without holding more than one large tensor in memory."""
    import onnx_ir as ir

    places = model.graph.initializers
    try:
        for number, (name, tensor) in enumerate(large.items()):
            shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]
            places[name].const_value = ir.ExternalTensor(
                OWN_FILE, number, tensor.nbytes, tensor.dtype, shape=shape, name=name
            )
        stripped = ir.to_proto(model).SerializeToString()
    finally:
        for name, tensor in large.items():
            places[name].const_value = tensor
    with path.open("wb") as stream:
        write_with_values(stripped, stream, [tensor.tobytes for tensor in large.values()])


def casts_in(model: ir.Model) -> Counter[str]:
    """Count casts between float formats by the format that they cast to."""
    import onnx_ir as ir

    found: Counter[str] = Counter()
    for node in model.graph.all_nodes():
        if node.op_type == "Cast" and node.domain in STANDARD and node.inputs[0] is not None:
            given, to = node.inputs[0].dtype, ir.DataType(node.attributes["to"].value)
            if to.name in ONNX_FLOATS and given is not None and given.name in ONNX_FLOATS:
                found[ONNX_FLOATS[to.name]] += 1
    return found


def run_onnx(path: Path, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a file with ONNX Runtime on the CPU, without its optimizations."""
    session: Any = open_session(path)
    given = zip(session.get_inputs(), inputs, strict=True)
    feeds = {place.name: tensor.detach().cpu().numpy() for place, tensor in given}
    return tuple(torch.from_numpy(found) for found in session.run(None, feeds))
