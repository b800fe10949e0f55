"""The `onnx` package's own tests of operators, run through our importer."""

from __future__ import annotations

from tests.source.onnx.page import PLACE, page, share
from tests.support.onnx_known_failures import KNOWN_FAILURES
from tests.support.onnx_nodes import node_tests


def test_the_node_tests_pass() -> None:
    """All but the known ones, of which none passes; the page of the docs says the same."""
    failures = {test.name: test.failure() for test in node_tests()}
    failed = {name: said for name, said in failures.items() if said is not None}
    assert {n: s for n, s in failed.items() if n not in KNOWN_FAILURES} == {}
    assert sorted(KNOWN_FAILURES.keys() - failed.keys()) == [], "these pass, or are gone: list them no more"
    found = share(failures)
    assert found["tests"] > 1000
    assert found["supported_passed"] >= 0.95 * found["supported"]
    assert PLACE.read_text(encoding="utf-8") == page(failures), "python -m tests.source.onnx.page"
