"""The pages as one document, docs/checks.md, and the list that ``ampaudit explain`` prints."""

from __future__ import annotations

from ampaudit.report.pages.page import all_pages

__all__ = ["FAMILIES", "document", "family"]

FAMILIES = {
    "1": "range of forward values",
    "2": "underflow and precision",
    "3": "constants and dtypes",
    "4": "weights",
    "5": "performance",
    "6": "policy",
    "7": "gradients",
    "8": "training loops, found by reading",
    "9": "not covered, and about the audit itself",
}


def family(code: str) -> str:
    """What the hundreds of a code stand for."""
    return FAMILIES[code[3]]


def document() -> str:
    """All pages as Markdown, with a table of contents; made by ``make docs``."""
    pages = all_pages().values()
    lines = ["# Checks", ""]
    lines += ["`ampaudit explain AMP106` prints one of these pages. Each page's examples are its test:"]
    lines += ["the bad one is scanned and must be found, the good one must not.", ""]
    lines += ["| code | says | severity | family |", "|---|---|---|---|"]
    lines += [
        f"| [{p.code}](#{_anchor(p.code, p.title)}) | {p.title} | {p.severity} | {family(p.code)} |"
        for p in pages
    ]
    text = "\n".join(lines) + "\n"
    return text + "".join(f"\n{_deeper(page.text)}" for page in pages)


def _anchor(code: str, title: str) -> str:
    kept = "".join(c for c in f"{code}: {title}".lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def _deeper(text: str) -> str:
    """Headings one level down; what looks like one inside an example is a comment and stays."""
    inside, lines = False, []
    for line in text.splitlines():
        inside ^= line.startswith("```")
        lines.append(f"#{line}" if line.startswith("#") and not inside else line)
    return "\n".join(lines) + "\n"
