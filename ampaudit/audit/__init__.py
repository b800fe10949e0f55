"""Runs an audit and turns what it measured into findings, proofs and advice."""

from __future__ import annotations
