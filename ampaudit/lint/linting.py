"""Lints texts and files: reads them, keeps what was asked for, hides what is suppressed, repairs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampaudit.comments import Comment, comments_of
from ampaudit.errors import UsageError, did_you_mean, first_line
from ampaudit.lint.discovery import find
from ampaudit.lint.found import Found
from ampaudit.lint.pieces import Unit, Unreadable, decode, pieces_of, rebuilt, without_cell
from ampaudit.lint.report import LintFinding, UnreadFile
from ampaudit.lint.script import lines_of, may_matter, parse, read_script
from ampaudit.lint.values import Value
from ampaudit.pages import all_pages
from ampaudit.pages.page import LINTED
from ampaudit.report.finding import Severity

__all__ = ["Choice", "LintedFile", "lint_bytes", "lint_file", "lint_files", "lint_text"]

UNUSED = "AMP991"
_ROUNDS = 10  # of repairs; each may uncover the next


@dataclass(frozen=True, slots=True)
class Choice:
    """Which codes are wanted.

    Attributes:
        select: codes, or how they begin.
        ignore: the same, for those that are not.
    """

    select: tuple[str, ...] = (LINTED,)
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, select: Iterable[str], ignore: Iterable[str]) -> Choice:
        """Of texts such as ``AMP807,AMP82``.

        Raises:
            UsageError: no code of a lint begins so.
        """
        return cls(tuple(_codes(select)) or (LINTED,), tuple(_codes(ignore)))

    def wants(self, code: str) -> bool:
        """Whether a finding is to be reported; of two that fit, the longer decides."""
        if code == UNUSED:
            return UNUSED not in self.ignore
        chosen = max((len(start) for start in self.select if code.startswith(start)), default=-1)
        refused = max((len(start) for start in self.ignore if code.startswith(start)), default=-1)
        return chosen > refused


def _codes(texts: Iterable[str]) -> Iterator[str]:
    known = [code for code in all_pages() if code.startswith(LINTED)] + [UNUSED]
    for text in texts:
        for part in text.split(","):
            code = part.strip().upper()
            if not code:
                continue
            if code == "ALL":
                code = LINTED
            if not any(name.startswith(code) for name in known):
                hint = (
                    did_you_mean(code, known)
                    + "ampaudit explain lists all codes; those of lint begin with AMP8"
                )
                raise UsageError(f"no code of lint begins with {part.strip()!r}", hint=hint)
            yield code


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
    paths: Sequence[str], choice: Choice, *, exclude: Sequence[str] = (), fix: bool = False
) -> Iterator[LintedFile]:
    """Each file that is meant by the paths, one after the other."""
    for path in find(paths, exclude):
        yield lint_file(path, choice, fix=fix)


def lint_file(path: Path, choice: Choice, *, fix: bool = False) -> LintedFile:
    """One file; what keeps it from being read is in the result."""
    name = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        return LintedFile(name, unread=[UnreadFile(name, 1, error.strerror or str(error))])
    return lint_bytes(data, name, choice, fix=fix)


def lint_bytes(data: bytes, name: str, choice: Choice, *, fix: bool = False) -> LintedFile:
    """What is in a file, or came from stdin."""
    try:
        text, encoding = decode(data)
    except Unreadable as error:
        return LintedFile(name, unread=[UnreadFile(name, error.line, str(error))])
    linted = lint_text(text, name, choice, fix=fix)
    linted.encoding = encoding
    return linted


def lint_text(text: str, name: str, choice: Choice, *, fix: bool = False) -> LintedFile:
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
        known |= _lint_unit(linted, unit, choice, fix, known, changed)
    if changed:
        linted.after = rebuilt(text, suffix, changed)
    return linted


def _lint_unit(
    linted: LintedFile,
    unit: Unit,
    choice: Choice,
    fix: bool,
    known: dict[str, Value],
    changed: list[tuple[Unit, str]],
) -> dict[str, Value]:
    """Read, and if asked repair and read again; the names that the next unit may use."""
    original = unit
    found, names, unit = _read(linted, unit, known)
    if fix and found:
        text, found, count = _repair(unit, found, known, choice)
        linted.fixed += count
        if text != unit.text:
            changed.append((original, text))
            unit = Unit(text, unit.start, unit.indent, _marks(text, unit), unit.lenient)
    linted.findings += _findings(linted.path, unit, found, choice)
    return names


def _marks(text: str, unit: Unit) -> tuple[tuple[int, int], ...]:
    """Where a notebook's cells begin after lines were added."""
    if not unit.marks:
        return ()
    cells = iter(unit.marks)
    lines = enumerate(text.split("\n"), 1)
    return tuple((number, next(cells)[1]) for number, line in lines if line.startswith("# ampaudit cell "))


