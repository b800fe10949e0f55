"""Checks an ONNX file in a process of its own: structure, types, and that a runtime takes it.

Nothing here loads torch, so that the process starts quickly while the file is run elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
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
def checking(path: Path, *, runtime: bool) -> Iterator[None]:
    """Check a file while the context is active, and wait for the result at its end.

    Args:
        path: of the file.
        runtime: whether ONNX Runtime must take it; its CPU provider has no bfloat16 kernels.

    Raises:
        RunFailed: the file is not valid, or ONNX Runtime refuses it.
    """
    target = "ampaudit.export.onnx.check:check_in_sandbox"
    imports = ("onnx", "onnxruntime") if runtime else ("onnx",)
    with _as_the_standard_knows_it(path.resolve()) as checked:
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
def _as_the_standard_knows_it(path: Path) -> Iterator[Path]:
    """Yield a file without operators that are in the standard's domain and not in the standard.

    Those of ONNX Runtime, such as SimplifiedLayerNormalization, are moved to its own domain in a copy.
    """
    import onnx
    import onnx_ir as ir

    from ampaudit.export.onnx.types import schema_of
    from ampaudit.source.onnx.names import STANDARD

    model = ir.load(path)
    versions = model.opset_imports
    unknown = [
        node
        for node in model.graph.all_nodes()
        if node.domain in STANDARD and schema_of("", node.op_type, versions.get("", 1)) is None
    ]
    if not unknown:
        yield path
        return
    for node in unknown:
        node.domain = _RUNTIME
    versions.setdefault(_RUNTIME, 1)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, suffix=".onnx"
    ) as copy:  # beside the files of its weights
        onnx.save(ir.to_proto(model), copy.name)
        yield Path(copy.name)


def open_session(path: Path) -> Any:
    """Open a file with ONNX Runtime, which checks types, names and operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
