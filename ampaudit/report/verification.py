"""What ``ampaudit verify`` found, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.archive.problem import Problem
from ampaudit.words import plain, size_of

__all__ = ["Verification", "render_verification"]

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Verification:
    """A verified directory: how much there was to check, what is wrong, what the program computed."""

    directory: str
    files: int
    bytes: int
    tensors: int
    masters: int
    problems: tuple[Problem, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 otherwise."""
        return 1 if self.problems else 0


def render_verification(found: Verification, *, verbose: bool = False) -> RenderableType:
    """The verdict, the problems, and what was checked."""
    count = len(found.problems)
    if count:
        what = f"{count} problem{'s' if count > 1 else ''} in {plain(found.directory)}"
        head = Text.assemble(("FAIL  ", "bold red"), what)
    else:
        head = Text.assemble(("PASS  ", "bold green"), f"{plain(found.directory)} is what was written")
    parts: list[RenderableType] = [head, Text()]
    shown = found.problems if verbose else found.problems[:_SHOWN]
    parts += [Text.assemble((f"  {p.kind:<10}", "bold"), f"{plain(p.where)}: {plain(p.what)}") for p in shown]
    if len(shown) < count:
        parts.append(Text(f"  and {count - len(shown)} more; -v shows them", "dim"))
    if count:
        parts.append(Text())
    masters = f", {found.masters} of them rounded from the masters kept" if found.masters else ""
    parts.append(
        Text(f"checked  {found.files} files, {size_of(found.bytes)}; {found.tensors} tensors{masters}")
    )
    parts += [Text(f"run      {plain(line)}") for line in found.outputs]
    return Group(*parts)
