"""Renders documents as terminal text, JSON, HTML, Markdown, SARIF, JUnit, GitHub annotations or CSV."""

from __future__ import annotations
