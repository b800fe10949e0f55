"""Removes from a document what differs between runs of the same code, and shows how two documents differ."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import torch

import ampaudit
from tests.support.paths import ROOT

_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_TIMES = re.compile(rf'("(?:seconds|least|most|peak_bytes|workspace_bytes)": ?){_NUMBER}')
_TABLES = re.compile(r'"(?:timings|seconds|versions)": ?\{[^{}]*\}')
_VALUES = re.compile(rf'(": ?)(?:{_NUMBER}|"[^"]*")')
_VERSIONS = re.compile(r'("(?:version|tool_version|torch|python)": ?)"\d[^"]*"')
# digests and sizes, in a manifest, of the files that hold times or places, and of the manifest itself
_DIGESTS = re.compile(
    r'("(?:report\.json|model\.pt2|model\.onnx|plan\.yaml)": )(?:\d+|\{[^{}]*\})|("self_sha256": )"\w+"'
    r'|("files": \d+,\s*"bytes": )\d+'
)
_SHOWN = 20  # lines of a difference
_WIDTH = 200


def without_paths(text: str, folder: Path) -> str:
    """Replace the paths of the case's folder, the installed packages and the checkout by placeholders."""
    for path, name in ((folder, "FOLDER"), (Path(sys.prefix), "PACKAGES"), (ROOT, "ROOT")):
        text = text.replace(os.path.realpath(path), name).replace(str(path), name)
    return text


def normalized(text: str, folder: Path) -> str:
    """Return a document without times, versions, and the paths of the checkout and the case's folder."""
    text = without_paths(text, folder)
    text = _TIMES.sub(r'\1"TIME"', text)
    text = _TABLES.sub(lambda table: _VALUES.sub(r'\1"VALUE"', table[0]), text)
    text = _VERSIONS.sub(r'\1"VERSION"', text)
    text = _DIGESTS.sub(lambda match: f'{match[1] or match[2] or match[3]}"DIGEST"', text)
    text = re.sub(r"\S*/ampaudit-(\w+)-[0-9a-f]{16}\b", r"TEMPORARY/\1", text)
    text = text.replace(torch.__version__, "VERSION")
    return text.replace(f"ampaudit {ampaudit.__version__}", "ampaudit VERSION")


def difference(name: str, old: str, new: str) -> str:
    """Return the first lines of a unified diff."""
    before, after = (_lines(text) for text in (old, new))
    diff = list(difflib.unified_diff(before, after, f"{name} (recorded)", name, n=2, lineterm=""))
    return "\n".join(diff[:_SHOWN] + ["[...]"] * (len(diff) > _SHOWN)) + "\n"


def _lines(text: str) -> list[str]:
    """Return the lines; long ones, such as JSON without line breaks, are wrapped after commas."""
    wrapped = (
        re.sub(r"(.{60,}?,)", r"\1\n", line) if len(line) > _WIDTH else line for line in text.split("\n")
    )
    return "\n".join(wrapped).split("\n")
