"""Decodes source files, splits them into lines, converts columns, and writes changes as unified diffs."""

from __future__ import annotations

import codecs
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import unified_diff
from typing import Any, Final

_MARK = "# ampaudit cell "
_MAGIC = "pass  # ampaudit magic "
_SHELL = re.compile(r"[\w.]+\?+$|[\w, ]+= *[!%]")  # help, and the result of a command
_PYTHON_CELL_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(?:\s*:)?|\n')  # or a key, or the end of a line
_MARKDOWN = (".md", ".markdown")
MAX_SOURCE_BYTES: Final = 10_000_000  # what is larger was not written by hand


class Unreadable(Exception):
    """A file that cannot be read as Python; the message is one line.

    Attributes:
        line: Line of the problem, from 1; 1 if unknown.
    """

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def decode(data: bytes) -> tuple[str, str]:
    """Decode a source file as Python does; return its text and its encoding.

    Raises:
        Unreadable: The file is binary, too large, or not in its declared encoding.
    """
    if len(data) > MAX_SOURCE_BYTES:
        raise Unreadable(f"larger than {MAX_SOURCE_BYTES // 1_000_000} MB")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Unreadable("UTF-16, which Python does not read; save it as UTF-8")
    if b"\0" in data:
        raise Unreadable("a binary file")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, ValueError, LookupError) as error:  # some codecs raise no UnicodeDecodeError
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise Unreadable(f"not text in the declared encoding: {reason}".splitlines()[0]) from error


def split_lines(text: str) -> list[str]:
    """Split a text into lines as Python's parser counts them."""
    return text.split("\n") if "\r" not in text else re.split(r"\r\n|\r|\n", text)


def character_column(line: str, byte_column: int) -> int:
    """Convert a column in UTF-8 bytes, as ``ast`` counts, to characters."""
    return len(line.encode()[:byte_column].decode(errors="ignore"))


def diff_lines(path: str, before: str, after: str) -> Iterator[str]:
    """Yield the lines of a unified diff that ``patch`` applies, each without its line end."""
    old, new = (list(io.StringIO(text, newline="\n")) for text in (before, after))
    for line in unified_diff(old, new, path, path):
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """Python code that is analyzed together.

    Attributes:
        text: Code.
        start: Line of the file, from 1, at which the code starts; 0 for a notebook.
        indent: Indentation of the code in the file, in columns.
        marks: Line of each code cell's mark in ``text`` and the number of the cell from 1; empty for files.
        is_example: Whether the block is part of prose, where invalid code is not an error.
    """

    text: str
    start: int = 1
    indent: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    is_example: bool = False

    def locate(self, line: int) -> tuple[int, int | None]:
        """Return the line in the file or cell, and the cell, of a line of the code."""
        if not self.marks:
            return line + self.start - 1, None
        mark, cell = max((m for m in self.marks if m[0] < line), default=self.marks[0])
        return max(line - mark, 1), cell

    def with_text(self, text: str) -> CodeBlock:
        """Return the block with other code, in which a notebook's cells may start at other lines."""
        cells = iter(self.marks)
        lines = enumerate(text.split("\n"), 1) if self.marks else ()
        marks = tuple((number, next(cells)[1]) for number, line in lines if line.startswith(_MARK))
        return replace(self, text=text, marks=marks)


def extract_code_blocks(text: str, suffix: str) -> list[CodeBlock]:
    """Extract the Python code of a file, whose suffix says whether it is a notebook or Markdown.

    Raises:
        Unreadable: The suffix is ``.ipynb``, but the text is not a notebook.
    """
    if suffix == ".ipynb":
        return _from_notebook(text)
    return _from_markdown(text) if suffix in _MARKDOWN else [CodeBlock(text)]


def replace_code_blocks(text: str, suffix: str, changed: list[tuple[CodeBlock, str]]) -> str:
    """Return a file's text with new code for some of its blocks."""
    if suffix == ".ipynb":
        return _replace_cells(text, changed[0][1])
    if suffix not in _MARKDOWN:
        return changed[0][1]
    lines = text.splitlines(keepends=True)
    for block, code in sorted(changed, key=lambda pair: -pair[0].start):
        first = block.start - 1
        indented = [f"{' ' * block.indent}{line}" if line.strip() else line for line in code.splitlines(True)]
        lines[first : first + len(block.text.splitlines())] = indented
    return "".join(lines)


