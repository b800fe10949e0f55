"""Files as Python text: scripts as they are, notebooks cell by cell, the code blocks of Markdown."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from ampaudit.lint.source_text import Unreadable

__all__ = ["Unit", "pieces_of", "rebuilt", "without_cell"]

_MARK = "# ampaudit cell "
_MAGIC = "pass  # ampaudit magic "
_SHELL = re.compile(r"[\w.]+\?+$|[\w, ]+= *[!%]")  # help, and what a command is assigned to
_CELLS_OF_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read in one go.

    Attributes:
        text: Python.
        start: line of the file, from 1, of the text's first line; for a notebook 0.
        indent: columns that were cut off.
        marks: for a notebook: the line in ``text`` of each code cell's mark, with the cell's number from 1.
        lenient: whether it is left out without a word if it does not parse, as examples in prose are.
    """

    text: str
    start: int = 1
    indent: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    lenient: bool = False

    def place(self, line: int) -> tuple[int, int | None]:
        """Line and cell that a line of the text is shown as; both from 1."""
        if not self.marks:
            return line + self.start - 1, None
        mark, cell = max((m for m in self.marks if m[0] < line), default=self.marks[0])
        return max(line - mark, 1), cell

    def changed(self, text: str) -> Unit:
        """The same unit with another text; a notebook's cells may begin at other lines now."""
        cells = iter(self.marks)
        lines = enumerate(text.split("\n"), 1) if self.marks else ()
        marks = tuple((number, next(cells)[1]) for number, line in lines if line.startswith(_MARK))
        return replace(self, text=text, marks=marks)


def pieces_of(text: str, suffix: str) -> list[Unit]:
    """The Python in a file.

    Args:
        text: of the file.
        suffix: of its name: ``.ipynb``, ``.md``; all others are Python.

    Raises:
        Unreadable: not a notebook.
    """
    if suffix == ".ipynb":
        return _of_notebook(text)
    if suffix in (".md", ".markdown"):
        return _of_markdown(text)
    return [Unit(text)]


def rebuilt(text: str, suffix: str, changed: list[tuple[Unit, str]]) -> str:
    """The file with the new text of its units; everything else as it was."""
    if suffix == ".ipynb":
        return _notebook_with(text, changed[0][1]) if changed else text
    if suffix not in (".md", ".markdown"):
        return changed[0][1] if changed else text
    lines = text.splitlines(keepends=True)
    for unit, new in sorted(changed, key=lambda pair: -pair[0].start):
        count = len(unit.text.splitlines())
        fresh = [f"{' ' * unit.indent}{line}" if line.strip() else line for line in new.splitlines(True)]
        lines[unit.start - 1 : unit.start - 1 + count] = fresh
    return "".join(lines)


def _of_markdown(text: str) -> list[Unit]:
    from markdown_it import MarkdownIt

    units = []
    lines = text.splitlines()
    for token in MarkdownIt().parse(text):
        language = (token.info.strip().split() or [""])[0].strip("{}.").partition("{")[0].lower()
        if token.type != "fence" or token.map is None or language not in ("python", "py", "python3"):
            continue
        start = token.map[0] + 2
        first = next((line for line in token.content.splitlines() if line.strip()), "")
        shown = next((line for line in lines[start - 1 : token.map[1]] if line.strip()), "")
        indent = max(shown.find(first), 0) if first else 0
        units.append(Unit(token.content, start, indent, lenient=True))
    return units


def _cells(text: str) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
        code = [(i, cell) for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
        assert all(isinstance(_source(cell), str) for _, cell in code)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise Unreadable("not a notebook of version 4") from error
    return notebook, code


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else source


def _language(notebook: dict[str, Any]) -> str:
    about = notebook.get("metadata", {})
    info = about.get("language_info", {}) if isinstance(about, dict) else {}
    return str(info.get("name", "python")).lower() if isinstance(info, dict) else "python"


def _of_notebook(text: str) -> list[Unit]:
    notebook, cells = _cells(text)
    if _language(notebook) not in ("python", "ipython", "python3"):
        return []
    lines: list[str] = []
    marks: list[tuple[int, int]] = []
    for number, cell in cells:
        lines.append(f"{_MARK}{number}")
        marks.append((len(lines), number))
        source = _source(cell)
        if source.startswith("%%") and not source.startswith(_CELLS_OF_PYTHON):
            lines += ["#" for _ in source.split("\n")]
        else:
            lines += [_without_magic(line, i) for i, line in enumerate(source.split("\n"))]
    return [Unit("\n".join(lines) + "\n", 0, marks=tuple(marks))]


def _without_magic(line: str, number: int) -> str:
    stripped = line.lstrip()
    if stripped[:1] in ("%", "!", "?") or _SHELL.match(stripped):
        return f"{line[: len(line) - len(stripped)]}{_MAGIC}{number}"
    return line


def _notebook_with(text: str, changed: str) -> str:
    notebook, cells = _cells(text)
    parts = re.split(rf"^{_MARK}(\d+)\n", changed, flags=re.MULTILINE)
    fresh = {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}
    for number, cell in cells:
        old = _source(cell)
        if old.startswith("%%") and not old.startswith(_CELLS_OF_PYTHON):
            continue
        new = _with_magic(fresh[number].removesuffix("\n"), old.split("\n"))
        if new != old:
            cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
    ending = "\n" if text.endswith("\n") else ""
    return json.dumps(notebook, indent=_indent(text), ensure_ascii=False) + ending


def _indent(text: str) -> int | None:
    match = re.match(r"\{\r?\n( +)", text)
    return len(match[1]) if match else None


def _with_magic(body: str, old: list[str]) -> str:
    def restored(match: re.Match[str]) -> str:
        return old[int(match[1])].lstrip()

    return re.sub(rf"{_MAGIC}(\d+)", restored, body)


def without_cell(unit: Unit, cell: int) -> Unit:
    """A notebook's text with one cell that does not parse taken out, line for line."""
    lines = unit.text.split("\n")
    starts = {number: mark for mark, number in unit.marks}
    following = [mark for mark, _ in unit.marks if mark > starts[cell]]
    end = (following[0] if following else len(lines)) - 1
    for index in range(starts[cell], end):
        lines[index] = f"{_MAGIC}{index - starts[cell]}"
    return replace(unit, text="\n".join(lines))
