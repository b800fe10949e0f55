"""Lints texts and files: analyzes them, selects and suppresses diagnostics, applies fixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ampaudit.core.config import Progress, silent
from ampaudit.core.errors import InputError, first_line
from ampaudit.core.untrusted import describe_path, read_bounded
from ampaudit.linter.code_blocks import CodeBlock, blank_cell, extract_code_blocks, replace_code_blocks
from ampaudit.linter.config import LintConfig
from ampaudit.linter.diagnostic import Diagnostic
from ampaudit.linter.discovery import find_files, leaves_tree
from ampaudit.linter.flow.relevance import is_worth_reading
from ampaudit.linter.flow.script import ScriptTooLong, parse, read_script
from ampaudit.linter.flow.values import Value
from ampaudit.linter.notebook_lines import lines_of_cells
from ampaudit.linter.processes import processes
from ampaudit.linter.repairs import repaired
from ampaudit.linter.reporting import to_findings
from ampaudit.linter.selection import UNUSED_SUPPRESSION, RuleSelection
from ampaudit.linter.source_text import MAX_SOURCE_BYTES, Unreadable, decode
from ampaudit.linter.source_tree import SourceTree
from ampaudit.report.lint import LintFinding, UnreadFile

__all__ = ["LintedFile", "RuleSelection", "lint_bytes", "lint_file", "lint_files", "lint_text"]

_MANY = 64  # files from which several processes are faster
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(slots=True)
class LintedFile:
    """The result of linting one file.

    Attributes:
        path: path as it was given.
        findings: findings that remain after fixes.
        unread: parts that could not be read.
        before: original text.
        after: text with fixes applied.
        encoding: encoding of the file.
        fixed: number of findings that were fixed.
        is_elsewhere: whether it was not to be fixed, since a link leads to it out of the given directories.
        was_read: whether anything in it could be read.
        elsewhere: what is wrong in files that it imports, as it shows from here, with their paths and texts.
        imported: the findings of that.
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
    """Lint every file that files, directories and globs name; fix none that a link finds elsewhere.

    Args:
        paths: files, directories and globs.
        config: what to lint and what to report.
        fix: whether to apply fixes to the texts; no file is written.
        jobs: processes; one of them if there are few files.
        on_progress: called with the number of files done.

    Raises:
        UsageError: a code does not exist.
    """
    selection = RuleSelection.of(config)
    found = list(find_files(paths, config.exclude, gitignore=config.gitignore))
    elsewhere = [fix and leaves_tree(path, paths) for path in found]
    tasks = [(path, selection, fix and not away) for path, away in zip(found, elsewhere, strict=True)]
    if (count := jobs if len(found) >= _MANY else 1) > 1:
        import ampaudit.linter.analysis  # noqa: F401  (once, before there are copies of this process)
    with processes(count, partial(_follow_among, found)) as run:
        for number, (linted, away) in enumerate(zip(run(_lint_task, tasks), elsewhere, strict=True)):
            on_progress("linting", number, len(found))
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
        path: the file.
        selection: the rules that are enabled.
        fix: whether to apply fixes to the text.
        tree: the files among which imports are followed.
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
            replace(found, file_line=lines[found.cell][found.line - 1]) if found.cell else found
            for found in linted.findings
        ]
    return linted


@dataclass(slots=True)
class _Analyzer:
    """Analyzes code at a path, in which names may be known, among files that it may import.

    Attributes:
        defined: the names at the end of what was analyzed last.
        elsewhere: what is wrong in imported files, with their paths and texts.
    """

    path: str
    names: Mapping[str, Value]
    tree: SourceTree
    defined: Mapping[str, Value] = field(default_factory=dict)
    elsewhere: list[tuple[Path, str, list[Diagnostic]]] = field(default_factory=list)

    def diagnostics(self, text: str) -> list[Diagnostic]:
        """Return the diagnostics of a text."""
        from ampaudit.linter.analysis import analyze
        from ampaudit.linter.flow.linked_script import LinkedScript

        linked = LinkedScript(read_script(text), self.path, self.tree)
        found, self.defined = analyze(linked, self.names)
        by_file = linked.in_their_files(found)
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
    """Record why a block cannot be read, unless it is an example in prose; return the cell it is in."""
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
