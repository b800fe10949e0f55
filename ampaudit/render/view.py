"""Defines the interface between documents and formats: sections, suites of findings, and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from ampaudit.core.text import escape_control
from ampaudit.render.blocks import Section
from ampaudit.render.findings import Suite

_CELLS = 40
# upper limits of headroom in bits, with colors that are legible on light and dark pages
_STEPS = ((1, "#e5734f"), (3, "#f4b183"), (6, "#c9dcec"), (10, "#8fbcdb"), (float("inf"), "#4a90c2"))
_BROKEN = "#b2182b"
D = TypeVar("D", bound="Renderable")
_VIEWS = "ampaudit.views"  # on a higher floor, so views are looked up by the name of the document's kind
Cell: TypeAlias = str | int | float | None
Row: TypeAlias = Mapping[str, Cell]


class Renderable(Protocol):
    """What formats need from a document itself; its view provides the rest."""

    @property
    def kind(self) -> str:
        """The kind of document, which names its view."""

    @property
    def headline(self) -> str:
        """The verdict and the subject in one line."""

    def card_rows(self) -> Iterable[tuple[object, ...]]:
        """Return the most important rows."""


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
        """Describe in a few words how the result was obtained."""
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


def view_class(kind: str) -> type[View[Any]]:
    """Return the view of a kind of document: ``ScanView`` of ``views/scan.py`` for ``scan``."""
    view: type[View[Any]] = getattr(import_module(f"{_VIEWS}.{kind}"), f"{kind.title()}View")
    return view


def view_of(document: Renderable) -> View[Any]:
    """Return the view of a document."""
    return view_class(document.kind)(document)


@dataclass(frozen=True, slots=True)
class Strip:
    """The headroom of 16-bit values in graph order.

    Attributes:
        label: Description of the values.
        cells: Headroom in bits, whether the value breaks, and its name.
    """

    label: str
    cells: tuple[tuple[float, bool, str], ...]


def strip_svg(strip: Strip) -> str:
    """Return a strip as SVG, merging neighboring cells into their worst if there are more than 40."""
    count = min(len(strip.cells), _CELLS)
    bounds = [index * len(strip.cells) // count for index in range(count + 1)]
    worst = [min(strip.cells[a:b], key=_rank) for a, b in pairwise(bounds)]
    bars, x = [], 0
    for (color, broken), group in groupby(worst, lambda cell: (_color(cell), cell[1])):
        width = len(list(run := [*group]))
        title = f"<title>{_name(run)}</title>" if broken else ""
        bars.append(f'<rect x="{x}" width="{width}" height="1" fill="{color}">{title}</rect>')
        x += width
    bits, _, name = min(strip.cells, key=_rank)
    caption = escape(f"{strip.label}: least {bits:.1f} bits at {_short(name)}")
    return (
        f'<svg role="img" aria-label="{caption}" viewBox="0 0 {count} 1" preserveAspectRatio="none" '
        f'width="100%">{"".join(bars)}</svg><p class="soft">{caption}</p>'
    )


def _rank(cell: tuple[float, bool, str]) -> tuple[bool, float]:
    return not cell[1], cell[0]


def _color(cell: tuple[float, bool, str]) -> str:
    bits, broken, _ = cell
    return _BROKEN if broken or bits < 0 else next(color for limit, color in _STEPS if bits < limit)


def _name(cells: Sequence[tuple[float, bool, str]]) -> str:
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return escape(f"{_short(cells[0][2])}{more}")


def _short(name: str) -> str:
    safe = escape_control(name)
    return safe if len(safe) <= 60 else f"…{safe[-59:]}"
