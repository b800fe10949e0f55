"""The pytest plugin. Pytest loads it wherever ampaudit is installed, so most imports are inside functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from ampaudit.report.model import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the default policy, the default dtype and a report directory."""
    parser.addini("ampaudit_policy", "policy of assert_safe, if the test names none", default="ampaudit")
    parser.addini("ampaudit_dtype", "dtype of assert_safe, if the test names none", default="float16")
    group = parser.getgroup("ampaudit")
    group.addoption(
        "--ampaudit-report",
        metavar="DIR",
        help="write each assert_safe's report to DIR, as JSON and HTML",
    )


@pytest.fixture
def assert_safe(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """``assert_safe(model, inputs, ...)``, with the project's defaults; see ``ampaudit.assert_safe``."""
    config = request.config
    folder = config.getoption("--ampaudit-report")
    start_directory = config.invocation_params.dir  # the test may change the working directory
    count = 0

    def checked(model: Any, inputs: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        from ampaudit.ci.assertion import UnsafeModel
        from ampaudit.ci.assertion import assert_safe as assertion

        nonlocal count
        count += 1
        options.setdefault("policy", _default_policy(config))
        options.setdefault("dtype", config.getini("ampaudit_dtype"))
        try:
            report = assertion(model, inputs, **options)
        except UnsafeModel as unsafe:
            if folder is not None:
                name = _write(unsafe.report, start_directory / folder, request.node.nodeid, count)
                unsafe.add_note(f"report written to {Path(folder, name)}")
            raise
        if folder is not None:
            _write(report, start_directory / folder, request.node.nodeid, count)
        return report

    return checked


def _default_policy(config: pytest.Config) -> str | Path:
    """Return the project's policy; the path of a rule file is relative to the ini file."""
    policy: str = config.getini("ampaudit_policy")
    beside = config.rootpath if config.inipath is None else config.inipath.parent
    return beside / policy if (beside / policy).is_file() else policy


def _write(report: Report, folder: Path, test: str, number: int) -> str:
    """Write a report as JSON and HTML, and return the name of the HTML file."""
    from ampaudit.core.files import write_text
    from ampaudit.render.render import as_file

    name = re.sub(r"[^\w.-]+", "-", test).strip("-")[-120:]
    if "[" in test:  # parameters may differ only in characters that are replaced
        name += f"-{crc32(test.encode()):08x}"
    name += f"-{number}" if number > 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    for form in ("json", "html"):
        write_text(folder / f"{name}.{form}", as_file(report, form), force=True)
    return f"{name}.html"
