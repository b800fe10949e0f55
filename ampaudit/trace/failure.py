"""Turns errors of torch.export into one line with the cause, the source line and a remedy."""

from __future__ import annotations

import traceback
from itertools import dropwhile
from types import TracebackType

from ampaudit.core.errors import TraceFailed, first_line
from ampaudit.core.sites import SourceLine
from ampaudit.core.text import forward_slashes
from ampaudit.policy.load import PLAIN_FP32
from ampaudit.trace.stack import is_tool_file

__all__ = ["failing_line", "plain_reason", "trace_failure"]

# (words in the error's type or text, our message, the remedy); the first match decides
_REMEDIES: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (
        ("data-dependent", "datadependent", "guardondatadependent", "boolean value of tensor"),
        "Python control flow depends on the values of a tensor",
        "use torch.where or torch.cond there, or wrap the branch in 'if not torch.compiler.is_exporting():'",
    ),
    (
        (".numpy()", "numpy", "can't convert"),
        None,
        "values leave torch here (numpy, .tolist()); compute with tensors, or precompute it in __init__",
    ),
    (
        ("two different devices", "fake device", "same device", "cuda devices"),
        None,
        "keep every tensor on the input's device: pass device=x.device where tensors are made",
    ),
    (
        ("shape", "size", "broadcast", "mat1 and mat2"),
        None,
        "the inputs do not fit the model; see example_inputs()",
    ),
)
# errors of kernels whose inputs a policy cast only in part
_MIXED = ("same dtype", "expected scalar type", "have the same type", "same data type", "match weight dtype")
_FALLBACK = (
    "simplify that line so that torch.export(strict=False) accepts it; --debug shows torch's own report"
)


def trace_failure(error: BaseException, model: str, policy: str) -> TraceFailed:
    """Describe an error of torch.export, with the model's line at which tracing stopped."""
    place = failing_line(error.__traceback__)
    where = f"{place.file}:{place.line}: " if place else f"{model}: "
    code = f" at '{place.code}'" if place and place.code else ""
    summary = f"{type(error).__name__}: {first_line(error)}"
    plainer, hint = _known(error)
    text = str(error).lower()
    if policy != PLAIN_FP32 and any(words in text for words in _MIXED):
        hint = (
            f"policy {policy} leaves this op's inputs in different dtypes; extend the policy with a rule "
            "for the op that says 'cast: widest' or 'cast: lower'"
        )
    return TraceFailed(f"{where}cannot be exported{code}: {plainer or summary}", hint=hint)


def plain_reason(error: BaseException) -> str:
    """Describe why code cannot be traced, in our words or torch's."""
    return _known(error)[0] or first_line(error)


def _known(error: BaseException) -> tuple[str | None, str]:
    """Return our message and remedy for a known error, if there is one."""
    text = f"{type(error).__name__} {error}".lower()
    known = next((entry for entry in _REMEDIES if any(word in text for word in entry[0])), None)
    return (known[1], known[2]) if known is not None else (None, _FALLBACK)


def failing_line(trace: TracebackType | None) -> SourceLine | None:
    """Find the innermost line of the model's code in a traceback."""
    below_us = dropwhile(lambda f: "ampaudit" not in f.filename, traceback.extract_tb(trace))
    frames = [f for f in below_us if not is_tool_file(f.filename) and not f.filename.startswith("<")]
    if not frames:
        return None
    last = frames[-1]
    return SourceLine(forward_slashes(last.filename), last.lineno or 0, last.line or "")
