"""Runs audits and turns measurements into findings, proofs and advice."""

from __future__ import annotations
