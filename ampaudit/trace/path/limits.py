"""Says what a graph of one path is not good for."""

from __future__ import annotations

from ampaudit.core.errors import TraceFailed
from ampaudit.core.untrusted import describe
from ampaudit.trace.graph import TracedModel

__all__ = ["refuse_path"]


def refuse_path(traced: TracedModel, what: str) -> None:
    """Raise if a graph holds for one path through the model's code, where one for all inputs is needed.

    Raises:
        TraceFailed: the message names the first line that decides on values.
    """
    if traced.path is None:
        return
    line = next((read.source for read in traced.path if read.source is not None), None)
    where = f"{line.file}:{line.line}: " if line is not None else ""
    code = f" at '{describe(line.code)}'" if line is not None and line.code else ""
    raise TraceFailed(
        f"{where}the code depends on values{code}, and {what} needs a graph for all inputs",
        hint="use torch.where or torch.cond there; ampaudit scan audits the path that given inputs take",
    )
