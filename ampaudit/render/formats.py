"""Lists the formats and their file suffixes, with light imports, as the command line reads it first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FORMAT_REGISTRY", "OUTPUT_FORMATS", "Format", "chosen_format"]


@dataclass(frozen=True, slots=True)
class Format:
    """An output format.

    Attributes:
        writer: module and function that turn a document into text.
        needs: the part of a ``View`` that it is made from.
        suffixes: file suffixes that select it if no format is named.
    """

    writer: str
    needs: str
    suffixes: tuple[str, ...] = ()


FORMAT_REGISTRY = {
    "text": Format("ampaudit.render.terminal:to_text", "sections"),
    "json": Format("ampaudit.render.json:to_json", "document", (".json",)),
    "html": Format("ampaudit.render.html.page:to_html", "page", (".html", ".htm")),
    "markdown": Format("ampaudit.render.markdown:to_markdown", "digest", (".md", ".markdown")),
    "sarif": Format("ampaudit.render.sarif:to_sarif", "suites", (".sarif",)),
    "junit": Format("ampaudit.render.junit:to_junit", "suites", (".xml",)),
    "github": Format("ampaudit.render.github:to_github", "suites"),
    "csv": Format("ampaudit.render.csv:to_csv", "rows", (".csv",)),
}
OUTPUT_FORMATS = {name: form.suffixes for name, form in FORMAT_REGISTRY.items()}


def chosen_format(named: str | None, output: Path | None) -> str:
    """Return the named format, else that of the file's suffix, else text."""
    if named is not None or output is None:
        return named or "text"
    suffix = output.suffix.lower()
    return next((name for name, suffixes in OUTPUT_FORMATS.items() if suffix in suffixes), "text")
