"""Renames ``torch.cuda.amp`` to ``torch.amp``, whose functions and classes take the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import libcst as cst

from ampaudit.linter.diagnostic import Fix

__all__ = ["AmpRenames"]

Node: TypeAlias = Any  # see lint.fixes
# positional arguments of the old names; in the new ones the device comes first, and the order differs
_POSITIONAL: Final = {"autocast": ("enabled", "dtype", "cache_enabled")}


class AmpRenames:
    """The renames in one script: whole imports with every use of their names, and single uses.

    Args:
        fixes: the fixes of kind ``rename import`` and ``rename use``.
    """

    def __init__(self, fixes: Sequence[Fix]) -> None:
        self.imported: dict[str, tuple[str, str]] = {}  # name in the script: name in torch.amp, device
        self.uses: dict[str, tuple[str, str]] = {}  # dotted text: the same
        for fix in fixes:
            device = fix.details[0]
            if fix.kind == "rename use":
                self.uses[fix.details[2]] = (fix.details[1], device)
            else:
                for detail in fix.details[1:]:
                    name, _, local = detail.partition("=")
                    self.imported[local] = (name, device)

    def apply(self, original: Node, node: Node) -> Node:
        """Return a node with the new names."""
        if not self.imported and not self.uses:
            return node
        if isinstance(original, cst.ImportFrom):
            return self._import(node)
        if isinstance(original, cst.Call):
            return self._call(original, node)
        if isinstance(original, cst.Decorator) and not isinstance(original.decorator, cst.Call):
            known = self._new_name(original.decorator)
            if known is not None:
                return node.with_changes(decorator=self._call_new(node.decorator, known, []))
        return node

    def _import(self, node: Node) -> Node:
        if isinstance(node.names, cst.ImportStar) or not self.imported:
            return node
        local = [(a.asname.name.value if a.asname else a.name.value) for a in node.names]
        module = _dotted(node.module) if node.module is not None else ""
        if all(name in self.imported for name in local) and module.startswith(
            ("torch.cuda.amp", "torch.cpu.amp")
        ):
            return node.with_changes(module=cst.parse_expression("torch.amp"))
        return node

    def _new_name(self, func: Node) -> tuple[str, str] | None:
        text = _dotted(func)
        return self.uses.get(text) or (self.imported.get(text) if isinstance(func, cst.Name) else None)

    def _call(self, original: cst.Call, node: Node) -> Node:
        known = self._new_name(original.func)
        return node if known is None else self._call_new(node.func, known, list(node.args))

    def _call_new(self, func: Node, known: tuple[str, str], arguments: list[cst.Arg]) -> cst.Call:
        name, device = known
        if not isinstance(func, cst.Name):
            func = cst.parse_expression(f"torch.amp.{name}")
        value = cst.SimpleString(f'"{device}"')
        if name.startswith("custom_"):
            bare = cst.Arg(value, keyword=cst.Name("device_type"), equal=_EQUAL)
            return cst.Call(func, [*arguments, bare])
        order = _POSITIONAL.get(name, ())
        fresh: list[cst.Arg] = []
        for index, argument in enumerate(arguments):
            if argument.keyword is None and not argument.star and index < len(order):
                argument = argument.with_changes(keyword=cst.Name(order[index]), equal=_EQUAL)
            fresh.append(argument)
        return cst.Call(func, [cst.Arg(value), *fresh])


_EQUAL: Final = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _dotted(node: Node) -> str:
    if isinstance(node, cst.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    return node.value if isinstance(node, cst.Name) else ""
