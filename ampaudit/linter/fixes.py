"""Applies fixes to the concrete syntax tree, so that comments and layout are preserved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Final, TypeAlias

import libcst as cst
from libcst import metadata

from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.source_text import character_column, split_lines

Node: TypeAlias = Any  # libcst's leave functions take and return another type for each kind of node


def apply_fixes(text: str, fixes: Sequence[Fix]) -> tuple[str, set[Fix]]:
    """Return a script after fixes, and which were applied: those whose node is there.

    Raises:
        libcst.ParserSyntaxError: The script is not valid for libcst.
    """
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

    def on_leave(self, original: Node, updated: Node) -> Node:
        """Apply the fixes of a node after its children were visited."""
        result = super().on_leave(original, updated)
        place = self.get_metadata(metadata.PositionProvider, original)
        end = (str(place.end.line), str(place.end.column))
        for fix in self.fixes_at.get((place.start.line, place.start.column), ()):
            types, change = _CHANGE_BY_KIND[fix.kind]
            if not isinstance(original, types) or not isinstance(result, cst.CSTNode):
                continue
            if fix.kind == "replace expression" and fix.details[1:] != end:
                continue  # another expression starts there as well
            changed = change(original, result, fix)
            if changed is not result:
                self.applied.add(fix)
            result = changed
        return result


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


def _insert_before(original: Node, node: Node, fix: Fix) -> Node:
    new = cst.parse_statement(fix.details[0]).with_changes(leading_lines=node.leading_lines)
    return cst.FlattenSentinel([new, node.with_changes(leading_lines=[])])


def _insert_after(original: Node, node: Node, fix: Fix) -> Node:
    return cst.FlattenSentinel([node, cst.parse_statement(fix.details[0])])


def _remove_statement(original: Node, node: Node, fix: Fix) -> Node:
    return cst.RemoveFromParent() if len(original.body) == 1 else node


def _set_keyword(original: Node, node: Node, fix: Fix) -> Node:
    name, value = fix.details
    last = original.func.attr if isinstance(original.func, cst.Attribute) else original.func
    makes_scaler = isinstance(last, cst.Name) and last.value == "GradScaler"
    if not makes_scaler or any(a.keyword and a.keyword.value == name for a in node.args):
        return node
    new = cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=_EQUAL)
    return node.with_changes(args=[*node.args, new])


def _with_logits(original: Node, node: Node, fix: Fix) -> Node:
    inner = node.args[0].value if _is_call(original, "binary_cross_entropy") else None
    if not isinstance(inner, cst.Call):
        return node
    logits = inner.args[0].value if inner.args else getattr(inner.func, "value", None)
    if logits is None:
        return node
    func = node.func.with_changes(attr=cst.Name("binary_cross_entropy_with_logits"))
    return node.with_changes(func=func, args=[node.args[0].with_changes(value=logits), *node.args[1:]])


def _replace(original: Node, node: Node, fix: Fix) -> Node:
    new = cst.parse_expression(fix.details[0])
    return new.with_changes(lpar=[*node.lpar, *new.lpar], rpar=[*new.rpar, *node.rpar])


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


_DECORATORS: Final = {"forward": "custom_fwd", "backward": "custom_bwd"}


def _decorate(original: Node, node: Node, fix: Fix) -> Node:
    """Decorate the methods of an autograd function."""
    body = list(node.body.body)
    for index, method in enumerate(body):
        if isinstance(method, cst.FunctionDef) and method.name.value in _DECORATORS:
            call = f'torch.amp.{_DECORATORS[method.name.value]}(device_type="cuda")'
            new = cst.Decorator(cst.parse_expression(call))
            body[index] = method.with_changes(decorators=[*method.decorators, new])
    return node.with_changes(body=node.body.with_changes(body=body))


# the changes by kind of fix, each for nodes of some types
_CHANGE_BY_KIND: dict[str, tuple[type | UnionType, Callable[[Node, Node, Fix], Node]]] = {
    "scale loss": (cst.Call, _scale_loss),
    "step by scaler": (cst.Call, _step_by_scaler),
    "insert before": (cst.SimpleStatementLine, _insert_before),
    "insert after": (cst.SimpleStatementLine, _insert_after),
    "remove statement": (cst.SimpleStatementLine, _remove_statement),
    "set keyword": (cst.Call, _set_keyword),
    "with logits": (cst.Call, _with_logits),
    "replace": (cst.UnaryOperation | cst.Float | cst.Integer | cst.Name, _replace),
    "replace expression": (cst.BaseExpression, _replace),
    "end block": (cst.With, _end_block),
    "add entry": (cst.Dict, _add_entry),
    "decorate": (cst.ClassDef, _decorate),
}
_EQUAL: Final = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
