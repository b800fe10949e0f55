"""Renders a verification: the verdict, the problems, and the checks."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.core.text import format_bytes, plural
from ampaudit.render.blocks import Line, Section, line
from ampaudit.render.view import Row, View
from ampaudit.report.conversion import Verification

_SHOWN = 20


class VerificationView(View[Verification]):
    """A row per problem."""

    about = "directory"
    columns = ("kind", "where", "what")

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the verdict, the problems, and the checks."""
        verification, count = self.document, len(self.document.problems)
        if count:
            head = line(("FAIL  ", "bold red"), f"{plural(count, 'problem')} in {verification.directory}")
        else:
            head = line(("PASS  ", "bold green"), f"{verification.directory} is unchanged")
        yield Section((head,))
        if count:
            yield Section(tuple(self._problems(count if verbosity > 0 else _SHOWN)))
        masters = f", {verification.masters} of them with masters" if verification.masters else ""
        size = format_bytes(verification.bytes)
        files, tensors = plural(verification.files, "file"), plural(verification.tensors, "tensor")
        checked = f"checked  {files}, {size}; {tensors}{masters}"
        ran = (line(f"run      {output}") for output in verification.outputs)
        yield Section((line(checked), *ran))

    def _problems(self, limit: int) -> Iterator[Line]:
        problems = self.document.problems
        for problem in problems[:limit]:
            text = f"{problem.where}: {problem.what}"
            yield line((f"  {problem.kind:<10}", "bold"), text)
        if len(problems) > limit:
            yield line(f"  and {len(problems) - limit} more; -v shows them", style="dim")

    def rows(self) -> Iterator[Row]:
        """Return a row per problem."""
        for problem in self.document.problems:
            yield {name: getattr(problem, name) for name in self.columns}
