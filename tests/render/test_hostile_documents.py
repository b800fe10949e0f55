"""Documents whose every text is hostile: whoever reads a format finds only what that format says.

The readers are not ours: html.parser, ElementTree, csv, json, markdown-it, and what GitHub's runner takes for
a command.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from typing import Any
from unicodedata import category
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from ampaudit.cli import program
from ampaudit.core.errors import InputError, WeightsError
from ampaudit.core.text import escape_control
from ampaudit.render.json import to_json
from ampaudit.render.render import as_file, formats_of
from ampaudit.report.documents import Document, parse_document
from tests.support.saved import SAMPLES, sample

Path = tuple[str | int, ...]
TEXTS = (
    "\n::error file=a.py::pwned",
    "::add-mask::x",
    "  ::stop-commands::x",
    "%0A::error::x",
    "##[error]x",
    "\r##vso[task.x]y",
    "##teamcity[x]",
    "=cmd|'/c calc'!A1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\uff1d1+1",
    "[bold red]x[/bold red]",
    "[link=http://x]y[/link]",
    "[/]",
    "\x1b]8;;http://x\x07y\x1b]8;;\x07",
    "\x1b[2J",
    "\x9b31m",
    "\u202etxt.exe",
    "\u2028x\u2029y\x85z",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\" onclick=alert(1) x='",
    "javascript:alert(1)",
    "]]><x/>",
    "<!--",
    "-->",
    "&lt;b&gt;",
    "```\n<b>x</b>\n```",
    "`x`|y|",
    "| a |\n|---|\n| <b> |",
    "[x](javascript:alert(1))",
    "![x](http://x)",
    "www.example.com",
    "http://example.com",
    "@somebody #1 a@b.c",
    "# x",
    "> x",
    "1. x",
    "- x",
    "<b>",
    "{{7*7}}{% x %}",
    "\x00",
    "\ufeff",
    "\u200bx",
    "🙂",
    "x" * 3000,
    " ",
    "",
    "\n\n\n",
    "x" * 99 + "::error::y",
    "x " * 40 + "::error file=a::y",
    "::",
    ":",
    "##",
    "[x]",
)
hostile = st.one_of(
    st.sampled_from(TEXTS), st.text(max_size=20), st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)
)


def leaves(value: Any, path: Path = (), of: tuple[type, ...] = (str,)) -> Iterator[Path]:
    """The paths of all texts, or of other values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key), of)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index), of)
    elif isinstance(value, of) and not isinstance(value, bool):
        yield path


def shape_of(path: Path) -> Path:
    return tuple(0 if isinstance(part, int) else part for part in path)


def with_text(document: Any, paths: list[Path], text: str | float | None) -> Any:
    changed = json.loads(json.dumps(document))
    for path in paths:
        inner = changed
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = text
    return changed


def accepted(document: Any) -> bool:
    try:
        parse_document(json.dumps(document), "r.json")
    except InputError:
        return False
    return True


@cache
def free_texts(kind: str) -> tuple[Any, list[Path]]:
    """A document, short, and the paths of its texts that may be any."""
    document = json.loads(to_json(sample(kind)))
    for name in ("sites", "findings", "rows"):
        if isinstance(document.get(name), list):
            document[name] = document[name][:4]
    paths = list(leaves(document))
    shapes = {shape_of(path): path for path in paths}
    free = {shape for shape, path in shapes.items() if accepted(with_text(document, [path], "x y"))}
    assert len(free) > 3
    return document, [path for path in paths if shape_of(path) in free]


def hostile_document(kind: str, text: str) -> Document:
    document, paths = free_texts(kind)
    found = parse_document(json.dumps(with_text(document, paths, text)), "r.json")
    assert found.kind == kind
    return found


# what GitHub's runner takes for a command: "::name" at the start of a line, and "##[name" anywhere in it
# docs.github.com, "Workflow commands"; others are text to the runner
COMMANDS = "add-mask|add-matcher|debug|echo|endgroup|error|group|notice|save-state|set-env|set-output|warning"
COMMAND = re.compile(rf"^\s*::({COMMANDS})\b|##\w*\[", re.MULTILINE | re.IGNORECASE)


def assert_printable(text: str) -> None:
    strange = {
        char for char in text if char != "\n" and (category(char)[0] == "C" or category(char) in ("Zl", "Zp"))
    }
    assert not strange


def assert_no_command(text: str) -> None:
    assert not COMMAND.findall(text)


def check_text(text: str) -> None:
    assert_printable(text)
    assert_no_command(text)


def check_github(text: str) -> None:
    assert_printable(text)
    for line in text.splitlines():
        if line.startswith("::"):
            assert re.match(r"::(error|warning|notice) (?:(?:file|line|col|title)=[^:,]*,?)+::", line)
        else:
            assert_no_command(line)
    assert "##[" not in text


