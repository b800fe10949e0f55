"""Suppresses findings by code, layer or source comment, and reports unused suppressions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ampaudit.audit.checks.interface import finding_about, source_of
from ampaudit.core.errors import SourceError, UsageError
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import comments_of
from ampaudit.core.untrusted import read_bounded
from ampaudit.findings.finding import Finding
from ampaudit.findings.pages import codes_beginning
from ampaudit.findings.pages.page import LINTED
from ampaudit.linter.source_text import MAX_SOURCE_BYTES, Unreadable, decode
from ampaudit.trace import Site

UNUSED = "AMP991"
_NEVER = ("AMP990", UNUSED)


@dataclass(frozen=True, slots=True)
class Suppression:
    """A rule that suppresses findings."""

    codes: tuple[str, ...]  # check codes; empty for all
    layer: str | None  # glob over layer paths; ``None`` for all
    line: SourceLine | None  # source line with the comment; ``None`` for an option
    text: str  # name in reports

    def hides(self, finding: Finding) -> bool:
        """Return whether a finding is suppressed; crashes and unused suppressions cannot be."""
        if finding.code in _NEVER or (self.codes and finding.code not in self.codes):
            return False
        if self.layer is not None:
            return fnmatchcase(finding.layer, self.layer)
        if self.line is None:
            return True
        lines = (finding.source, finding.source and finding.source.caller)
        place = (self.line.file, self.line.line)
        return any(line is not None and (line.file, line.line) == place for line in lines)


def option(text: str) -> Suppression:
    """Parse ``AMP102``, a prefix such as ``AMP1``, ``AMP102:encoder.*`` or ``:encoder.*``.

    Raises:
        UsageError: No code has this prefix.
    """
    code, _, layer = text.partition(":")
    codes = codes_beginning(code) if code else ()
    if not codes and not layer:
        raise UsageError(
            f"--ignore {text!r} names neither a code nor a layer", hint="--ignore AMP102:encoder.*"
        )
    return Suppression(codes, layer or None, None, f"--ignore {text}")


def comments_in(sites: Iterable[Site]) -> tuple[Suppression, ...]:
    """Return the suppression comments in all files that contain sites."""
    lines = (line for site in sites for line in (site.source, site.caller))
    return comments_of_files(dict.fromkeys(line.file for line in lines if line is not None))


def comments_of_files(files: Iterable[str]) -> tuple[Suppression, ...]:
    """Return the suppression comments in files."""
    return tuple(suppression for file in files for suppression in _comments_of(Path(file)))


def _comments_of(path: Path) -> list[Suppression]:
    try:
        text, _ = decode(read_bounded(path, MAX_SOURCE_BYTES, SourceError))
        comments = comments_of(text)
    except (SourceError, Unreadable, SyntaxError, ValueError):
        return []  # not readable as a file: code from a string, an archive, a notebook
    return [
        Suppression(each.codes, None, SourceLine(str(path), each.line, each.code), f"comment: {each.reason}")
        for each in comments
        if not each.codes or not all(code.startswith(LINTED) for code in each.codes)
    ]


def suppressed(findings: Sequence[Finding], hiding: Sequence[Suppression]) -> tuple[Finding, ...]:
    """Mark the suppressed findings, and add a finding for each unused suppression."""
    used: set[int] = set()
    marked: list[Finding] = []
    for finding in findings:
        index = next((i for i, item in enumerate(hiding) if item.hides(finding)), None)
        if index is None:
            marked.append(finding)
        else:
            used.add(index)
            marked.append(replace(finding, suppressed=hiding[index].text))
    idle = [item for index, item in enumerate(hiding) if index not in used]
    return (*marked, *map(_unused, idle))


def with_later(
    findings: Sequence[Finding], later: Sequence[Finding], hiding: Sequence[Suppression]
) -> tuple[Finding, ...]:
    """Add findings to those of a report, and drop its notes on suppressions that the new ones use."""
    marked = suppressed(later, hiding)[: len(later)]
    used = {finding.suppressed for finding in marked}
    stale = [_unused(item) for item in hiding if item.text in used]
    return (*(finding for finding in findings if finding not in stale), *marked)


def _unused(item: Suppression) -> Finding:
    what = (", ".join(item.codes) if len(item.codes) == 1 or item.line else "") or "findings"
    layer = item.layer or ""
    cause = f"this suppression of {what} hides nothing ({item.text})"
    finding = finding_about(UNUSED, SiteId(f"{layer or '(top)'}/suppression"), layer, cause, "remove it")
    return replace(finding, source=source_of(item.line))
