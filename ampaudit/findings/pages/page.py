"""Reads the documentation of checks: one Markdown page per code, with the same headings each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from ampaudit.core.errors import UsageError, did_you_mean

Kind = Literal[
    "overflow",
    "underflow",
    "nan",
    "precision",
    "domain",
    "constant",
    "weights",
    "gradient",
    "performance",
    "uncovered",
    "loop",
]
Level = Literal["error", "warning", "note"]
SECTIONS = ("What it says", "Why it is bad", "Bad example", "Good example", "When to ignore it")
OPTIONAL_SECTIONS = ("How often it is right", "How safe is the fix", "References")
LINTED = "AMP8"  # prefix of the codes that `ampaudit lint` reports
_FAMILIES = {
    "1": "range of forward values",
    "2": "underflow and precision",
    "3": "constants and dtypes",
    "4": "weights",
    "5": "performance",
    "6": "policy and conversion",
    "7": "gradients",
    "8": "training loops (ampaudit lint)",
    "9": "coverage and suppressions",
}
_PLACE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Example:
    """An example file, and the options of the command to run on it, such as ``policy=half``."""

    code: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """The documentation of a check.

    Attributes:
        code: Code such as ``AMP106``, which is never reused for another check.
        title: Title of a few words, which reports print after the code.
        severity: Usual severity of its findings; those that matter less on this input are notes.
        kind: Kind of fault.
        text: The whole page as Markdown.
        bad: An example on which the check fires.
        good: The same example without the fault.
    """

    code: str
    title: str
    severity: Level
    kind: Kind
    text: str
    bad: Example
    good: Example


def family(code: str) -> str:
    """Return what the checks with the same hundreds digit are about."""
    return _FAMILIES[code[3]]


def command_of(code: str, example: Example) -> str:
    """Return the command that reproduces an example saved as ``model.py``."""
    if code.startswith(LINTED):
        return "ampaudit lint model.py"
    options = {name: value for name, value in example.options.items() if name != "crash"}
    words = ["ampaudit", "train" if options.pop("train", "") else "scan", "model.py"]
    if mode := options.pop("mode", ""):
        words.append(f"--{mode}")
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}" + ("" if value == "true" else f" {value}"))
    return " ".join(words)


def page_of(code: str) -> Page:
    """Return the page of a check.

    Raises:
        UsageError: No check has that code.
    """
    pages = all_pages()
    if code.upper() not in pages:
        hint = did_you_mean(code.upper(), pages).strip() or "ampaudit explain lists all codes"
        raise UsageError(f"no check has the code {code!r}", hint=hint)
    return pages[code.upper()]


def codes_beginning(prefix: str) -> tuple[str, ...]:
    """Return the codes of all checks that begin with ``prefix``, such as AMP1.

    Raises:
        UsageError: No code begins with it.
    """
    codes = tuple(code for code in all_pages() if code.startswith(prefix.upper()))
    return codes or (page_of(prefix).code,)


def title_of(code: str, otherwise: str) -> str:
    """Return the title of a page, or ``otherwise`` for a code that this version does not know."""
    page = all_pages().get(code)
    return page.title if page is not None else otherwise


class _Pages(Mapping[str, Page]):
    """Every page by code, in order; a page is read when it is first looked up."""

    def __init__(self) -> None:
        self._paths = {path.stem: path for path in sorted(_PLACE.glob("AMP*.md"))}
        self._pages: dict[str, Page] = {}

    def __getitem__(self, code: str) -> Page:
        if code not in self._pages:
            self._pages[code] = parse_page(self._paths[code].read_text(encoding="utf-8"))
        return self._pages[code]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@cache
def all_pages() -> Mapping[str, Page]:
    """Return every page by code, in order."""
    return _Pages()


def code_titles() -> Iterator[tuple[str, str]]:
    """Return every code with its title, without reading the pages."""
    for code in all_pages():
        with (_PLACE / f"{code}.md").open(encoding="utf-8") as file:
            yield code, file.readline().partition(":")[2].strip()


def parse_page(text: str) -> Page:
    """Parse the Markdown of a page: ``# CODE: title``, ``severity, kind``, then its sections.

    Raises:
        ValueError: A part is missing or out of place.
    """
    from markdown_it import MarkdownIt

    tokens = MarkdownIt().parse(text)
    headings = [(t.tag, tokens[i + 1].content) for i, t in enumerate(tokens) if t.type == "heading_open"]
    fences = [token for token in tokens if token.type == "fence"]
    title = headings[0][1]
    names = tuple(name for tag, name in headings if tag == "h2")
    further = tuple(name for name in OPTIONAL_SECTIONS if name in names)
    if names != (*SECTIONS, *further) or len(fences) != 2:
        raise ValueError(
            f"{title}: a page has the sections {SECTIONS}, then {OPTIONAL_SECTIONS}, and two examples"
        )
    code, _, words = title.partition(": ")
    severity, kind = tokens[4].content.split(", ")
    if severity not in get_args(Level) or kind not in get_args(Kind):
        raise ValueError(
            f"{title}: its second line is a severity of {get_args(Level)} and a kind of {get_args(Kind)}"
        )
    bad, good = (
        # options follow the language: ``python policy=half dtype=bfloat16``
        Example(fence.content, dict(word.split("=", 1) for word in fence.info.split()[1:]))
        for fence in fences
    )
    return Page(code, words, cast(Level, severity), cast(Kind, kind), text, bad, good)