def check_csv(text: str) -> None:
    assert_printable(text)
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} in ({len(rows[0])} if rows else set(), {len(row) for row in rows[:1]})
    numbers = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|-inf", re.IGNORECASE)
    for row in rows:
        for cell in row:
            assert not re.match(r"[=+\-@\t\r＝＋－＠]", cell) or numbers.fullmatch(cell)


def check_json(text: str) -> None:
    assert json.loads(text)["schema"] == 1


def check_xml(text: str) -> None:
    assert_printable(text)
    root = ElementTree.fromstring(text)
    assert {element.tag for element in root.iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "error", "system-out", "properties", "property"),
    }  # fmt: skip


def check_sarif(text: str) -> None:
    assert_printable(text)
    for run in json.loads(text)["runs"]:
        for result in run["results"]:
            assert not re.search(r"(?<!\\)\]\(", result["message"]["text"])


def check_markdown(text: str) -> None:
    assert_printable(text)
    reader = MarkdownIt("gfm-like", {"html": True, "linkify": False}).disable("linkify")
    tags = set(re.findall(r"</?([a-zA-Z!][\w-]*)([^>]*)>", reader.render(text)))
    assert {name for name, _ in tags} <= {
        *("h1", "h2", "h3", "h4", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "pre"),
        *("ul", "ol", "li", "sub", "details", "summary", "br", "em", "strong", "hr", "blockquote"),
    }  # fmt: skip
    assert all(
        re.fullmatch(
            r'|\s*/|\s(?:style="text-align:\w+"|class="language-(?:diff|yaml|python)"|start="\d+")', rest
        )
        for _, rest in tags
    )


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[str] = []
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data


def check_html(text: str) -> None:
    page = Page()
    page.feed(text)
    page.close()
    assert not any(name.startswith("on") for _, names in page.tags for name in names)
    assert all(re.match(r"#|https?://|$", link) for link in page.links)
    assert not any(
        tag in ("img", "iframe", "object", "embed", "base", "form", "link", "x") for tag, _ in page.tags
    )
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\u2028\u2029]", text)


CHECKS = {
    "text": check_text,
    "github": check_github,
    "csv": check_csv,
    "json": check_json,
    "junit": check_xml,
    "sarif": check_sarif,
    "markdown": check_markdown,
    "html": check_html,
}


def check(document: Document) -> None:
    for form in formats_of(document.kind):
        assert form in CHECKS, f"add a reader of {form} that is not ours to CHECKS"
        CHECKS[form](as_file(document, form))


@pytest.mark.parametrize("kind", list(SAMPLES))
def test_known_tricks_are_only_text(kind: str) -> None:
    for text in TEXTS:
        check(hostile_document(kind, text))


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=10)
@given(hostile)
def test_no_text_is_more_than_text(kind: str, text: str) -> None:
    check(hostile_document(kind, text))


NUMBERS = st.one_of(
    st.none(),
    st.sampled_from((0, -1, 1, 5e-324, 1e308, -1e308, 1e-9, 1e4, 10**18)),
    st.floats(allow_nan=False, allow_infinity=False),
)


@cache
def tuning_numbers() -> tuple[Any, list[Path]]:
    """A document, and the paths of its numbers."""
    document = json.loads(to_json(sample("tuning")))
    kinds = (int, float, type(None))
    paths = [path for path in leaves(document, of=kinds) if path[0] not in ("schema", "inputs")]
    return document, paths


@settings(max_examples=12)
@given(st.data())
def test_no_number_breaks_a_format(data: st.DataObject) -> None:
    document, paths = tuning_numbers()
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=12)):
        changed = with_text(document, [path], data.draw(NUMBERS))
        document = changed if accepted(changed) else document  # no null where a number is needed
    found = parse_document(json.dumps(document), "r.json")
    check(found)
    assert json.loads(as_file(found, "json")) == document
    found._repr_html_()


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map("".join))
def test_an_error_about_a_hostile_file_is_only_text(text: str) -> None:
    def failing(**_: object) -> None:
        raise WeightsError(text, hint=text)

    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stream):
        patch.setattr(program.main, "main", failing)
        assert program.run_command() == 2
    check_text(stream.getvalue())


@given(st.text())
def test_escaping_twice_is_escaping_once(text: str) -> None:
    once = escape_control(text)
    assert escape_control(once) == once
    assert_printable(once)


@pytest.mark.parametrize("name", ["aten::linear", "torch::nn::Linear", "# a ## b", "a::b::c", "x ## [y]"])
def test_names_of_cpp_and_headings_stay_as_they_are(name: str) -> None:
    assert escape_control(name) == name
