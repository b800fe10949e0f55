"""The rule on autograd functions, whose backward runs without the autocast of their forward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Fix, Mistake, position_of
from ampaudit.linter.flow.events import ScriptFollowed
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import (
    calls_method,
    dotted_name,
    enters_autocast,
    has_name,
    last_component,
    simple_name,
)
from ampaudit.linter.rules.rule import rule

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

_DECORATORS: Final = {"forward": "custom_fwd", "backward": "custom_bwd"}
_PRODUCTS: Final = frozenset(
    "matmul mm bmm einsum addmm baddbmm linear conv1d conv2d conv3d conv_transpose2d mv".split()
)


@rule("AMP850", ScriptFollowed)
def autograd_functions(flow: Interpreter, _: ScriptFollowed) -> Iterator[Mistake]:
    """Report functions with matrix products that lack ``custom_fwd`` or ``custom_bwd``."""
    script = flow.linked.main
    if "autocast" not in script.text or "Function" not in script.text:
        return
    for info in script.classes.values():
        methods = {name: info.methods[name] for name in _DECORATORS if name in info.methods}
        if len(methods) < 2 or "Function" not in map(last_component, info.bases):
            continue
        missing = [
            _DECORATORS[name]
            for name, method in methods.items()
            if not any(has_name(decorator, _DECORATORS[name]) for decorator in method.node.decorator_list)
        ]
        always_raises = missing == ["custom_fwd"]
        in_other_dtypes = (
            missing
            and (len(missing) == 1 or not _chooses_dtypes(info.node))
            and any(_multiplies(method.node) for method in methods.values())
            and _runs_under_autocast(script, info.node.name)
        )
        if always_raises or in_other_dtypes:
            is_fixable = len(missing) == 2 and all(method.is_static for method in methods.values())
            yield Mistake(
                info.node,
                f"{info.node.name} has no {' and '.join(missing)}: its backward runs without autocast, "
                "on whatever dtypes the forward saved",
                'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with'
                ' torch.amp.custom_bwd(device_type="cuda")',
                # torch has these decorators since 2.4
                Fix("decorate", *position_of(info.node), is_safe=False) if is_fixable else None,
            )


def _chooses_dtypes(node: ast.ClassDef) -> bool:
    return (
        has_name(node, "autocast")
        or has_name(node, "dtype")
        or any(calls_method(node, name) for name in ("to", "float", "type_as"))
        or any(isinstance(part, ast.keyword) and part.arg == "dtype" for part in ast.walk(node))
    )


def _multiplies(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.MatMult) or (isinstance(node, ast.Call) and simple_name(node.func) in _PRODUCTS)
        for node in ast.walk(function)
    )


def _runs_under_autocast(script: Script, name: str) -> bool:
    """Return whether it is applied in an autocast block, in a module, or by a function called in one."""
    blocks = (node for node in script.nodes() if isinstance(node, ast.With) and enters_autocast(node))
    inside = {dotted_name(node) for block in blocks for node in ast.walk(block)} - {""}

    def is_entered(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(dotted_name(target) in inside for target in node.targets)
        if isinstance(node, ast.ClassDef):
            return node.name in script.classes and script.classes[node.name].derives("Module")
        return isinstance(node, ast.FunctionDef) and (
            node.name in inside or any(has_name(d, "autocast") for d in node.decorator_list)
        )

    def applies(node: ast.AST) -> bool:
        return any(dotted_name(part) == f"{name}.apply" for part in ast.walk(node))

    return f"{name}.apply" in inside or any(is_entered(node) and applies(node) for node in script.nodes())
