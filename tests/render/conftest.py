"""Pages in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampaudit.render.html.page import to_html
from ampaudit.report.documents import Document
from tests.support.browser import Open, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture
def page_of(chromium: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a report; at the end no error may have been logged, and nothing but the file been asked for."""
    contexts: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def opened(document: Document, *, width: int = 1280, scheme: str = "light", csp: bool = True) -> Any:
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(to_html(document), encoding="utf-8")
        view = {"width": width, "height": 900}
        context = chromium.new_context(viewport=view, color_scheme=scheme, bypass_csp=not csp)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.locator("main").wait_for(state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith(("file://", "blob:", "data:")) for url in asked), asked
