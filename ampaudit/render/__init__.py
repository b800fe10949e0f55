"""Turns a document into a format: terminal, JSON, HTML, Markdown, SARIF, JUnit, GitHub, CSV."""

from __future__ import annotations
