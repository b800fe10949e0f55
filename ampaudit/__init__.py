"""Find the layers of a PyTorch model that overflow in 16 bits.

The public names and where they come from stand in ``__init__.pyi``. They are loaded on first use, so that
``import ampaudit`` and ``ampaudit --help`` never import torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_HOMES)
_RENAMED = {"ConvertOptions": "ConvertConfig", "Watch": "TrainingMonitor", "convert_model": "convert"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        new = f"; it is now ampaudit.{_RENAMED[name]}" if name in _RENAMED else ""
        raise AttributeError(f"module 'ampaudit' has no attribute {name!r}{new}")
    module, original = _HOMES[name]
    return getattr(import_module(module), original)


def __dir__() -> list[str]:
    return __all__
