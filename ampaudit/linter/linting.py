"""Lints texts and files: analyzes them, selects and suppresses diagnostics, applies fixes."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.session import Progress, silent
from ampaudit.core.text import Comment, comments_of
from ampaudit.core.untrusted import describe_path, read_bounded
from ampaudit.linter.config import LintConfig
from ampaudit.linter.diagnostic import Certainty, Diagnostic, Fix
from ampaudit.linter.discovery import UNUSED_SUPPRESSION, RuleSelection, find_files, leaves_tree
from ampaudit.linter.flow.script import ScriptTooLong, is_worth_reading, parse, read_script
from ampaudit.linter.flow.values import Value
from ampaudit.linter.source_text import (
    MAX_SOURCE_BYTES,
    CodeBlock,
    Unreadable,
    blank_cell,
    character_column,
    decode,
    extract_code_blocks,
    replace_code_blocks,
    split_lines,
)
from ampaudit.linter.source_tree import SourceTree
from ampaudit.report.finding import Severity
from ampaudit.report.lint import LintFinding, UnreadFile
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = [
    "LintedFile",
    "RuleSelection",
    "available_cores",
    "lines_of_cells",
    "lint_bytes",
    "lint_file",
    "lint_files",
    "lint_text",
]


_AT_ONCE = 16  # items that travel together
Item = TypeVar("Item")
Result = TypeVar("Result")
_MAX_ROUNDS = 10
_Analyze: TypeAlias = Callable[[str], list[Diagnostic]]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]')
_MANY = 64  # files from which several processes are faster
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(slots=True)
class LintedFile:
    """The result of linting one file.

    Attributes:
        path: Path as passed by the user.
        findings: Findings that remain after fixes.
        unread: Parts that could not be read.
        before: Original text.
        after: Text with fixes applied.
        encoding: Encoding of the file.
        fixed: Number of findings that were fixed.
        is_elsewhere: Whether a link leads out of the given directories, so that the file is not fixed.
        was_read: Whether anything in it could be read.
        elsewhere: Paths, texts and diagnostics of imported files, as far as this file reveals mistakes there.
        imported: Findings in imported files.
    """

    path: str
    findings: list[LintFinding] = field(default_factory=list)
    unread: list[UnreadFile] = field(default_factory=list)
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    fixed: int = 0
    is_elsewhere: bool = False
    was_read: bool = False
    elsewhere: list[tuple[Path, str, list[Diagnostic]]] = field(default_factory=list)
    imported: list[LintFinding] = field(default_factory=list)


def lint_files(
    paths: Sequence[str],
    config: LintConfig,
    *,
    fix: bool = False,
    jobs: int = 1,
    on_progress: Progress = silent,
) -> Iterator[LintedFile]:
    """Lint files, and the files in directories and globs; fix none to which a link leads elsewhere.

    Args:
        paths: Files, directories and globs.
        config: Options of the command.
        fix: Whether to apply fixes to the texts; no file is written.
        jobs: Number of processes; few files are linted in one.
        on_progress: Callback that gets the number of finished files.

    Raises:
        UsageError: A code does not exist.
    """
    selection = RuleSelection.of(config)
    files = list(find_files(paths, config.exclude, gitignore=config.gitignore))
    elsewhere = [fix and leaves_tree(path, paths) for path in files]
    tasks = [(path, selection, fix and not away) for path, away in zip(files, elsewhere, strict=True)]
    if (count := jobs if len(files) >= _MANY else 1) > 1:
        import ampaudit.linter.analysis  # noqa: F401  (once, before there are copies of this process)
    with processes(count, partial(_follow_among, files)) as run:
        for number, (linted, away) in enumerate(zip(run(_lint_task, tasks), elsewhere, strict=True)):
            on_progress("linting", number, len(files))
            linted.is_elsewhere = away
            yield linted


_tree = SourceTree()  # of the files that this process lints


def _follow_among(files: list[Path]) -> None:
    global _tree  # each process parses what it follows once
    _tree = SourceTree(files)


def _lint_task(task: tuple[Path, RuleSelection, bool]) -> LintedFile:
    path, selection, fix = task
    linted = lint_file(path, selection, fix=fix, tree=_tree)
    if linted.after == linted.before:  # there is nothing to write, and the texts may come from elsewhere
        linted.before = linted.after = ""
    return linted


def lint_file(
    path: Path, selection: RuleSelection, *, fix: bool = False, tree: SourceTree | None = None
) -> LintedFile:
    """Lint one file; an error of reading it becomes part of the result.

    Args:
        path: File to lint.
        selection: Enabled rules.
        fix: Whether to apply fixes to the text.
        tree: Files among which imports are followed.
    """
    name = str(path)
    try:
        data = read_bounded(path, MAX_SOURCE_BYTES, InputError)
    except InputError as error:
        reason = str(error.args[0]).removeprefix(f"{describe_path(path)}: ")
        return LintedFile(name, unread=[UnreadFile(name, 1, reason)])
    linted = lint_bytes(data, name, selection.for_file(path), fix=fix, tree=tree)
    linted.imported = [
        finding
        for where, text, diagnostics in linted.elsewhere
        for finding in to_findings(str(where), CodeBlock(text), diagnostics, selection.for_file(where))
        if finding.code != UNUSED_SUPPRESSION
    ]
    linted.elsewhere = []
    return linted


def lint_bytes(
    data: bytes,
    name: str,
    selection: RuleSelection,
    *,
    fix: bool = False,
    tree: SourceTree | None = None,
) -> LintedFile:
    """Lint the content of a file or of standard input."""
    try:
        text, encoding = decode(data)
    except Unreadable as error:
        return LintedFile(name, unread=[UnreadFile(name, error.line, str(error))])
    linted = lint_text(text, name, selection, fix=fix, tree=tree)
    linted.encoding = encoding
    return linted


def lint_text(
    text: str, name: str, selection: RuleSelection, *, fix: bool = False, tree: SourceTree | None = None
) -> LintedFile:
    """Lint a text; the suffix of ``name`` selects the parser."""
    linted = LintedFile(name, before=text, after=text)
    suffix = Path(name).suffix.lower()
    try:
        blocks = extract_code_blocks(text, suffix)
    except Unreadable as error:
        linted.unread.append(UnreadFile(name, error.line, str(error)))
        return linted
    linted.was_read = not blocks
    names: dict[str, Value] = {}
    changed: list[tuple[CodeBlock, str]] = []
    for original in blocks:
        analyzer = _Analyzer(name, names, tree or SourceTree())
        diagnostics, block = _analyze(linted, original, analyzer)
        if fix and diagnostics:
            after, diagnostics, count = repaired(block.text, diagnostics, analyzer.diagnostics, selection)
            linted.fixed += count
            if after != block.text:
                changed.append((original, after))
                block = block.with_text(after)
        linted.findings += to_findings(linted.path, block, diagnostics, selection)
        names |= analyzer.defined  # a later block may use them
        linted.elsewhere += analyzer.elsewhere
    if changed:
        linted.after = replace_code_blocks(text, suffix, changed)
    if suffix == ".ipynb" and linted.findings:
        lines = lines_of_cells(linted.after)
        linted.findings = [
            replace(finding, file_line=lines[finding.cell][finding.line - 1]) if finding.cell else finding
            for finding in linted.findings
        ]
    return linted


@dataclass(slots=True)
class _Analyzer:
    """Analyzes texts of one file, given the names of earlier blocks and the files that it may import.

    Attributes:
        defined: Names at the end of the text analyzed last.
        elsewhere: Paths, texts and diagnostics of imported files.
    """

    path: str
    names: Mapping[str, Value]
    tree: SourceTree
    defined: Mapping[str, Value] = field(default_factory=dict)
    elsewhere: list[tuple[Path, str, list[Diagnostic]]] = field(default_factory=list)

    def diagnostics(self, text: str) -> list[Diagnostic]:
        """Return the diagnostics of a text."""
        from ampaudit.linter.analysis import analyze
        from ampaudit.linter.source_tree import LinkedScript

        linked = LinkedScript(read_script(text), self.path, self.tree)
        ordered, self.defined = analyze(linked, self.names)
        by_file = linked.group_by_file([item for item in ordered if item.certainty != Certainty.UNKNOWN])
        self.elsewhere = [
            (self.tree.paths[number - 1], script.text, by_file[number])
            for number, script in linked.imported.items()
            if number in by_file
        ]
        return by_file.get(0, [])


def _analyze(linted: LintedFile, block: CodeBlock, analyzer: _Analyzer) -> tuple[list[Diagnostic], CodeBlock]:
    """Return the diagnostics, and the block without cells that do not parse."""
    while is_worth_reading(block.text):
        try:
            diagnostics = analyzer.diagnostics(block.text)
        except _PARSE_ERRORS as error:
            cell = _record_parse_error(linted, block, error)
            if cell is None or block.text == (rest := blank_cell(block, cell)).text:
                return [], block
            block = rest
        except ScriptTooLong as error:
            linted.unread.append(UnreadFile(linted.path, 1, str(error)))
            return [], block
        except Exception as error:  # a bug of ours must not hide what is found in other files
            reason = f"internal error: {type(error).__name__}: {first_line(error)}; please report it"
            linted.unread.append(UnreadFile(linted.path, 1, reason))
            return [], block
        else:
            linted.was_read = True
            return diagnostics, block
    if not block.marks:  # a file that is not worth reading is still reported if it does not parse
        try:
            parse(block.text)
        except ScriptTooLong as error:
            linted.unread.append(UnreadFile(linted.path, 1, str(error)))
        except _PARSE_ERRORS as error:
            if _record_parse_error(linted, block, error) is None and not block.is_example:
                return [], block
    linted.was_read = True
    return [], block


def _record_parse_error(linted: LintedFile, block: CodeBlock, error: Exception) -> int | None:
    """Record a parse error, unless the block is an example in prose; return the number of its cell."""
    line, cell = block.locate(getattr(error, "lineno", None) or 1)
    if not block.is_example:
        where = f"cell {cell}: " if cell is not None else ""
        linted.unread.append(UnreadFile(linted.path, line, where + _reason(error)))
    return cell


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply to be read"
    if not isinstance(error, SyntaxError):
        return str(error).splitlines()[0]
    reason = error.msg.splitlines()[0]
    old = "Missing parentheses in call to 'print'" in reason or "multiple exception types" in reason
    return f"not valid Python: {reason}" + (" (Python 2?)" if old else "")


class _Analyzed(NamedTuple):
    """A text with its diagnostics."""

    text: str
    diagnostics: list[Diagnostic]


def repaired(
    text: str, diagnostics: list[Diagnostic], analyze: _Analyze, selection: RuleSelection
) -> tuple[str, list[Diagnostic], int]:
    """Fix until nothing fixable remains; return the text, what remains, and how many were fixed.

    If all fixes together leave a mistake that was not there, each is tried by itself. ``analyze`` returns
    the diagnostics of a text.
    """
    start = _Analyzed(text, diagnostics)
    if re.search(r"\r(?!\n)", text):
        return text, diagnostics, 0  # libcst does not preserve line ends of classic Mac OS
    end = _fix_all(start, analyze, selection)
    if _has_new_mistakes(end, start):
        end = _fix_one_by_one(start, analyze, selection)
    fixed = max(len(diagnostics) - len(end.diagnostics), 0) if end.text != text else 0
    return end.text, end.diagnostics, fixed


def _fix_all(now: _Analyzed, analyze: _Analyze, selection: RuleSelection) -> _Analyzed:
    texts = {now.text}
    for _ in range(_MAX_ROUNDS):
        fixes = _fixes(now, selection)
        after = _applied(now.text, fixes, analyze) if fixes else None
        if after is None or after.text in texts:  # no fix could be applied, or one undoes another
            break
        texts.add(after.text)
        now = after
    return now


def _fix_one_by_one(now: _Analyzed, analyze: _Analyze, selection: RuleSelection) -> _Analyzed:
    tried: set[tuple[str, ...]] = set()
    while True:
        lines = now.text.split("\n")
        remaining = {(fix.kind, *fix.details, lines[fix.line - 1]): fix for fix in _fixes(now, selection)}
        key = next((key for key in remaining if key not in tried), None)
        if key is None:
            return now
        tried.add(key)
        after = _applied(now.text, [remaining[key]], analyze)
        if after is not None and not _has_new_mistakes(after, now):
            now = after


def _fixes(now: _Analyzed, selection: RuleSelection) -> list[Fix]:
    suppressions = Suppressions(now.text)
    return [
        item.fix
        for item in now.diagnostics
        if item.fix is not None
        and (item.fix.is_safe or selection.unsafe_fixes)
        and selection.includes(item.code)
        and not suppressions.matching(item)
    ]


def _applied(text: str, fixes: Sequence[Fix], analyze: _Analyze) -> _Analyzed | None:
    """Apply fixes and analyze the result; ``None`` if it cannot be read."""
    import libcst

    from ampaudit.linter.fixes import apply_fixes

    try:
        fixed = apply_fixes(text, fixes)
        return _Analyzed(fixed, analyze(fixed))
    except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError, ScriptTooLong):
        return None


def _has_new_mistakes(after: _Analyzed, before: _Analyzed) -> bool:
    def counts(analyzed: _Analyzed) -> Counter[str]:
        return Counter(item.code for item in analyzed.diagnostics)

    return bool(counts(after) - counts(before))


@dataclass(slots=True)
class _Level:
    """An object or array around a token: its current key or index, and whether a key comes next."""

    is_object: bool
    key: str | int
    awaits_key: bool


def lines_of_cells(text: str) -> dict[int, list[int]]:
    """Return the line in the file of each line of each cell, by the cell's number from 1.

    Args:
        text: Notebook as valid JSON.
    """
    rows_by_cell: defaultdict[int, list[int]] = defaultdict(list)
    levels: list[_Level] = []
    line, end = 1, 0
    for token in _TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        end, word = token.start(), token[0]
        if word in "{[":
            levels.append(_Level(word == "{", "" if word == "{" else 0, word == "{"))
        elif word in "}]":
            levels.pop()
        elif word == ",":
            _next(levels[-1])
        elif levels and levels[-1].awaits_key:
            levels[-1].key, levels[-1].awaits_key = json.loads(word), False
        else:
            _take(rows_by_cell, [level.key for level in levels], json.loads(word), line)
    return dict(rows_by_cell)


def _next(level: _Level) -> None:
    level.awaits_key = level.is_object
    if isinstance(level.key, int):
        level.key += 1


def _take(rows_by_cell: dict[int, list[int]], path: list[str | int], value: str, line: int) -> None:
    """Add the lines of a string to its cell, if it is the source of a cell or a part of it."""
    if len(path) in (3, 4) and path[0] == "cells" and path[2] == "source" and isinstance(path[1], int):
        rows = rows_by_cell[path[1] + 1]
        for number, text in enumerate(value.split("\n")):
            if number == 0 and rows and rows[-1]:
                continue  # the line began with the piece before
            if number == 0 and rows:
                rows.pop()
            rows.append(line if text or number < value.count("\n") else 0)  # 0: nothing is on it yet


class Run(Protocol):
    """A ``map`` that may use several processes."""

    def __call__(self, function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterator[Result]:
        """Yield the result for each item, in order."""


@contextmanager
def processes(count: int, prepare: Callable[[], None] = lambda: None) -> Iterator[Run]:
    """Provide a ``map`` over some processes; with one, it runs in this process.

    Each process calls ``prepare`` first.
    Other processes are copies of this one where that is possible, and import the main module elsewhere.
    """
    if count == 1:
        prepare()
        yield map
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(count, context, _start, (prepare,)) as pool:

        def run(function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterator[Result]:
            return pool.map(function, items, chunksize=_AT_ONCE)

        try:
            yield run
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(prepare: Callable[[], None]) -> None:
    """Initialize a worker process, which leaves interrupts to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare()


