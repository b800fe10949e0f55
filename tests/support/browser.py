"""A real headless Chromium for tests of pages, if the machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

Open = Callable[..., Any]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def chromium(tools: Any) -> str | None:
    """The program: the one that AMPAUDIT_CHROMIUM names, the first that is installed, or Playwright's own."""
    named = os.environ.get("AMPAUDIT_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    own: str = tools.chromium.executable_path
    return found or (own if os.path.exists(own) else None)


@contextmanager
def browser() -> Iterator[Any]:
    """A running browser; skips the test, with a reason, where there is none."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        path = chromium(tools)
        if path is None:
            pytest.skip("no Chromium on this machine: make browser")
        started = tools.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()
