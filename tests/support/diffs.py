"""Unified diffs, applied."""

from __future__ import annotations

import re


def patched(text: str, diff: str) -> str:
    """A unified diff applied by the book: context and removed lines must stand where the hunk says."""
    old, new, at = text.split("\n"), list[str](), 0
    lines = diff.rstrip("\n").split("\n")[2:]
    for line in lines:
        if found := re.match(r"@@ -(\d+)", line):
            start = int(found[1]) - 1
            new += old[at:start]
            at = start
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert old[at] == line[1:], (old[at], line)
            new += [] if line.startswith("-") else [old[at]]
            at += 1
    return "\n".join([*new, *old[at:]])
