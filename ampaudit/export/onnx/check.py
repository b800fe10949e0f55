"""Checks the structure and types of an ONNX file in a separate process, and that a runtime accepts it.

This module does not load torch, so that the process starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampaudit.core.errors import CouldNotAudit, RunFailed, first_line
from ampaudit.core.sandbox import Sandbox, SandboxLimits

_SECONDS = 3600.0
_REPORT = "report it with the model"
_RUNTIME = "com.microsoft"


@contextmanager
def checking(path: Path, *, runtime: bool, nonstandard: Collection[str] = ()) -> Iterator[None]:
    """Check a file while the context is active, and wait for the result at its end.

    Args:
        path: Path of the file.
        runtime: Whether ONNX Runtime must accept it; its CPU provider has no bfloat16 kernels.
        nonstandard: Operators in the standard domain that only ONNX Runtime defines.

    Raises:
        RunFailed: The file is not valid, or ONNX Runtime rejects it.
    """
    target = "ampaudit.export.onnx.check:check_in_sandbox"
    imports = ("onnx", "onnxruntime") if runtime else ("onnx",)
    with _with_runtime_domain(path.resolve(), nonstandard) as checked:
        request = {"path": str(path.resolve()), "checked": str(checked), "runtime": runtime}
        with Sandbox(target, request, SandboxLimits(_SECONDS), imports=imports) as sandbox:
            yield
            fault = sandbox.answer("could not be checked", CouldNotAudit, _REPORT)
    if fault:
        raise RunFailed(f"{path.name} {fault}", hint=_REPORT)


def check_in_sandbox(request: dict[str, Any]) -> Callable[[], str]:
    """Return the sandbox's job: to describe the fault of a file; empty if it has none."""
    import onnx

    def check() -> str:
        path = Path(request["path"])
        try:  # the full check covers structure, order of nodes, and stated types against inferred ones
            onnx.checker.check_model(request["checked"], full_check=True)
        except Exception as error:  # the classes of onnx's errors share no base
            return f"is not valid: {first_line(error)}"
        try:
            if request["runtime"]:
                open_session(path)
        except Exception as error:
            return f"is rejected by ONNX Runtime: {first_line(error)}"
        return ""

    return check


@contextmanager
def _with_runtime_domain(path: Path, nonstandard: Collection[str]) -> Iterator[Path]:
    """Yield the file, or a copy of it with the nonstandard operators in the domain of ONNX Runtime."""
    if not nonstandard:
        yield path
        return
    import onnx
    import onnx_ir as ir

    model = ir.load(path)
    for node in model.graph.all_nodes():
        if not node.domain and node.op_type in nonstandard:
            node.domain = _RUNTIME
    model.opset_imports.setdefault(_RUNTIME, 1)
    copy = path.with_name(f"{path.stem}.checked.onnx")  # in the directory of its weights
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
