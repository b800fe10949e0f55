"""Every kind of document in every format: written, or refused with the formats that it has."""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest
from junitparser import JUnitXml

from ampaudit.core.errors import UsageError
from ampaudit.render.blocks import Table
from ampaudit.render.render import FORMAT_REGISTRY, as_file, for_terminal, formats_of
from ampaudit.render.view import View, view_of
from ampaudit.report.documents import DOCUMENTS, json_schema, parse_document
from ampaudit.report.steps import StepReport, StepsReport
from ampaudit.views.scan_tables import step_section
from tests.support.paths import ROOT
from tests.support.saved import SAMPLES, sample, saved

RENDER, VIEWS = ROOT / "ampaudit" / "render", ROOT / "ampaudit" / "views"
ALWAYS = {"text", "json", "html", "markdown"}
WITH_FINDINGS = {"scan", "comparison", "check", "training", "lint"}


def test_every_document_has_a_view_and_a_sample() -> None:
    assert DOCUMENTS.keys() == SAMPLES.keys()
    views = {path.stem for path in VIEWS.glob("*.py") if "View(View[" in path.read_text(encoding="utf-8")}
    assert views == DOCUMENTS.keys()
    for kind in DOCUMENTS:
        assert isinstance(view_of(sample(kind)), View)
        assert type(sample(kind)) is DOCUMENTS[kind]
        assert sample(kind).kind == kind


def test_every_format_has_a_writer_and_is_made_from_a_part_of_the_view() -> None:
    for form in FORMAT_REGISTRY.values():
        module, _, function = form.writer.partition(":")
        assert callable(getattr(import_module(module), function))
        assert form.needs == "document" or callable(getattr(View, form.needs))


@pytest.mark.parametrize("form", FORMAT_REGISTRY)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_is_written_or_refused_with_what_it_can_be(kind: str, form: str) -> None:
    document = sample(kind)
    known = formats_of(document.kind)
    if form not in known:
        with pytest.raises(UsageError) as caught:
            as_file(document, form)
        assert f"{kind!r} has no format {form!r}" in str(caught.value)
        assert caught.value.hint == f"use --format {', '.join(known[:-1])} or {known[-1]}"
        return
    text = as_file(document, form)
    assert text.endswith("\n") or form == "html"
    if form == "json":
        assert json.loads(text)["kind"] == kind
        assert parse_document(text, kind) == document
    elif form == "html":
        assert text.startswith("<!doctype html>")
        assert text.rstrip().endswith("</html>")
    elif form == "csv":
        assert len({len(row) for row in csv.reader(io.StringIO(text))}) == 1
    elif form == "junit":
        assert JUnitXml.fromstring(text.encode()).tests > 0
    elif form == "sarif":
        assert json.loads(text)["runs"]
    else:
        assert text.strip()


@pytest.mark.parametrize(
    ("kind", "field"), [("lint", "findings"), ("verification", "problems"), ("diff", "pairs")]
)
def test_a_table_without_rows_has_its_head(kind: str, field: str) -> None:
    full = sample(kind)
    empty = replace(full, **{field: ()})  # type: ignore[arg-type]
    assert as_file(empty, "csv") == as_file(full, "csv").splitlines(keepends=True)[0]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_which_formats_a_document_has(kind: str) -> None:
    known = set(formats_of(kind))
    assert known >= ALWAYS
    assert ({"sarif", "junit", "github"} <= known) == (kind in WITH_FINDINGS)
    assert ("csv" in known) == (kind != "conversion")


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_terminal_shows_every_document(kind: str, verbosity: int) -> None:
    assert for_terminal(sample(kind), verbosity) is not None


def test_a_plan_begins_with_what_it_is_a_plan_of() -> None:
    text = as_file(saved("plan"), "text")
    assert text.splitlines()[0].startswith("plan  ")


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_json_follows_the_schema_of_its_kind(kind: str) -> None:
    schema = json_schema(kind)
    assert {"kind", "schema"} <= schema["properties"].keys()
    jsonschema.Draft202012Validator(schema).validate(json.loads(as_file(sample(kind), "json")))


def questions(path: Path) -> Iterator[str]:
    """Names of documents that a module asks a value for: ``isinstance``, ``case Name():``, ``type(x) is``."""
    names = {document.__name__ for document in DOCUMENTS.values()}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare):
            asked = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            yield from (".kind" for n in asked if ast.unparse(n) == "document.kind")
        yield from (n.id for n in asked if isinstance(n, ast.Name) and n.id in names)


@pytest.mark.parametrize(
    "path",
    sorted((*RENDER.rglob("*.py"), *VIEWS.glob("*.py"))),
    ids=lambda p: str(p.relative_to(ROOT / "ampaudit")),
)
def test_no_format_asks_what_kind_of_document_it_is(path: Path) -> None:
    assert list(questions(path)) == []


def test_the_table_of_steps_has_the_worst_of_them() -> None:
    """Also between the steps that it would show anyway; an output that should be zero and is not is wrong."""
    rows = [StepReport(n, 60.0, "output", 5.0, "a/mul") for n in range(1, 101)]
    rows[36] = replace(rows[36], accuracy_db=12.0)
    rows[72] = replace(rows[72], headroom_bits=0.5, headroom_at="b/add")
    rows[99] = replace(rows[99], accuracy_db=None)
    rows[0] = replace(rows[0], accuracy_db=None, output="")
    table, *_ = step_section(StepsReport(1, tuple(rows), (), "")).blocks
    assert isinstance(table, Table)
    shown = {str(row[0]): list(map(str, row[1:4])) for row in table.rows}
    assert shown["37"] == ["12 dB", "5.0 bits", "a/mul"]
    assert shown["73"] == ["60 dB", "0.5 bits", "b/add"]
    assert shown["1"][0] == "exact"
    assert shown["100"][0] == "wrong"
    assert len(shown) < 15
