"""Shared foundations: errors, number formats, sites, text and files."""

from __future__ import annotations
