"""Checks the structure and types of an ONNX file in a separate process, and that a runtime accepts it.

This module does not load torch, so that the process starts quickly while the file runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ampaudit.core.errors import CouldNotAudit, RunFailed, first_line
from ampaudit.core.sandbox import Sandbox, SandboxLimits

__all__ = ["check_in_sandbox", "checking", "open_session"]

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
