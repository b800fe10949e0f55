"""Lints texts and files: analyzes them, applies fixes, and turns diagnostics into findings."""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ampaudit.core.errors import InputError, first_line
from ampaudit.core.session import Progress, silent
from ampaudit.core.text import comments_of
from ampaudit.core.untrusted import describe_path, read_bounded
from ampaudit.findings.finding import Severity
from ampaudit.findings.pages import all_pages
from ampaudit.findings.pages.page import LINTED
from ampaudit.linter.config import LintConfig
from ampaudit.linter.diagnostic import Certainty, Mistake
from ampaudit.linter.discovery import find_files, leaves_tree
from ampaudit.linter.flow.script import ScriptTooLong, is_worth_reading, parse, read_script
from ampaudit.linter.flow.values import Value
from ampaudit.linter.repair import Analysis, blocks_around, repair
from ampaudit.linter.selection import UNUSED_SUPPRESSION, RuleSelection, suppression_of
from ampaudit.linter.source_text import (
    MAX_SOURCE_BYTES,
    CodeBlock,
    Unreadable,
    blank_cell,
    character_column,
    decode,
    extract_code_blocks,
    lines_of_cells,
    replace_code_blocks,
    split_lines,
)
from ampaudit.linter.source_tree import LinkedScript, SourceTree
from ampaudit.report.lint import LintFinding, UnreadFile

_FILES_AT_ONCE = 16  # that a process gets together
_MANY_FILES = 64  # from which several processes are faster
_PARSE_ERRORS = (SyntaxError, RecursionError, MemoryError)
_Task: TypeAlias = tuple[Path, RuleSelection, bool]  # and whether to fix the file


@dataclass(slots=True)
class LintedFile:
    """The result of linting one file.

    Attributes:
        path: Path as passed by the user.
        findings: Findings that remain after fixes.
        imported: Findings in imported files that this file reveals.
        unread: Parts that could not be read.
        before: Original text.
        after: Text with fixes applied.
        encoding: Encoding of the file.
        fixed: Number of findings that were fixed.
        is_elsewhere: Whether a link leads out of the given directories, so that the file is not fixed.
        was_read: Whether anything in it could be read.
    """

    path: str
    findings: list[LintFinding] = field(default_factory=list)
    imported: list[LintFinding] = field(default_factory=list)
    unread: list[UnreadFile] = field(default_factory=list)
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    fixed: int = 0
    is_elsewhere: bool = False
    was_read: bool = False


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
    results = _results(files, tasks, jobs if len(files) >= _MANY_FILES else 1)
    for number, (linted, away) in enumerate(zip(results, elsewhere, strict=True)):
        on_progress("linting", number, len(files))
        linted.is_elsewhere = away
        yield linted


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_tree = SourceTree()  # of the files that this process lints; each is parsed once


