"""Lists the output formats and their file suffixes; imports little, since every command loads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ampaudit.core.errors import UsageError
from ampaudit.core.untrusted import describe

__all__ = ["FORMAT_REGISTRY", "OUTPUT_FORMATS", "Format", "chosen_format"]


@dataclass(frozen=True, slots=True)
class Format:
    """An output format.

    Attributes:
        writer: Module and function that turn a document into text, as ``module:function``.
        needs: Part of a ``View`` that the writer renders.
        suffixes: File suffixes that select the format by default.
    """

    writer: str
    needs: str
    suffixes: tuple[str, ...] = ()


FORMAT_REGISTRY = {
    "text": Format("ampaudit.render.terminal:to_text", "sections", (".txt", ".log", "")),
    "json": Format("ampaudit.render.json:to_json", "document", (".json",)),
    "html": Format("ampaudit.render.html.page:to_html", "page", (".html", ".htm")),
    "markdown": Format("ampaudit.render.markdown:to_markdown", "digest", (".md", ".markdown")),
    "sarif": Format("ampaudit.render.sarif:to_sarif", "suites", (".sarif",)),
    "junit": Format("ampaudit.render.junit:to_junit", "suites", (".xml",)),
    "github": Format("ampaudit.render.github:to_github", "suites"),
    "csv": Format("ampaudit.render.csv:to_csv", "rows", (".csv",)),
}
OUTPUT_FORMATS = {name: form.suffixes for name, form in FORMAT_REGISTRY.items()}


def chosen_format(form: str | None, output: Path | None, offered: Iterable[str] = FORMAT_REGISTRY) -> str:
    """Return the named format, else the format of the file's suffix, else ``text``.

    Raises:
        UsageError: the suffix belongs to none of the offered formats.
    """
    if form is not None or output is None:
        return form or "text"
    suffix, forms = output.suffix.lower(), [name for name in offered if OUTPUT_FORMATS[name]]
    for name in forms:
        if suffix in OUTPUT_FORMATS[name]:
            return name
    *first, last = (OUTPUT_FORMATS[name][0] for name in forms)
    raise UsageError(
        f"-o {describe(output)}: this result has no format for {describe(suffix)} files",
        hint=f"end the name in {', '.join(first)} or {last}, or name a format: --format text",
    )
