"""Runs one request of a ``Sandbox`` in the confined process."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ampaudit.core import confinement
from ampaudit.core.errors import AuditError
from ampaudit.core.sandbox import ANSWER

_MAX_WORDS = 160  # characters of a third-party error
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc")


def _answer(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Import the target, confine this process, and return the answer or the error."""
    limits = order["limits"]
    attempts: list[str] = []
    try:
        for needed in order["imports"]:
            import_module(needed)
        work = resolve_name(order["target"])(order["request"])
        confinement.confine_process()
        confinement.limit_resources(limits["memory"], limits["processor_seconds"])
        confinement.watch_calls(folder, attempts.append)
        answer = {"answer": work()}
    except AuditError as error:
        answer = {"error": str(error.args[0]), "hint": error.hint}
    except BaseException as error:
        words = " ".join(str(error).split())[:_MAX_WORDS]
        too_much = isinstance(error, MemoryError) or any(text in words for text in _OUT_OF_MEMORY)
        text = "reading it takes too much memory" if too_much else f"{type(error).__name__}: {words}"
        answer = {"error": text, "hint": ""}
    if attempts:
        return {"error": f"reading it would {attempts[0]}", "hint": ""}
    return answer


def answer_request() -> None:
    """Answer a request; the arguments are its file and the only folder that may be written to."""
    order, folder = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    confinement.confine_files(folder)
    part = folder / f"{ANSWER}.part"
    part.write_text(json.dumps(_answer(order, folder)), encoding="utf-8")
    part.replace(folder / ANSWER)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to clean up