def _results(files: list[Path], tasks: list[_Task], jobs: int) -> Iterator[LintedFile]:
    """Yield the result of each task, in order."""
    if jobs == 1:
        _follow_among(files)
        yield from map(_lint_task, tasks)
        return
    import ampaudit.linter.analysis  # noqa: F401  (once, before there are copies of this process)

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(jobs, context, _start_process, (files,))
    try:
        yield from pool.map(_lint_task, tasks, chunksize=_FILES_AT_ONCE)
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process(files: list[Path]) -> None:
    """Initialize a process, which leaves interrupts to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _follow_among(files)


def _follow_among(files: list[Path]) -> None:
    global _tree
    _tree = SourceTree(files)


def _lint_task(task: _Task) -> LintedFile:
    path, selection, fix = task
    linted = lint_file(path, selection, fix=fix, tree=_tree)
    if linted.after == linted.before:  # there is nothing to write, and the texts may be long
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
    return lint_bytes(data, name, selection, fix=fix, tree=tree)


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
    collects = gc.isenabled()
    gc.disable()  # a tree has no garbage, but so many objects that looking for it takes a tenth of the time
    try:
        linted = lint_text(text, name, selection, fix=fix, tree=tree)
    finally:
        if collects:
            gc.enable()
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
    enabled = selection.for_file(Path(name))
    names: dict[str, Value] = {}
    changed: list[tuple[CodeBlock, str]] = []
    for original in blocks:
        analyze = partial(_analyze, path=name, names=names, tree=tree or SourceTree())
        block, analysis = _analyze_block(linted, original, analyze)
        if fix:
            before, analysis = analysis, repair(analysis, analyze, enabled)
            linted.fixed += len(before.diagnostics) - len(analysis.diagnostics)
            if analysis is not before:
                changed.append((original, analysis.text))
                block = block.with_text(analysis.text)
        linted.findings += _to_findings(name, block, analysis.diagnostics, enabled, analysis.tree)
        linted.findings += _unused_suppressions(name, block, analysis.diagnostics, enabled)
        for path, script, diagnostics in analysis.imported:
            linted.imported += _to_findings(
                str(path), CodeBlock(script), diagnostics, selection.for_file(path), parse(script)
            )
        names |= analysis.names  # a later block may use them
    if changed:
        linted.after = replace_code_blocks(text, suffix, changed)
    if suffix == ".ipynb" and linted.findings:
        lines = lines_of_cells(linted.after)
        linted.findings = [
            replace(finding, file_line=lines.get((finding.cell or 0, finding.line)))
            for finding in linted.findings
        ]
    return linted


def _analyze(text: str, path: str, names: Mapping[str, Value], tree: SourceTree) -> Analysis:
    """Analyze a text of one file, given the names of earlier blocks and the files that it may import."""
    least = Certainty.LIKELY if is_worth_reading(text) else Certainty.KNOWN
    if least == Certainty.KNOWN and not tree.drives_training(parse(text), text, path):
        return Analysis(text)
    from ampaudit.linter.analysis import analyze

    linked = LinkedScript(read_script(text), path, tree)
    ordered, names_at_end = analyze(linked, names)
    by_file = linked.group_by_file([item for item in ordered if item.certainty >= least])
    imported = [
        (tree.paths[number - 1], script.text, by_file[number])
        for number, script in linked.imported.items()
        if number in by_file
    ]
    return Analysis(text, by_file.get(0, []), linked.main.tree, names_at_end, imported)


def _analyze_block(
    linted: LintedFile, block: CodeBlock, analyze: Callable[[str], Analysis]
) -> tuple[CodeBlock, Analysis]:
    """Analyze a block; return it without the cells that do not parse."""
    while True:
        analysis = Analysis(block.text)
        try:
            if not block.marks or is_worth_reading(block.text):
                analysis = analyze(block.text)
            linted.was_read = True
        except _PARSE_ERRORS as error:
            line, cell = block.locate(getattr(error, "lineno", None) or 1)
            if not block.is_example:
                where = f"cell {cell}: " if cell is not None else ""
                linted.unread.append(UnreadFile(linted.path, line, where + _reason(error)))
            if cell is not None and (rest := blank_cell(block, cell)).text != block.text:
                block = rest
                continue
            linted.was_read |= block.is_example
        except ScriptTooLong as error:
            linted.unread.append(UnreadFile(linted.path, 1, str(error)))
        except Exception as error:  # a bug of ours must not hide what is found in other files
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}, line {last.lineno}"
            what = f"{type(error).__name__}: {first_line(error)} ({place})"
            linted.unread.append(UnreadFile(linted.path, 1, f"internal error: {what}; please report it"))
        return block, analysis


def _reason(error: SyntaxError | RecursionError | MemoryError) -> str:
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply to be read"
    reason = error.msg.splitlines()[0]
    old = "Missing parentheses in call to 'print'" in reason or "multiple exception types" in reason
    return f"not valid Python: {reason}" + (" (Python 2?)" if old else "")


def _to_findings(
    path: str,
    block: CodeBlock,
    diagnostics: Sequence[Mistake],
    selection: RuleSelection,
    tree: ast.Module,
) -> Iterator[LintFinding]:
    """Yield the findings of the enabled rules, including suppressed ones; ``tree`` is that of the block.

    In tests, only errors count.
    """
    lines, comments = split_lines(block.text), comments_of(block.text)
    is_test = Path(path).name.startswith("test_")  # of pytest, which trains on little and resumes nothing
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for item in diagnostics:
        if not selection.includes(item.code):
            continue
        severity = Severity(all_pages()[item.code].severity)
        if item.certainty == Certainty.LIKELY and severity == Severity.ERROR:
            severity = Severity.WARNING
        first = int(getattr(item.node, "lineno", 1))
        last = int(getattr(item.node, "end_lineno", first) or first)
        column = character_column(lines[first - 1], getattr(item.node, "col_offset", 0))
        end_column = character_column(lines[last - 1], getattr(item.node, "end_col_offset", 0) or 0)
        line, cell = block.locate(first)
        comment, around = suppression_of(item, comments), blocks_around(tree.body, first)
        functions = [owner.name for owner, _ in around if isinstance(owner, definitions)]
        if is_test and severity != Severity.ERROR and any(name.startswith("test") for name in functions):
            continue
        yield LintFinding(
            code=item.code,
            severity=severity,
            file=path,
            line=line,
            column=column + block.indent + 1,
            end_line=block.locate(last)[0],
            end_column=end_column + block.indent + 1,
            cell=cell,
            function=".".join(functions),
            cause=item.cause,
            advice=item.advice,
            fixable=item.fix is not None and item.fix.is_safe,
            fixable_unsafely=item.fix is not None and not item.fix.is_safe,
            source=lines[first - 1].strip("\r"),
            suppressed=f"comment: {comment.reason}" if comment else None,
        )


def _unused_suppressions(
    path: str, block: CodeBlock, diagnostics: Sequence[Mistake], selection: RuleSelection
) -> Iterator[LintFinding]:
    """Yield a finding for each comment that names lint rules and suppresses no diagnostic."""
    comments = comments_of(block.text) if selection.includes(UNUSED_SUPPRESSION) else []
    used = [suppression_of(item, comments) for item in diagnostics]
    for comment in comments:
        if comment in used or not comment.codes or not all(c.startswith(LINTED) for c in comment.codes):
            continue
        line, cell = block.locate(comment.line)
        yield LintFinding(
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