class Suppressions:
    """The suppression comments of a text, and which of them were used."""

    def __init__(self, text: str) -> None:
        self.comments = comments_of(text)
        self._used: set[int] = set()

    def matching(self, diagnostic: Diagnostic) -> Comment | None:
        """Return the comment on the first or last line of a diagnostic that suppresses it."""
        lines = (getattr(diagnostic.node, "lineno", 1), getattr(diagnostic.node, "end_lineno", 1))
        for comment in self.comments:
            if comment.line in lines and (not comment.codes or diagnostic.code in comment.codes):
                self._used.add(comment.line)
                return comment
        return None

    def unused(self) -> list[Comment]:
        """Return the comments on lint rules that have matched nothing so far."""
        return [
            comment
            for comment in self.comments
            if comment.codes
            and all(code.startswith(LINTED) for code in comment.codes)
            and comment.line not in self._used
        ]


def to_findings(
    path: str, block: CodeBlock, diagnostics: list[Diagnostic], selection: RuleSelection
) -> list[LintFinding]:
    """Return the findings of the enabled rules, with suppressions and unused suppression comments."""
    lines = split_lines(block.text)
    suppressions = Suppressions(block.text)
    definitions = _Definitions(block.text) if diagnostics else None
    findings = []
    for diagnostic in diagnostics:
        comment = suppressions.matching(diagnostic)
        if selection.includes(diagnostic.code) and definitions is not None:
            function = definitions.name_at(getattr(diagnostic.node, "lineno", 1))
            finding = _to_finding(path, block, lines, diagnostic, function)
            findings.append(replace(finding, suppressed=f"comment: {comment.reason}") if comment else finding)
    if selection.includes(UNUSED_SUPPRESSION):
        findings += [_unused_suppression(path, block, comment) for comment in suppressions.unused()]
    return findings