def _from_markdown(text: str) -> list[CodeBlock]:
    from markdown_it import MarkdownIt

    blocks = []
    lines = text.splitlines()
    for token in MarkdownIt().parse(text):
        language = (token.info.strip().split() or [""])[0].strip("{}.").partition("{")[0].lower()
        if token.type != "fence" or token.map is None or language not in ("python", "py", "python3"):
            continue
        start = token.map[0] + 2
        code = next((line for line in token.content.splitlines() if line.strip()), "")
        fenced_line = next((line for line in lines[start - 1 : token.map[1]] if line.strip()), "")
        indent = max(fenced_line.find(code), 0) if code else 0
        blocks.append(CodeBlock(token.content, start, indent, is_example=True))
    return blocks


def _from_notebook(text: str) -> list[CodeBlock]:
    lines: list[str] = []
    marks: list[tuple[int, int]] = []
    for number, cell in _python_cells(text)[1]:
        lines.append(f"{_MARK}{number}")
        marks.append((len(lines), number))
        source = _source(cell).split("\n")
        lines += ["#" for _ in source] if _is_other_language(cell) else _without_magic(source)
    return [CodeBlock("\n".join(lines) + "\n", 0, marks=tuple(marks))] if marks else []


def _python_cells(text: str) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """Return a parsed notebook, and its code cells with their numbers; none if they are not Python."""
    try:
        notebook = json.loads(text)
        language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python").lower()
        code = [(i, cell) for i, cell in enumerate(notebook["cells"], 1) if cell["cell_type"] == "code"]
        code = code if language in ("python", "ipython", "python3") else []
        for _, cell in code:
            _source(cell).encode()  # escapes in JSON may stand for half a character
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable("not a notebook of version 4") from error
    return notebook, code


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else source


def _is_other_language(cell: dict[str, Any]) -> bool:
    source = _source(cell)
    return source.startswith("%%") and not source.startswith(_PYTHON_CELL_MAGICS)


def _without_magic(source: list[str]) -> Iterator[str]:
    """Replace magic and shell commands by statements, and their further lines by comments."""
    is_command = False
    for number, line in enumerate(source):
        stripped = line.lstrip()
        if is_command and source[number - 1].endswith("\\"):
            yield f"#{_MAGIC}{number}"
        else:
            is_command = stripped[:1] in ("%", "!", "?") or _SHELL.match(stripped) is not None
            yield f"{line[: len(line) - len(stripped)]}{_MAGIC}{number}" if is_command else line


def _restore_magic(code: str, source: list[str]) -> str:
    def original(match: re.Match[str]) -> str:
        line = source[int(match[1])]
        return line if match[0].startswith("#") else line.lstrip()

    return re.sub(rf"#?{_MAGIC}(\d+)", original, code)


def _replace_cells(text: str, code: str) -> str:
    notebook, cells = _python_cells(text)
    parts = re.split(rf"^{_MARK}(\d+)\n", code, flags=re.MULTILINE)
    changed = {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}
    for number, cell in cells:
        if _is_other_language(cell):
            continue
        old = _source(cell)
        new = _restore_magic(changed[number].removesuffix("\n"), old.split("\n"))
        if new != old:
            cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
    indent = re.match(r"\{\r?\n( +)", text)
    ending = "\n" if text.endswith("\n") else ""
    return json.dumps(notebook, indent=len(indent[1]) if indent else None, ensure_ascii=False) + ending


def blank_cell(block: CodeBlock, cell: int) -> CodeBlock:
    """Return a notebook's code with each line of one cell replaced by a statement that does nothing."""
    lines = block.text.split("\n")
    start = next(mark for mark, number in block.marks if number == cell)
    end = next((mark for mark, _ in block.marks if mark > start), len(lines)) - 1
    lines[start:end] = [f"{_MAGIC}{number}" for number in range(end - start)]
    return replace(block, text="\n".join(lines))


def lines_of_cells(notebook: str) -> dict[tuple[int, int], int]:
    """Return lines of a notebook's file by the number of a code cell and the line in it, both from 1."""
    line = 1

    def with_line(match: re.Match[str]) -> str:
        """Replace a string that is not a key by a pair of its line and itself."""
        nonlocal line
        first, line = line, line + match[0].count("\n")
        return f"[{first}, {match[0]}]" if match[0].endswith('"') else match[0]

    cells = json.loads(_JSON_STRING.sub(with_line, notebook))["cells"]
    lines: dict[tuple[int, int], int] = {}
    for number, cell in enumerate(cells, 1):
        source = cell["source"] if cell["cell_type"][1] == "code" else []
        pieces = [source] if source and isinstance(source[0], int) else source
        row = 1
        for in_file, piece in pieces:
            for character in piece:
                lines.setdefault((number, row), in_file)
                row += character == "\n"
    return lines
