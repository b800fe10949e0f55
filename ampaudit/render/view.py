"""Defines the interface between documents and formats: sections, suites of findings, and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from ampaudit.core.text import escape_control
from ampaudit.render.blocks import Section
from ampaudit.render.findings import Suite
from ampaudit.render.strip import Strip
from ampaudit.report.documents import Document

__all__ = ["Cell", "Row", "View", "ViewPage"]

D = TypeVar("D", bound=Document)
Cell: TypeAlias = str | int | float | None
Row: TypeAlias = Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class ViewPage:
    """The content of a document's own HTML page.

    Attributes:
        template: File name of the template.
        scripts: File names, in the order in which they are concatenated.
        data: JSON-serializable input of the scripts.
        values: Variables of the template.
    """

    template: str
    scripts: Sequence[str]
    data: Any
    values: Mapping[str, Any]


class View(ABC, Generic[D]):
    """The view of one document; subclasses implement ``sections``, and the other parts they support.

    Attributes:
        about: Dotted path of the field that names the subject of the document.
        columns: Names of the cells of ``rows``, for documents that may have none.
        document: The document.
    """

    about: ClassVar[str] = ""
    columns: ClassVar[Sequence[str]] = ()

    def __init__(self, document: D) -> None:
        self.document = document

    @property
    def name(self) -> str:
        """The subject of the document; safe to print."""
        if not self.about:
            return f"ampaudit {self.document.kind}"
        return escape_control(attrgetter(self.about)(self.document))

    @property
    def title(self) -> str:
        """The name without the directories of an absolute path; safe to print."""
        path = PureWindowsPath(self.name) if PureWindowsPath(self.name).drive else PurePosixPath(self.name)
        return path.name if path.is_absolute() and path.name else self.name

    def verdict(self) -> tuple[str, str]:
        """Return ``PASS``, ``WARN``, ``FAIL`` or nothing, and the rest of the headline; safe to print."""
        word, _, rest = escape_control(self.document.headline).partition(" ")
        return (word, rest) if word in ("PASS", "WARN", "FAIL") else ("", f"{word} {rest}".rstrip())

    @property
    def gate(self) -> str:
        """The gate and the option that sets it, as ``fail (--fail-on error)``; empty without a gate."""
        gate = getattr(self.document, "gate", "")
        rule = getattr(self.document, "fail_on", "")
        return f"{gate} (--fail-on {rule})" if rule else gate

    def subject(self) -> str:
        """Describe in a few words how the document was made."""
        return self.document.kind

    def strips(self) -> Iterable[Strip]:
        """Return strips of headroom over depth."""
        return ()

    @abstractmethod
    def sections(self, verbosity: int = 0) -> Iterable[Section]:
        """Render the document for people; verbosity -1 is the verdict alone, 1 is everything."""

    def suites(self) -> tuple[Suite, ...]:
        """Return findings by suite, for code hosts and test runners."""
        raise NotImplementedError

    def rows(self) -> Iterable[Row]:
        """Return a flat table for spreadsheets and data frames."""
        raise NotImplementedError

    def digest(self) -> Iterable[Section | Suite]:
        """Return a summary for a review."""
        return self.suites() if self.offers("suites") else self.sections()

    def page(self) -> ViewPage | None:
        """Return the document's own HTML page; ``None`` for a page made from the sections."""
        return None

    @classmethod
    def offers(cls, part: str) -> bool:
        """Return whether this kind of document implements a part, such as ``suites`` or ``rows``."""
        return part not in ("suites", "rows") or getattr(cls, part) is not getattr(View, part)
