"""Writes ``ampaudit/__init__.pyi``: the public names, with the options of each function as keywords."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_overloads

import ampaudit
from ampaudit.core.config import Config, signature_with_options

STUB = Path(ampaudit.__file__).with_suffix(".pyi")
# names in annotations that the modules of the functions and records do not import
STANDARD = {"Any": "typing", "Callable": "collections.abc", "Literal": "typing", "Path": "pathlib"}
STANDARD |= {"Mapping": "collections.abc", "Sequence": "collections.abc", "overload": "typing"}


def stub_text() -> str:
    """Return the stub of the package."""
    imports: dict[str, str] = {}
    functions = []
    for name in sorted(ampaudit.__all__):
        value = getattr(ampaudit, name)
        if record := _record(value):
            functions.append(_definition(value, record))
            imports |= _names_in(value.__module__) | _names_in(record.__module__)
    body = "\n\n".join(functions)
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    imports = {name: module for name, module in (STANDARD | imports).items() if name in used}
    imports |= {name: "typing" for name in ("Any", "overload") if name in used}
    defined = {function.name for function in ast.parse(body).body if isinstance(function, ast.FunctionDef)}
    public = {name: _home(name) for name in ampaudit.__all__ if name not in defined}
    lines = [f"from {module} import {name}" for name, module in imports.items() if name not in public]
    lines += [f"from {module} import {name} as {name}" for name, module in public.items()]
    torch = ["import torch"] if "torch" in used else []
    return "\n".join([*torch, *sorted(lines, key=str.lower), "", body, ""])


def _record(function: Any) -> type[Config] | None:
    """Return the record whose fields are the options of a function, or ``None`` if it has none."""
    if not inspect.isfunction(function):
        return None
    if function is ampaudit.assert_safe:  # has no `config`, since its defaults differ from the record's
        return ampaudit.ScanConfig
    config = inspect.signature(function).parameters.get("config")
    return getattr(ampaudit, config.annotation.partition(" ")[0]) if config is not None else None


def _definition(function: Callable[..., Any], record: type[Config]) -> str:
    overloads = [inspect.signature(each) for each in get_overloads(function)]
    if not overloads:
        return f"def {function.__name__}{_signature(inspect.signature(function), record)}: ..."
    return "\n".join(
        f"@overload\ndef {function.__name__}{_signature(each, record)}: ..." for each in overloads
    )


def _signature(signature: inspect.Signature, record: type[Config]) -> str:
    whole = signature_with_options(signature, record)
    parts: list[str] = []
    for parameter in whole.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else " = ..."
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    return f"({', '.join(parts)}) -> {whole.return_annotation}"


def _names_in(module: str) -> dict[str, str]:
    """Return the module that defines each name of a module, including names imported for type checking."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    imported = {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return dict(_defined(tree, module)) | imported


def _defined(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, module
        elif isinstance(node, ast.Assign):
            yield from ((target.id, module) for target in node.targets if isinstance(target, ast.Name))


def _home(name: str) -> str:
    return str(ampaudit._MODULES[name])


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
