"""Find the layers of a PyTorch model that overflow in 16 bits.

The public names and where they come from stand in ``__init__.pyi``. They are loaded on first use, so that
``import ampaudit`` and ``ampaudit --help`` never import torch.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # the program handles interrupts once this is imported, so this is fast
    from typing import Any

_HOMES: dict[str, tuple[str, str]] = {}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = _homes()
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module 'ampaudit' has no attribute {name!r}")
    module, original = homes[name]
    return getattr(import_module(module), original)


def __dir__() -> list[str]:
    return sorted(_homes())


def _homes() -> dict[str, tuple[str, str]]:
    """Read where each public name comes from, once."""
    if not _HOMES:
        import ast
        from pathlib import Path

        stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
        for node in stub.body:
            if isinstance(node, ast.ImportFrom):
                _HOMES.update({a.asname or a.name: (node.module or "", a.name) for a in node.names})
    return _HOMES
