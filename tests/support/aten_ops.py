"""Lists torch's ATen ops and their arguments; ``make aten`` writes the list that checks rule files."""

from __future__ import annotations

import torch


def aten_ops() -> str:
    """One line per overload: its name as rule files write it, then its argument names."""
    lines = []
    for schema in torch._C._jit_get_all_schemas():
        overload = schema.overload_name
        is_out = overload == "out" or overload.endswith("_out") or overload.startswith("out")
        if not schema.name.startswith("aten::") or is_out:
            continue
        full = f"{schema.name}.{overload}" if overload else schema.name
        if not torch._C._dispatch_has_kernel(full):
            continue
        names = " ".join(argument.name for argument in schema.arguments)
        lines.append(f"{full.removeprefix('aten::')} {names}".rstrip())
    return "".join(f"{line}\n" for line in sorted(set(lines)))


if __name__ == "__main__":
    print(aten_ops(), end="")
