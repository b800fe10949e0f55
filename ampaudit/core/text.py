"""Formats names and numbers for readers."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import tokenize
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ampaudit.core.errors import UsageError

_COMMENT = re.compile(r"#\s*ampaudit:\s*ignore\[(?P<codes>[^\]]*)\]\s*(?P<reason>.*)")
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
# commands that the runners of GitHub, Azure and TeamCity execute when they read them in a log; the first ones
# only at the start of a line (names from ActionCommandManager.cs in actions/runner)
_COMMAND = re.compile(
    r"::(?=(?:add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|"
    r"remove-matcher|save-state|set-env|set-output|stop-commands|warning)\b)|##(?=\w*\[)",
    re.IGNORECASE,
)
_SEPARATOR = os.sep
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def escape_control(name: str) -> str:
    """Escape control characters, bidirectional marks, line breaks, and commands of CI runners.

    The result is safe to print at any position of a line, however the line is wrapped.
    """
    safe = name if name.isprintable() else "".join(map(_escape, name))
    return _COMMAND.sub(lambda match: f"{match[0][0]}\\x{ord(match[0][1]):x}", safe)


def _escape(char: str) -> str:
    return char if unicodedata.category(char) not in _UNPRINTABLE else char.encode("unicode_escape").decode()


def escape_lines(text: str) -> str:
    """Escape each line of a text, keeping its line breaks."""
    return "\n".join(map(escape_control, text.split("\n")))


def escape_json(text: str) -> str:
    """Escape unsafe characters in JSON text; it still parses to the same values."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        json.dumps(char)[1:-1] if unicodedata.category(char) in _UNPRINTABLE and char != "\n" else char
        for char in text
    )


def forward_slashes(file: str) -> str:
    """Return a path with forward slashes, as reports write it on every system."""
    return file.replace(_SEPARATOR, "/")


def model_file(location: str) -> str:
    """Return the file of a model's location, without ``:factory``; the colon of a drive is kept."""
    head, _, factory = location.rpartition(":")
    return head if head and factory.isidentifier() else location


def shell_quoted(name: str) -> str:
    """Escape and quote a name for use in a shell command."""
    return shlex.quote(escape_control(name))


def short_op(op: str) -> str:
    """Shorten the name of an op: ``aten.linear.default`` is ``linear``."""
    return op.removeprefix("aten.").removesuffix(".default")


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 batch``, ``2 batches``, ``1,024 sites``."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return ``a, b, c and 2 more``: the first few names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def format_bytes(count: int) -> str:
    """Format a byte count with three digits and a unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:  # rounds to three digits
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} EB"


def format_number(value: float) -> str:
    """Format a number with four significant digits; whole numbers below 100,000 in full."""
    if 1e3 <= abs(value) < 1e7:
        exact = value if value == round(value) and abs(value) < 1e5 else float(f"{value:.4g}")
        return f"{exact:,.0f}"
    return f"{value:.4g}"


def format_bound(value: float) -> str:
    """Format an upper bound like a number, but rounded up, so that the text is a bound as well."""
    if value < 1e5 and value == round(value):
        return format_number(value)
    from decimal import ROUND_CEILING, Context  # here, as few commands print bounds

    return format_number(float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value)))


def format_scale(scale: float) -> str:
    """Format a loss scale in full: ``131,072``."""
    return f"{scale:,.10g}"


def format_power(exponent: int) -> str:
    """Format a power of two: ``2^16 (65,536)``."""
    return f"2^{exponent} ({2**exponent:,})" if 0 <= exponent < 30 else f"2^{exponent}"


def parse_size(text: str) -> int:
    """Parse a number of bytes such as ``4GB``, ``500 MB`` or ``2GiB``.

    Raises:
        UsageError: The text is not a size.
    """
    compact = text.strip().lower().replace(" ", "")
    digits = compact.rstrip("kmgib")
    try:
        size = int(float(digits) * _UNITS[compact[len(digits) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is not a valid size", hint="write 4GB, 500MB or 2GiB")
    return size


def signal_to_noise_db(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal / noise) of two sums of squares; ``None`` if it is not finite."""
    return finite_or_none(ratio_db(signal, noise))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a Python number; booleans, which are integers in Python, are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite_or_none(value: float | None) -> float | None:
    """Return a number for a report, where ``None`` stands for inf and NaN."""
    return value if value is not None and math.isfinite(value) else None


def ratio_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); inf without noise, -inf without signal or with non-finite noise."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise if math.isfinite(noise) else 0.0
    if ratio == 0.0:
        return -math.inf
    return 10.0 * math.log10(ratio) if math.isfinite(ratio) else math.inf


def share_db(share: float) -> float | None:
    """Return 20 log10(1 / share) for the share of integers that differ; ``None`` for 0.

    So 20 dB means a tenth of the elements, as it means a tenth of the amplitude for floats.
    """
    return -20.0 * math.log10(share) if share else None


def differing_share(db: float) -> float:
    """Return the share of differing integers for an accuracy in dB: the inverse of ``share_db``."""
    return math.pow(10.0, -db / 20.0)


@dataclass(frozen=True, slots=True)
class Comment:
    """One suppression comment."""

    line: int  # number, from 1
    codes: tuple[str, ...]  # suppressed codes; empty for all
    reason: str  # text after the codes
    code: str  # source line, including the comment


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
