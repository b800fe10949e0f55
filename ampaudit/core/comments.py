"""Finds comments that suppress findings: ``# ampaudit: ignore[AMP807] the reason``."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass

__all__ = ["Comment", "comments_of"]

_COMMENT = re.compile(r"#\s*ampaudit:\s*ignore\[(?P<codes>[^\]]*)\]\s*(?P<reason>.*)")


@dataclass(frozen=True, slots=True)
class Comment:
    """One suppression comment.

    Attributes:
        line: Line number, from 1.
        codes: Suppressed codes; empty for all.
        reason: Text after the codes.
        code: Source line, including the comment.
    """

    line: int
    codes: tuple[str, ...]
    reason: str
    code: str


def comments_of(text: str) -> list[Comment]:
    """Find the suppression comments of a script, up to the first syntax error."""
    comments: list[Comment] = []
    if "ampaudit:" not in text:  # fast path: tokenizing large files is slow
        return comments
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                codes = tuple(code.strip().upper() for code in match["codes"].split(",") if code.strip())
                reason = match["reason"].strip() or "no reason given"
                comments.append(Comment(token.start[0], codes, reason, token.line.strip()))
    except (SyntaxError, tokenize.TokenError):
        return comments
    return comments
