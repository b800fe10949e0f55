"""Applies fixes to the concrete syntax tree, so that comments and layout are preserved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Final, TypeAlias

import libcst as cst
from libcst import metadata

from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.source_text import character_column, split_lines

__all__ = ["apply_every_fix", "apply_fixes"]

# positional arguments of the old names; in the new ones the device comes first, and the order differs
_POSITIONAL: Final = {"autocast": ("enabled", "dtype", "cache_enabled")}
Node: TypeAlias = Any  # libcst's leave functions take and return another type for each kind of node


def apply_fixes(text: str, fixes: Sequence[Fix]) -> str:
    """Apply fixes to a script, except those whose node is not found.

    Raises:
        libcst.ParserSyntaxError: The script is not valid for libcst.
    """
    return _apply(text, fixes)[0]


def apply_every_fix(text: str, fixes: Sequence[Fix]) -> str | None:
    """Apply fixes to a script; return ``None`` unless each can be applied.

    Raises:
        libcst.ParserSyntaxError: The script is not valid for libcst.
    """
    after, applied = _apply(text, fixes)
    return after if applied == set(fixes) else None


def _apply(text: str, fixes: Sequence[Fix]) -> tuple[str, set[Fix]]:
    """Return the text, and the fixes of expressions and statements that were applied."""
    wrapper = metadata.MetadataWrapper(cst.parse_module(text))
    lines = split_lines(text)
    fixes_at: dict[tuple[int, int], list[Fix]] = {}
    for fix in fixes:
        line = lines[fix.line - 1] if fix.line <= len(lines) else ""
        fixes_at.setdefault((fix.line, character_column(line, fix.column)), []).append(fix)
    transformer = _FixTransformer(fixes_at)
    return wrapper.visit(transformer).code, transformer.applied


class _FixTransformer(cst.CSTTransformer):
    """Applies each fix at its node; ``fixes_at`` is keyed by line and column in characters."""

    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(self, fixes_at: dict[tuple[int, int], list[Fix]]) -> None:
        super().__init__()
        self.fixes_at = fixes_at
        self.applied: set[Fix] = set()
        renames = [f for fixes in fixes_at.values() for f in fixes if f.kind.startswith("rename")]
        self.renames = AmpRenames(renames)
        self.decorators = {
            int(detail.split()[1]): detail.split()[0]
            for fixes in fixes_at.values()
            for fix in fixes
            if fix.kind == "decorate"
            for detail in fix.details
        }

    def on_leave(self, original: Node, updated: Node) -> Node:
        """Apply the fixes of a node after its children were visited."""
        result = super().on_leave(original, updated)
        if isinstance(original, cst.FunctionDef):
            return self._decorate(original, result)
        result = self.renames.apply(original, result)
        if not isinstance(original, _KINDS):
            return result
        place = self.get_metadata(metadata.PositionProvider, original)
        for fix in self.fixes_at.get((place.start.line, place.start.column), ()):
            # expressions that start together end apart
            if fix.kind == "replace expression" and fix.details[1:] == (
                str(place.end.line),
                str(place.end.column),
            ):
                new = cst.parse_expression(fix.details[0])
                parentheses = {"lpar": [*result.lpar, *new.lpar], "rpar": [*new.rpar, *result.rpar]}
                result = new.with_changes(**parentheses)
                self.applied.add(fix)
                continue
            types, change = _CHANGE_BY_KIND.get(fix.kind, ((), None))
            is_node = result is not None and not isinstance(result, cst.FlattenSentinel)
            if change is not None and is_node and isinstance(original, types):
                changed = change(original, result, fix)
                if changed is not result:
                    self.applied.add(fix)
                result = changed
        return result

    def _decorate(self, original: cst.FunctionDef, updated: Node) -> Node:
        line = self.get_metadata(metadata.PositionProvider, original.name).start.line
        if line not in self.decorators or not isinstance(updated, cst.FunctionDef):
            return updated
        call = cst.parse_expression(f'torch.amp.{self.decorators[line]}(device_type="cuda")')
        return updated.with_changes(decorators=[*updated.decorators, cst.Decorator(call)])


_KINDS = (
    cst.BinaryOperation,
    cst.Call,
    cst.SimpleStatementLine,
    cst.With,
    cst.Dict,
    cst.UnaryOperation,
    cst.Name,
    cst.Float,
    cst.Integer,
)


def _is_call(node: Node, name: str) -> bool:
    """Return whether a call is ``x.name(...)``, which tells apart the calls of a chain."""
    return isinstance(node.func, cst.Attribute) and bool(node.func.attr.value == name)


def _scale_loss(original: Node, node: Node, fix: Fix) -> Node:
    if not _is_call(original, "backward"):
        return node
    scaled = cst.Call(cst.parse_expression(f"{fix.details[0]}.scale"), [cst.Arg(node.func.value)])
    return node.with_changes(func=node.func.with_changes(value=scaled))


def _step_by_scaler(original: Node, node: Node, fix: Fix) -> Node:
    if not _is_call(original, "step"):
        return node
    return cst.Call(cst.parse_expression(f"{fix.details[0]}.step"), [cst.Arg(node.func.value)])


def _parse_statement(text: str) -> cst.SimpleStatementLine:
    parsed = cst.parse_statement(text)
    assert isinstance(parsed, cst.SimpleStatementLine)
    return parsed


def _insert_before(original: Node, node: Node, fix: Fix) -> Node:
    new = _parse_statement(fix.details[0]).with_changes(leading_lines=node.leading_lines)
    return cst.FlattenSentinel([new, node.with_changes(leading_lines=[])])


def _insert_after(original: Node, node: Node, fix: Fix) -> Node:
    return cst.FlattenSentinel([node, _parse_statement(fix.details[0])])


def _remove_statement(original: Node, node: Node, fix: Fix) -> Node:
    del fix
    if len(original.body) != 1:
        return node
    return cst.RemoveFromParent()


def _remove_keyword(original: Node, node: Node, fix: Fix) -> Node:
    remaining = [a for a in node.args if a.keyword is None or a.keyword.value != fix.details[0]]
    if len(remaining) == len(node.args):
        return node
    if remaining and node.args[-1] is not remaining[-1]:
        remaining[-1] = remaining[-1].with_changes(comma=node.args[-1].comma)
    return node.with_changes(args=remaining)


def _set_keyword(original: Node, node: Node, fix: Fix) -> Node:
    name, value = fix.details
    last = original.func.attr if isinstance(original.func, cst.Attribute) else original.func
    makes_scaler = isinstance(last, cst.Name) and last.value == "GradScaler"
    if not makes_scaler or any(a.keyword and a.keyword.value == name for a in node.args):
        return node
    new = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=_EQUAL)
    return node.with_changes(args=[*node.args, new])


def _with_logits(original: Node, node: Node, fix: Fix) -> Node:
    del fix
    if not _is_call(original, "binary_cross_entropy"):
        return node
    inner = node.args[0].value
    if not isinstance(inner, cst.Call):
        return node
    logits = inner.args[0].value if inner.args else getattr(inner.func, "value", None)
    if logits is None:
        return node
    func = node.func.with_changes(attr=cst.Name("binary_cross_entropy_with_logits"))
    return node.with_changes(func=func, args=[node.args[0].with_changes(value=logits), *node.args[1:]])


def _replace(original: Node, node: Node, fix: Fix) -> Node:
    return cst.parse_expression(fix.details[0])


def _end_block(original: Node, node: Node, fix: Fix) -> Node:
    """Move the statements from an index on out of the ``with`` block; remove a block that becomes empty."""
    if not isinstance(node.body, cst.IndentedBlock):
        return node
    index = int(fix.details[0])
    body: list[Node] = list(node.body.body)
    single = all(not isinstance(s, cst.SimpleStatementLine) or len(s.body) == 1 for s in body)
    if not single or index >= len(body):
        return node
    if index == 0:
        comments = [*node.leading_lines, *body[0].leading_lines]
        return cst.FlattenSentinel([body[0].with_changes(leading_lines=comments), *body[1:]])
    block = node.body.with_changes(body=body[:index], footer=[])
    return cst.FlattenSentinel([node.with_changes(body=block), *body[index:]])


def _add_entry(original: Node, node: Node, fix: Fix) -> Node:
    """Append an entry, laid out as the one before it."""
    if not node.elements:
        return node
    name, value = fix.details
    elements = list(node.elements)
    first = elements[0].key
    quote = first.value[0] if isinstance(first, cst.SimpleString) else '"'
    last = elements[-1]
    trailing = last.comma
    between = (
        elements[-2].comma if len(elements) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    )
    if len(elements) == 1 and isinstance(trailing, cst.Comma):
        between = cst.Comma(whitespace_after=node.lbrace.whitespace_after)
    key = cst.SimpleString(f"{quote}{name}{quote}")
    new = cst.DictElement(key, cst.parse_expression(value), comma=trailing)
    return node.with_changes(elements=[*elements[:-1], last.with_changes(comma=between), new])


# the changes by kind of fix, each for nodes of some types
_CHANGE_BY_KIND: dict[str, tuple[type | UnionType, Callable[[Node, Node, Fix], Node]]] = {
    "scale loss": (cst.Call, _scale_loss),
    "step by scaler": (cst.Call, _step_by_scaler),
    "insert before": (cst.SimpleStatementLine, _insert_before),
    "insert after": (cst.SimpleStatementLine, _insert_after),
    "remove statement": (cst.SimpleStatementLine, _remove_statement),
    "remove keyword": (cst.Call, _remove_keyword),
    "set keyword": (cst.Call, _set_keyword),
    "with logits": (cst.Call, _with_logits),
    "replace": (cst.UnaryOperation | cst.Float | cst.Integer | cst.Name, _replace),
    "end block": (cst.With, _end_block),
    "add entry": (cst.Dict, _add_entry),
}


class AmpRenames:
    """The renames in one script: whole imports with every use of their names, and single uses.

    Args:
        fixes: Fixes of kind ``rename import`` and ``rename use``.
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
            new_name = self._new_name(original.decorator)
            if new_name is not None:
                return node.with_changes(decorator=self._call_new(node.decorator, new_name, []))
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
        new_name = self._new_name(original.func)
        return node if new_name is None else self._call_new(node.func, new_name, list(node.args))

    def _call_new(self, func: Node, new_name: tuple[str, str], arguments: list[cst.Arg]) -> cst.Call:
        name, device = new_name
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
