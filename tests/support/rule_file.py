"""A rule file without mistakes."""

from __future__ import annotations

GOOD = """\
name: mine
title: a test
rules:
  - id: head
    match: {layer: ["head*"]}
    cast: float32
    reason: precision
    why: the head decides.
    source: this test
  - id: linear
    match: {op: [linear]}
    when: {dtype: [float16]}
    cast: lower
    reason: speed
    why: fast.
    source: this test
"""
