"""Formats a rewrite as a unified diff of the user's file, if it matches exactly one place on its line."""

from __future__ import annotations

import ast
from pathlib import Path

from ampaudit.audit.advice.interface import LineChange, Proposal
from ampaudit.audit.advice.source_edits import replacements
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import read_bounded
from ampaudit.linter.source_text import MAX_SOURCE_BYTES, Unreadable, decode, diff_lines
from ampaudit.render.paths import relative_path
from ampaudit.trace.stack import is_library

__all__ = ["diff_of"]


def diff_of(proposal: Proposal) -> str:
    """Return the diff; empty if the change does not edit source code or its place is ambiguous."""
    change = proposal.source
    if change is None or is_library(change.line.file):
        return ""
    text = _text_of(change)
    if text is None:
        return ""
    after = _rewritten(text, change)
    if after is None or after == text:
        return ""
    return "\n".join(diff_lines(relative_path(change.line.file), text, after)) + "\n"


def _text_of(change: LineChange) -> str | None:
    """Return the file's text; ``None`` if its line is no longer the one that was run."""
    path = Path(change.line.file)
    try:
        text, _ = decode(read_bounded(path, MAX_SOURCE_BYTES, SourceError))
    except (SourceError, Unreadable):
        return None
    lines = text.split("\n")
    same = change.line.line <= len(lines) and lines[change.line.line - 1].strip() == change.line.code.strip()
    return text if same and "\r" not in text and change.line.code else None


def _rewritten(text: str, change: LineChange) -> str | None:
    import libcst

    from ampaudit.linter.fixes import apply_every_fix

    try:
        fixes = replacements(text, change)
        after = apply_every_fix(text, fixes) if fixes else None
        if after is not None:
            ast.parse(after)
    except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
        return None
    return after
