from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from ampaudit.core.errors import AuditError
from ampaudit.render.render import as_file, formats_of
from ampaudit.report.documents import parse_document
from tests.support.saved import SAMPLES, sample

HOSTILE = "\u202e\x1b[31m\n::error::x"
_RAW = ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.parametrize(
    "kind",
    list(SAMPLES),
)
def test_no_text_of_a_report_is_printed_raw(kind: str) -> None:
    saved = json.loads(as_file(sample(kind), "json"))
    tried = 0
    for path in _texts(saved):
        changed = _changed(saved, path)
        try:
            document = parse_document(json.dumps(changed), "report")
            texts = {form: as_file(document, form) for form in formats_of(document.kind)}
        except AuditError:
            continue  # not a text but a choice, and refused
        tried += 1
        for form, text in texts.items():
            raw = {c for c in text if unicodedata.category(c) in _RAW} - {"\n", "\t"}
            assert not raw, f"{form}: {path}"
            assert form != "github" or "\n::error::x" not in text, path
        assert json.loads(texts["json"]) == changed
    assert tried > 3


def _texts(value: Any) -> Iterator[tuple[Any, ...]]:
    """Return the place of each text, of one item of each list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ((key, *path) for path in _texts(item))
    elif isinstance(value, list) and value:
        yield from ((0, *path) for path in _texts(value[0]))
    elif isinstance(value, str):
        yield ()


def _changed(document: Any, path: tuple[Any, ...]) -> Any:
    made = deepcopy(document)
    place = made
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = HOSTILE
    return made
