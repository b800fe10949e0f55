"""Comments that hide findings: ``# ampaudit: ignore[AMP807] the reason``."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass

__all__ = ["Comment", "comments_of"]

_COMMENT = re.compile(r"#\s*ampaudit:\s*ignore\[(?P<codes>[^\]]*)\]\s*(?P<reason>.*)")


@dataclass(frozen=True, slots=True)
class Comment:
    """One such comment.

    Attributes:
        line: from 1.
        codes: those it hides; empty means every one.
        reason: what follows them, or that nothing does.
        code: the line it stands on.
    """

    line: int
    codes: tuple[str, ...]
    reason: str
    code: str


def comments_of(text: str) -> list[Comment]:
    """Every such comment of a script; those before an error, where it is not Python."""
    found: list[Comment] = []
    if "ampaudit:" not in text:  # libraries' files are long, and have none
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
