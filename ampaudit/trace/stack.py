"""Finds the lines of the model's code in a stack trace."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import forward_slashes

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>[0-9]{1,9}), in (?P<function>.+)$')
_PACKAGE = f"{Path(__file__).resolve().parents[1].as_posix()}/"
_NOT_A_MODEL = ("torch", "ampaudit")


@lru_cache(maxsize=1024)  # the layers of a stack run the same lines
def source_lines(stack_trace: str | None) -> tuple[SourceLine | None, SourceLine | None]:
    """Return the innermost frame of the model's code, and that of the user's own code.

    The first is the line that computes the value, in a library (Transformers, timm) or in the user's
    file; frames of torch and of ampaudit are skipped. The second is ``None`` unless it differs.
    """
    model: list[SourceLine] = []
    lines = (stack_trace or "").splitlines()
    for text, following in zip_longest(lines, lines[1:], fillvalue=""):
        match = _FRAME.match(text)
        if match and not is_tool_file(match["file"]):
            code = "" if _FRAME.match(following) else following.strip()
            model.append(SourceLine(forward_slashes(match["file"]), int(match["line"]), code))
    if not model:
        return None, None
    caller = next((frame for frame in reversed(model) if not is_library(frame.file)), model[-1])
    return model[-1], None if caller == model[-1] else caller


def model_frames(stack_trace: str) -> str:
    """Return a stack trace without the frames of torch and ampaudit."""
    lines: list[str] = []
    in_model = False
    for line in stack_trace.splitlines(keepends=True):
        if match := _FRAME.match(line):
            in_model = not is_tool_file(match["file"])
        if in_model:
            lines.append(line)
    return "".join(lines)


class ModelStack:
    """Stands in for torch's ``CapturedTraceback``, which looks up the code of some eighty frames for each op.

    It has only what ``source_lines`` reads: the frames of the model, from its first ``forward`` on.
    """

    @classmethod
    def extract(cls) -> ModelStack:
        """Return the stack of the current call."""
        return cls()

    def summary(self) -> traceback.StackSummary:
        """Return the frames, the outermost first."""
        frames = [
            traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
            for frame, line in traceback.walk_stack(sys._getframe(1))
            if frame.f_code.co_name == "forward" or not is_tool_file(frame.f_code.co_filename)
        ]
        frames.reverse()
        start = next((index for index, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(frames[start:])


def running_lines() -> tuple[SourceLine | None, SourceLine | None]:
    """Return the same two lines of the code that is running: of the model's forward, if there is one."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
    forwards = [index for index, (code, _) in enumerate(frames) if code.co_name == "forward"]
    inside = [(code.co_filename, line) for code, line in frames[: forwards[-1] + 1 if forwards else None]]
    model = [(file, line) for file, line in inside if not (is_tool_file(file) or file.startswith("<"))]
    if not model:
        return None, None
    caller = next((place for place in model if not is_library(place[0])), model[0])
    return code_line(*model[0]), None if caller == model[0] else code_line(*caller)


def calling_line() -> SourceLine | None:
    """Return the user's line that the current call comes from, or else the innermost of the model's code."""
    innermost, caller = running_lines()
    return caller or innermost


def code_line(file: str, line: int) -> SourceLine:
    """Return a line of a file, with its text if the file can be read."""
    return SourceLine(forward_slashes(file), line, linecache.getline(file, line).strip())


@cache
def is_tool_file(file: str) -> bool:
    """Return whether a file belongs to torch or ampaudit."""
    file = forward_slashes(file)
    return file.startswith(_PACKAGE) or any(f"/site-packages/{name}/" in file for name in _NOT_A_MODEL)


@cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed library or Python."""
    file = forward_slashes(file)
    standard = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    places = [forward_slashes(place) for place in standard if place]
    return "/site-packages/" in file or any(file.startswith(place) for place in places)


def library_path(file: str) -> str:
    """Return the path of a library's file within the place where libraries are installed."""
    return forward_slashes(file).rpartition("/site-packages/")[2]