def _unused_suppression(path: str, block: CodeBlock, comment: Comment) -> LintFinding:
    line, cell = block.locate(comment.line)
    return LintFinding(
        code=UNUSED_SUPPRESSION,
        severity=Severity(all_pages()[UNUSED_SUPPRESSION].severity),
        file=path,
        line=line,
        column=1,
        end_line=line,
        end_column=1,
        cell=cell,
        function="",
        cause=f"this suppression of {', '.join(comment.codes)} hides nothing",
        advice="remove it",
        fixable=False,
        source=comment.code,
    )


def _severity_of(diagnostic: Diagnostic) -> Severity:
    """Return the severity of a diagnostic, which is at most a warning if it is only likely."""
    severity = Severity(all_pages()[diagnostic.code].severity)
    is_weaker = diagnostic.certainty == Certainty.LIKELY and severity == Severity.ERROR
    return Severity.WARNING if is_weaker else severity


def _to_finding(
    path: str,
    block: CodeBlock,
    lines: list[str],
    diagnostic: Diagnostic,
    function: str,
) -> LintFinding:
    node, fix = diagnostic.node, diagnostic.fix
    first = int(getattr(node, "lineno", 1))
    last = int(getattr(node, "end_lineno", first) or first)
    column = character_column(lines[first - 1], getattr(node, "col_offset", 0))
    end_column = character_column(lines[last - 1], getattr(node, "end_col_offset", 0) or 0)
    line, cell = block.locate(first)
    return LintFinding(
        code=diagnostic.code,
        severity=_severity_of(diagnostic),
        file=path,
        line=line,
        column=column + block.indent + 1,
        end_line=block.locate(last)[0],
        end_column=end_column + block.indent + 1,
        cell=cell,
        function=function,
        cause=diagnostic.cause,
        advice=diagnostic.advice,
        fixable=fix is not None and fix.is_safe,
        fixable_unsafely=fix is not None and not fix.is_safe,
        source=lines[first - 1].strip("\r"),
    )


class _Definitions:
    """Qualified names of functions and classes by the lines that they cover."""

    def __init__(self, text: str) -> None:
        self._ranges: list[tuple[int, int, str]] = []
        self._add(parse(text).body, "")

    def _add(self, body: Sequence[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{node.name}" if outer else node.name
                self._ranges.append((node.lineno, node.end_lineno or node.lineno, name))
                self._add(node.body, name)

    def name_at(self, line: int) -> str:
        """Return the name of the innermost definition around a line; empty at module level."""
        around = [(last - first, name) for first, last, name in self._ranges if first <= line <= last]
        return min(around, key=lambda pair: pair[0])[1] if around else ""
