"""Renders a document in any of its formats, importing each format on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ampaudit.core.errors import UsageError
from ampaudit.core.files import write_private, write_text
from ampaudit.core.text import shell_quoted
from ampaudit.core.untrusted import describe
from ampaudit.render.view import Renderable, view_class, view_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_KEPT = "the result is"
_TIMES = re.compile(r'"(timings|seconds)": (\{[^}]*\}|[^,\n]*)')  # they differ in each run


def for_terminal(document: Renderable, verbosity: int = 0) -> RenderableType:
    """Return the document as a rich renderable; ``verbosity`` -1 is the verdict alone."""
    from ampaudit.render.terminal import printable

    return printable(view_of(document).sections(verbosity))


def check_values(document: Renderable) -> None:
    """Build every part of a document that formats share, without writing it.

    Raises:
        ValueError: The types of the document are valid, but some values cannot be rendered.
    """
    view = view_of(document)
    try:
        for verbosity in (-1, 0, 1):
            list(view.sections(verbosity))
        list(view.digest())
        if view.offers("rows"):
            list(view.rows())
        page = view.page()
        json.dumps(None if page is None else page.data, allow_nan=False)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def formats_of(kind: str) -> tuple[str, ...]:
    """Return the names of the formats that a kind of document supports."""
    view = view_class(kind)
    return tuple(name for name, form in FORMAT_REGISTRY.items() if view.offers(form.needs))


def check_format(kind: str, form: str) -> None:
    """Reject a format that a kind of document does not support.

    Raises:
        UsageError: The format is not supported; the message lists those that are.
    """
    *first, last = formats = formats_of(kind)
    if form not in formats:
        raise UsageError(
            f"a document of kind {kind!r} has no format {form!r}",
            hint=f"use --format {', '.join(first)} or {last}",
        )


def as_file(document: Renderable, form: str) -> str:
    """Return the document in a format.

    Args:
        document: Document of any kind.
        form: Name of a format in ``FORMAT_REGISTRY``.

    Raises:
        UsageError: See ``check_format``.
    """
    check_format(document.kind, form)
    module, _, function = FORMAT_REGISTRY[form].writer.partition(":")
    text: str = getattr(import_module(module), function)(document)
    return text


def write_document(document: Renderable, path: Path, form: str | None = None, *, force: bool) -> None:
    """Write a document in a format, by default that of the file's suffix.

    Raises:
        UsageError: This kind of document has no such format.
        OutputError: The file cannot be written; the document is kept elsewhere.
    """
    chosen = chosen_format(form, path, formats_of(document.kind))
    check_format(document.kind, chosen)
    with keeping(document):
        write_text(path, as_file(document, chosen), force=force)


@contextlib.contextmanager
def keeping(document: Renderable) -> Iterator[None]:
    """Save a result as JSON in a temporary file if its delivery fails; a note on the error names the file."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the pipe has closed it
    except Exception as error:
        if not any(note.startswith(_KEPT) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_KEPT} {_keep(document)}")
        raise


def _keep(document: Renderable) -> str:
    """Save a result under a name that depends on its content, and return a description of the place."""
    from ampaudit.render.json import to_json

    text = to_json(document)
    digest = hashlib.sha256(_TIMES.sub("", text).encode()).hexdigest()[:16]
    for folder in (tempfile.gettempdir, os.getcwd, Path.home):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            path = Path(folder(), f"ampaudit-{document.kind}-{digest}.json")
            write_private(path, text)
            return f"kept in {path}: ampaudit report {shell_quoted(str(path))} shows it"
    sys.stdout.write(text)
    sys.stdout.flush()
    return "printed as JSON, since no temporary file can be written"


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
        UsageError: The suffix belongs to none of the offered formats.
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