def _read(
    linted: LintedFile, unit: Unit, known: dict[str, Value]
) -> tuple[list[Found], dict[str, Value], Unit]:
    from ampaudit.lint.reading import read

    while may_matter(unit.text):
        try:
            found, names = read(read_script(unit.text), known)
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
    unit: Unit, found: list[Found], known: dict[str, Value], choice: Choice
) -> tuple[str, list[Found], int]:
    """Repair until nothing is left that can be; the text, what is left, and how many were repaired."""
    import libcst

    from ampaudit.lint.reading import read
    from ampaudit.lint.repairs import repaired

    text, start = unit.text, len(found)
    if re.search(r"\r(?!\n)", text):
        return text, found, 0  # line ends of another age, which libcst does not keep
    for _ in range(_ROUNDS):
        hidden = _Hidden(comments_of(text))
        wanted = [
            item
            for item in found
            if item.repair is not None and choice.wants(item.code) and hidden.by(item) is None
        ]
        if not wanted:
            break
        try:
            new = repaired(text, [item.repair for item in wanted if item.repair is not None])
            script = read_script(new)
        except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
            break
        if new == text:
            break
        text, (found, _) = new, read(script, known)
    return text, found, max(start - len(found), 0) if text != unit.text else 0


class _Hidden:
    """The comments of a text, and which of them hid something."""

    def __init__(self, comments: Sequence[Comment]) -> None:
        self.comments = comments
        self.used: set[int] = set()

    def by(self, item: Found) -> Comment | None:
        """The comment that hides a finding: on its first line, or its last."""
        lines = (getattr(item.node, "lineno", 1), getattr(item.node, "end_lineno", 1))
        for comment in self.comments:
            if comment.line in lines and (not comment.codes or item.code in comment.codes):
                self.used.add(comment.line)
                return comment
        return None


def _findings(path: str, unit: Unit, found: list[Found], choice: Choice) -> list[LintFinding]:
    lines = lines_of(unit.text)
    hidden = _Hidden(comments_of(unit.text))
    functions = _Functions(unit.text) if found else None
    results = []
    for item in found:
        comment = hidden.by(item)
        if choice.wants(item.code) and functions is not None:
            made = _finding(path, unit, lines, item, functions.around(getattr(item.node, "lineno", 1)))
            because = f"comment: {comment.reason}" if comment is not None else None
            results.append(made if because is None else replace(made, suppressed=because))
    for comment in hidden.comments:
        ours = comment.codes and all(code.startswith(LINTED) for code in comment.codes)
        if ours and comment.line not in hidden.used and choice.wants(UNUSED):
            results.append(_unused(path, unit, comment))
    return results


def _unused(path: str, unit: Unit, comment: Comment) -> LintFinding:
    line, cell = unit.place(comment.line)
    cause = f"this suppression of {', '.join(comment.codes)} hides nothing"
    severity = Severity(all_pages()[UNUSED].severity)
    return LintFinding(
        UNUSED, severity, path, line, 1, line, 1, cell, "", cause, "remove it", False, comment.code
    )


def _finding(path: str, unit: Unit, lines: list[str], item: Found, function: str) -> LintFinding:
    node = item.node
    first = int(getattr(node, "lineno", 1))
    last = int(getattr(node, "end_lineno", first) or first)
    text, end_text = lines[first - 1], lines[last - 1]
    column = len(text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore"))
    end = len(end_text.encode()[: getattr(node, "end_col_offset", 0) or 0].decode(errors="ignore"))
    line, cell = unit.place(first)
    return LintFinding(
        code=item.code,
        severity=Severity(all_pages()[item.code].severity),
        file=path,
        line=line,
        column=column + unit.indent + 1,
        end_line=unit.place(last)[0],
        end_column=end + unit.indent + 1,
        cell=cell,
        function=function,
        cause=item.cause,
        advice=item.advice,
        fixable=item.repair is not None,
        source=text.strip("\r"),
    )


class _Functions:
    """Names of functions and classes by the lines they cover."""

    def __init__(self, text: str) -> None:
        self.spans: list[tuple[int, int, str]] = []
        self._add(parse(text).body, "")

    def _add(self, body: Sequence[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{node.name}" if outer else node.name
                self.spans.append((node.lineno, node.end_lineno or node.lineno, name))
                self._add(node.body, name)

    def around(self, line: int) -> str:
        """The innermost one that a line is in."""
        inside = [span for span in self.spans if span[0] <= line <= span[1]]
        return min(inside, key=lambda span: span[1] - span[0])[2] if inside else ""
