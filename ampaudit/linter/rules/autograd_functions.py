"""The rule on autograd functions, whose backward runs without the autocast of their forward."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Diagnostic, Fix, position_of
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, enters_autocast, has_name, last_component, simple_name
from ampaudit.linter.flow.values import FunctionInfo

__all__ = ["check_autograd_functions"]

_PRODUCTS: Final = frozenset(
    "matmul mm bmm einsum addmm baddbmm linear conv1d conv2d conv3d conv_transpose2d mv".split()
)
# code that chooses dtypes itself
_OWN_DTYPES = re.compile(r"autocast|\.to\(|\.float\(|\.type_as\(|dtype")


def check_autograd_functions(script: Script) -> Iterator[Diagnostic]:
    """Report functions with matrix products that lack ``custom_fwd`` or ``custom_bwd``."""
    if "autocast" not in script.text or "Function" not in script.text:
        return
    for info in script.classes.values():
        if not any(last_component(base) == "Function" for base in info.bases):
            continue
        forward, backward = info.methods.get("forward"), info.methods.get("backward")
        if forward is None or backward is None:
            continue
        has = [
            any(has_name(decorator, name) for decorator in method.node.decorator_list)
            for method, name in ((forward, "custom_fwd"), (backward, "custom_bwd"))
        ]
        if has == [False, True]:  # backward raises, whatever it computes
            yield _diagnostic(info.node, forward, backward, has)
            continue
        chooses_dtypes = not any(has) and _OWN_DTYPES.search(ast.unparse(info.node))
        if all(has) or chooses_dtypes or not (_multiplies(forward) or _multiplies(backward)):
            continue
        if _runs_under_autocast(script, info.node.name):
            yield _diagnostic(info.node, forward, backward, has)


def _runs_under_autocast(script: Script, name: str) -> bool:
    """Return whether it is applied in an autocast block, in a module, or by a function called in one."""
    inside: set[str] = set()
    applied: list[ast.FunctionDef | ast.ClassDef | ast.Assign] = []
    for node in script.nodes():
        if isinstance(node, ast.With) and enters_autocast(node):
            inside |= {
                dotted_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)
            }
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            applied += [node] if f"{name}.apply" in ast.unparse(node) else []
    return f"{name}.apply" in inside or any(_is_entered(script, node, inside) for node in applied)


def _is_entered(script: Script, node: ast.FunctionDef | ast.ClassDef | ast.Assign, inside: set[str]) -> bool:
    if isinstance(node, ast.Assign):
        return any(dotted_name(target) in inside for target in node.targets)
    if isinstance(node, ast.ClassDef):
        info = script.classes.get(node.name)
        return info is not None and info.derives("Module")
    return node.name in inside or any(has_name(d, "autocast") for d in node.decorator_list)


def _multiplies(info: FunctionInfo) -> bool:
    for node in ast.walk(info.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call) and simple_name(node.func) in _PRODUCTS:
            return True
    return False


def _diagnostic(
    node: ast.ClassDef, forward: FunctionInfo, backward: FunctionInfo, has: list[bool]
) -> Diagnostic:
    missing = " and ".join(n for n, there in zip(("custom_fwd", "custom_bwd"), has, strict=True) if not there)
    static = forward.is_static and backward.is_static
    # torch has these decorators since 2.4
    fix = Fix("decorate", *position_of(node), is_safe=False) if static and not any(has) else None
    return Diagnostic(
        "AMP850",
        node,
        f"{node.name} has no {missing}: its backward runs without autocast, "
        "on whatever dtypes the forward saved",
        'decorate forward with torch.amp.custom_fwd(device_type="cuda") and backward with'
        ' torch.amp.custom_bwd(device_type="cuda")',
        fix,
    )
