"""Writes names of ``torch.cuda.amp`` as those of ``torch.amp``, which take the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import libcst as cst

from ampaudit.lint.diagnostic import Fix

__all__ = ["Modern"]

Node: TypeAlias = Any  # see lint.repairs
# the order of the old names' arguments; in the new ones the device comes first, and others follow
_ORDER: Final = {"autocast": ("enabled", "dtype", "cache_enabled")}


class Modern:
    """The repairs of one script that rename: imports with all that they bring, and single uses.

    Args:
        fixes: those whose kind is ``modern import`` or ``modern use``.
    """

    def __init__(self, fixes: Sequence[Fix]) -> None:
        self.local: dict[str, tuple[str, str]] = {}  # name in the script: name in torch.amp, device
        self.uses: dict[str, tuple[str, str]] = {}  # dotted text: the same
        for fix in fixes:
            device = fix.details[0]
            if fix.kind == "modern use":
                self.uses[fix.details[2]] = (fix.details[1], device)
            else:
                for detail in fix.details[1:]:
                    name, _, local = detail.partition("=")
                    self.local[local] = (name, device)

    def changed(self, original: Node, node: Node) -> Node:
        """A node with the new names, or as it was."""
        if not self.local and not self.uses:
            return node
        if isinstance(original, cst.ImportFrom):
            return self._import(node)
        if isinstance(original, cst.Call):
            return self._call(original, node)
        if isinstance(original, cst.Decorator) and not isinstance(original.decorator, cst.Call):
            known = self._known(original.decorator)
            if known is not None:
                return node.with_changes(decorator=self._made(node.decorator, known, []))
        return node

    def _import(self, node: Node) -> Node:
        if isinstance(node.names, cst.ImportStar) or not self.local:
            return node
        local = [(a.asname.name.value if a.asname else a.name.value) for a in node.names]
        module = _text(node.module) if node.module is not None else ""
        if all(name in self.local for name in local) and module.startswith(
            ("torch.cuda.amp", "torch.cpu.amp")
        ):
            return node.with_changes(module=cst.parse_expression("torch.amp"))
        return node

    def _known(self, func: Node) -> tuple[str, str] | None:
        text = _text(func)
        return self.uses.get(text) or (self.local.get(text) if isinstance(func, cst.Name) else None)

    def _call(self, original: cst.Call, node: Node) -> Node:
        known = self._known(original.func)
        return node if known is None else self._made(node.func, known, list(node.args))

    def _made(self, func: Node, known: tuple[str, str], arguments: list[cst.Arg]) -> cst.Call:
        name, device = known
        if not isinstance(func, cst.Name):
            func = cst.parse_expression(f"torch.amp.{name}")
        value = cst.SimpleString(f'"{device}"')
        if name.startswith("custom_"):
            bare = cst.Arg(value, keyword=cst.Name("device_type"), equal=_EQUAL)
            return cst.Call(func, [*arguments, bare])
        order = _ORDER.get(name, ())
        fresh: list[cst.Arg] = []
        for index, argument in enumerate(arguments):
            if argument.keyword is None and not argument.star and index < len(order):
                argument = argument.with_changes(keyword=cst.Name(order[index]), equal=_EQUAL)
            fresh.append(argument)
        return cst.Call(func, [cst.Arg(value), *fresh])


_EQUAL: Final = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _text(node: Node) -> str:
    if isinstance(node, cst.Attribute):
        base = _text(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    return node.value if isinstance(node, cst.Name) else ""
