"""A pytest plugin that records the processor seconds of each test, and names it in the coverage data.

``pytest -p tests.support.measured`` with ``AMPAUDIT_TIMES=FILE`` appends a line of JSON for each test: its
name, its seconds with those of child processes, and what it shares with other tests (fixtures of a wider
scope, results of cached functions of the tests) by name, with the seconds that making it took, which are not
among its own. Under coverage.py, each test is a context.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_costs: dict[str, float] = {}  # seconds of what tests share
_used: set[str] = set()  # by this test
# seconds of this test that went into what others share, and a level for each part that is being made
_making: list[float] = [0.0]
_skipped: set[str] = set()  # tests, whose seconds say nothing
_LEAST = 0.01  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")


def _seconds() -> float:
    """Processor seconds of this process and of its children, those of a running fork server included."""
    spent = os.times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / _TICKS
    return total


@contextlib.contextmanager
def _shared(name: Callable[[], str]) -> Iterator[None]:
    start = _seconds()
    _making.append(0.0)
    yield
    del _making[-1]
    _costs[name()] = spent = _seconds() - start
    if len(_making) == 1:
        _making[0] += spent


def _recorded(function: Callable[..., Any], cache: Callable[..., Any] = functools.cache) -> Any:
    """Cache a function of the tests, and record what each result costs and who uses it."""
    if not function.__module__.startswith("tests."):
        return cache(function)

    def name(*args: Any, **kwargs: Any) -> str:
        return f"{function.__module__}.{function.__qualname__}{args, kwargs}"

    @cache
    def made(*args: Any, **kwargs: Any) -> Any:
        with _shared(lambda: name(*args, **kwargs)):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _used.add(name(*args, **kwargs))
        return made(*args, **kwargs)

    vars(called)["cache_clear"] = made.cache_clear
    return called


functools.cache = _recorded  # type: ignore[assignment]


def _name(fixture: pytest.FixtureDef[Any]) -> str:
    parameter = fixture.cached_result[1] if fixture.cached_result else ""
    return f"{fixture.baseid}::{fixture.argname}[{parameter}]"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with _shared(lambda: _name(fixturedef)):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        assert current is not None
        current.switch_context(item.nodeid)
    _used.clear()
    _making[:] = [0.0]
    start = _seconds()
    result = yield
    own = _seconds() - start - _making[0]
    if item.nodeid in _skipped:
        return result
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    _used.update(_name(definitions[-1]) for definitions in fixtures)
    shared = {name: round(_costs[name], 3) for name in sorted(_used) if _costs.get(name, 0.0) > _LEAST}
    with open(os.environ["AMPAUDIT_TIMES"], "a", encoding="utf-8") as times:
        times.write(json.dumps([item.nodeid, round(own, 3), shared]) + "\n")
    return result
