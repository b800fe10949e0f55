"""Audits as assertions, for test suites: ``assert_safe``, and a fixture of the same name for pytest."""

from __future__ import annotations
