"""Renders a verification for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_bytes
from ampaudit.report.verification import Verification

__all__ = ["render_verification"]

_SHOWN = 20


def render_verification(found: Verification, *, verbose: bool = False) -> RenderableType:
    """The verdict, the problems, and what was checked."""
    count = len(found.problems)
    if count:
        what = f"{count} problem{'s' if count > 1 else ''} in {escape_control(found.directory)}"
        head = Text.assemble(("FAIL  ", "bold red"), what)
    else:
        head = Text.assemble(
            ("PASS  ", "bold green"), f"{escape_control(found.directory)} is what was written"
        )
    parts: list[RenderableType] = [head, Text()]
    shown = found.problems if verbose else found.problems[:_SHOWN]
    parts += [
        Text.assemble((f"  {p.kind:<10}", "bold"), f"{escape_control(p.where)}: {escape_control(p.what)}")
        for p in shown
    ]
    if len(shown) < count:
        parts.append(Text(f"  and {count - len(shown)} more; -v shows them", "dim"))
    if count:
        parts.append(Text())
    masters = f", {found.masters} of them rounded from the masters kept" if found.masters else ""
    parts.append(
        Text(f"checked  {found.files} files, {format_bytes(found.bytes)}; {found.tensors} tensors{masters}")
    )
    parts += [Text(f"run      {escape_control(line)}") for line in found.outputs]
    return Group(*parts)
