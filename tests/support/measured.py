"""A pytest plugin that records the processor seconds of each test, and names it in the coverage data.

``pytest -p tests.support.measured`` with ``AMPAUDIT_TIMES=FILE`` appends a line of JSON for each test: its
name, and its seconds with those of child processes. Under coverage.py, each test is a context.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest


def _seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        assert current is not None
        current.switch_context(item.nodeid)
    start = _seconds()
    result = yield
    with open(os.environ["AMPAUDIT_TIMES"], "a", encoding="utf-8") as times:
        times.write(json.dumps([item.nodeid, round(_seconds() - start, 3)]) + "\n")
    return result
