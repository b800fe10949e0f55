"""Lints texts and files: reads them, keeps what was asked for, hides what is suppressed, repairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampaudit.core.comments import comments_of
from ampaudit.core.errors import first_line
from ampaudit.lint.code_blocks import Unit, pieces_of, rebuilt, without_cell
from ampaudit.lint.diagnostic import Diagnostic
from ampaudit.lint.discovery import find
from ampaudit.lint.flow.script import is_worth_reading, parse, read_script
from ampaudit.lint.flow.values import Value
from ampaudit.lint.reporting import Hidden, findings_of
from ampaudit.lint.selection import RuleSelection
from ampaudit.lint.source_text import Unreadable, decode
from ampaudit.report.lint import LintFinding, UnreadFile

__all__ = ["LintedFile", "RuleSelection", "lint_bytes", "lint_file", "lint_files", "lint_text"]

_ROUNDS = 10  # of repairs; each may uncover the next


@dataclass(slots=True)
class LintedFile:
    """One file.

    Attributes:
        path: as it was given.
        findings: what is wrong with it, after repairs.
        unread: what of it could not be read.
        before: its text as it was.
        after: its text with repairs.
        encoding: of the file.
        fixed: how many mistakes were repaired.
    """

    path: str
    findings: list[LintFinding] = field(default_factory=list)
    unread: list[UnreadFile] = field(default_factory=list)
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    fixed: int = 0


def lint_files(
    paths: Sequence[str], selection: RuleSelection, *, exclude: Sequence[str] = (), fix: bool = False
) -> Iterator[LintedFile]:
    """Each file that is meant by the paths, one after the other."""
    for path in find(paths, exclude):
        yield lint_file(path, selection, fix=fix)


def lint_file(path: Path, selection: RuleSelection, *, fix: bool = False) -> LintedFile:
    """One file; what keeps it from being read is in the result."""
    name = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        return LintedFile(name, unread=[UnreadFile(name, 1, error.strerror or str(error))])
    return lint_bytes(data, name, selection, fix=fix)


def lint_bytes(data: bytes, name: str, selection: RuleSelection, *, fix: bool = False) -> LintedFile:
    """What is in a file, or came from stdin."""
    try:
        text, encoding = decode(data)
    except Unreadable as error:
        return LintedFile(name, unread=[UnreadFile(name, error.line, str(error))])
    linted = lint_text(text, name, selection, fix=fix)
    linted.encoding = encoding
    return linted


def lint_text(text: str, name: str, selection: RuleSelection, *, fix: bool = False) -> LintedFile:
    """A file's text; ``name`` is what findings call it, and its suffix says what it is."""
    linted = LintedFile(name, before=text, after=text)
    suffix = Path(name).suffix.lower()
    try:
        units = pieces_of(text, suffix)
    except Unreadable as error:
        linted.unread.append(UnreadFile(name, error.line, str(error)))
        return linted
    known: dict[str, Value] = {}
    changed: list[tuple[Unit, str]] = []
    for unit in units:
        known |= _lint_unit(linted, unit, selection, fix, known, changed)
    if changed:
        linted.after = rebuilt(text, suffix, changed)
    return linted


def _lint_unit(
    linted: LintedFile,
    unit: Unit,
    selection: RuleSelection,
    fix: bool,
    known: dict[str, Value],
    changed: list[tuple[Unit, str]],
) -> dict[str, Value]:
    """Read, and if asked repair and read again; the names that the next unit may use."""
    original = unit
    found, names, unit = _read(linted, unit, known)
    if fix and found:
        text, found, count = _repair(unit, found, known, selection)
        linted.fixed += count
        if text != unit.text:
            changed.append((original, text))
            unit = unit.changed(text)
    linted.findings += findings_of(linted.path, unit, found, selection)
    return names


def _read(
    linted: LintedFile, unit: Unit, known: dict[str, Value]
) -> tuple[list[Diagnostic], dict[str, Value], Unit]:
    from ampaudit.lint.analysis import analyze

    while is_worth_reading(unit.text):
        try:
            found, names = analyze(read_script(unit.text), known)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, cell = unit.place(getattr(error, "lineno", None) or 1)
            if not unit.lenient:
                where = f"cell {cell}: " if cell is not None else ""
                linted.unread.append(UnreadFile(linted.path, line, where + _reason(error)))
            if cell is None or unit.text == (less := without_cell(unit, cell)).text:
                return [], {}, unit
            unit = less
        except Exception as error:  # a mistake of ours must not hide what is found in other files
            reason = f"internal error: {type(error).__name__}: {first_line(error)}; please report it"
            linted.unread.append(UnreadFile(linted.path, 1, reason))
            return [], {}, unit
        else:
            return found, names, unit
    _check_syntax(linted, unit)
    return [], {}, unit


def _check_syntax(linted: LintedFile, unit: Unit) -> None:
    """A file without anything to look at is still said to be broken if it is."""
    if unit.lenient or unit.marks:
        return
    try:
        parse(unit.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, _ = unit.place(getattr(error, "lineno", None) or 1)
        linted.unread.append(UnreadFile(linted.path, line, _reason(error)))


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply to be read"
    if not isinstance(error, SyntaxError):
        return str(error).splitlines()[0]
    reason = error.msg.splitlines()[0]
    old = "Missing parentheses in call to 'print'" in reason or "multiple exception types" in reason
    return f"not valid Python: {reason}" + (" (Python 2?)" if old else "")


def _repair(
    unit: Unit, found: list[Diagnostic], known: dict[str, Value], selection: RuleSelection
) -> tuple[str, list[Diagnostic], int]:
    """Repair until nothing is left that can be; the text, what is left, and how many were repaired."""
    import libcst

    from ampaudit.lint.analysis import analyze
    from ampaudit.lint.fixes import apply_fixes

    text, start = unit.text, len(found)
    if re.search(r"\r(?!\n)", text):
        return text, found, 0  # line ends of another age, which libcst does not keep
    seen = {text}
    for _ in range(_ROUNDS):
        hidden = Hidden(comments_of(text))
        wanted = [
            item
            for item in found
            if item.fix is not None and selection.wants(item.code) and hidden.by(item) is None
        ]
        if not wanted:
            break
        try:
            new = apply_fixes(text, [item.fix for item in wanted if item.fix is not None])
            script = read_script(new)
        except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
            break
        if new in seen:  # nothing was found again; or one repair undoes another
            break
        seen.add(new)
        text, (found, _) = new, analyze(script, known)
    return text, found, max(start - len(found), 0) if text != unit.text else 0
