"""The names of the formats, and which one a file's name asks for. Light: the command line reads it first."""

from __future__ import annotations

from pathlib import Path

__all__ = ["OUTPUT_FORMATS", "chosen_format"]

# suffixes of files that are written in a format if nobody names one
OUTPUT_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json": (".json",),
    "html": (".html", ".htm"),
    "markdown": (".md", ".markdown"),
    "sarif": (".sarif",),
    "junit": (".xml",),
    "github": (),
    "csv": (".csv",),
}


def chosen_format(named: str | None, output: Path | None) -> str:
    """The format that was named; else that of the file's suffix; else text."""
    if named is not None or output is None:
        return named or "text"
    suffix = output.suffix.lower()
    return next((form for form, suffixes in OUTPUT_FORMATS.items() if suffix in suffixes), "text")
