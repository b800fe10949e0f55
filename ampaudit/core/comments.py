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
        line: its line, counted from 1.
        codes: the suppressed codes; empty for all.
        reason: the text behind the codes.
        code: the whole line.
    """

    line: int
    codes: tuple[str, ...]
    reason: str
    code: str


def comments_of(text: str) -> list[Comment]:
    """Find the suppression comments of a script, up to the first syntax error."""
    found: list[Comment] = []
    if "ampaudit:" not in text:  # a shortcut for long files of libraries
        return found
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                codes = tuple(code.strip().upper() for code in match["codes"].split(",") if code.strip())
                reason = match["reason"].strip() or "no reason given"
                found.append(Comment(token.start[0], codes, reason, token.line.strip()))
    except (SyntaxError, tokenize.TokenError):
        return found
    return found
