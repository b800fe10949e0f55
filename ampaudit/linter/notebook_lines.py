"""Finds the lines of a notebook's file, which is JSON, on which the lines of its cells stand."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["lines_of_cells"]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]')


@dataclass(slots=True)
class _Level:
    """An object or array around a token: its current key or index, and whether a key comes next."""

    is_object: bool
    key: str | int
    awaits_key: bool


def lines_of_cells(text: str) -> dict[int, list[int]]:
    """Return the line in the file of each line of each cell, by the cell's number from 1.

    Args:
        text: a notebook, which is valid JSON.
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    levels: list[_Level] = []
    line, end = 1, 0
    for token in _TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        end, word = token.start(), token[0]
        if word in "{[":
            levels.append(_Level(word == "{", "" if word == "{" else 0, word == "{"))
        elif word in "}]":
            levels.pop()
        elif word == ",":
            _next(levels[-1])
        elif levels and levels[-1].awaits_key:
            levels[-1].key, levels[-1].awaits_key = json.loads(word), False
        else:
            _take(found, [level.key for level in levels], json.loads(word), line)
    return dict(found)


def _next(level: _Level) -> None:
    level.awaits_key = level.is_object
    if isinstance(level.key, int):
        level.key += 1


def _take(found: dict[int, list[int]], path: list[str | int], value: str, line: int) -> None:
    """Note the lines of a string, if it is the source of a cell or a piece of it."""
    if len(path) in (3, 4) and path[0] == "cells" and path[2] == "source" and isinstance(path[1], int):
        rows = found[path[1] + 1]
        for number, text in enumerate(value.split("\n")):
            if number == 0 and rows and rows[-1]:
                continue  # the line began with the piece before
            if number == 0 and rows:
                rows.pop()
            rows.append(line if text or number < value.count("\n") else 0)  # 0: nothing is on it yet
