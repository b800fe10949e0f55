"""Renders a conversion for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.checkpoint.header import TORCH_NAMES
from ampaudit.checkpoint.layout import MASTER, PLAN, REFERENCE, REPORT
from ampaudit.core.text import escape_control, format_bytes
from ampaudit.render.grid import labelled
from ampaudit.report.conversion import Conversion, OutputRecord

__all__ = ["render_conversion"]

_OURS = ("model", MASTER, PLAN, REPORT, REFERENCE)
_SHOWN = 8


def render_conversion(made: Conversion) -> RenderableType:
    """What was written, how the weights are stored and why, and what the program computes."""
    share = made.bytes_after / made.bytes_before if made.bytes_before else 1.0
    kinds = ", ".join(
        f"{count} in {TORCH_NAMES.get(dtype, dtype)}" for dtype, count in sorted(made.stored.items())
    )
    rows: list[tuple[str, str]] = [
        (
            "weights",
            f"{format_bytes(made.bytes_before)} -> {format_bytes(made.bytes_after)} "
            f"({share:.0%}); tensors: {kinds}"
            + ("; masters kept" if made.masters else "; no masters: FP32 cannot be restored"),
        )
    ]
    for reason, (count, size, largest) in sorted(made.kept.items(), key=lambda item: -item[1][1]):
        which = (
            escape_control(largest) if count == 1 else f"{count} tensors, such as {escape_control(largest)}"
        )
        rows.append(("", f"in float32: {which} ({format_bytes(size)}): {escape_control(reason)}"))
    for name, count in made.overflow.items():
        rows.append(("overflow", f"{escape_control(name)}: {count} values become inf"))
    for name, count in made.broken.items():
        rows.append(("broken", f"{escape_control(name)}: {count} values are NaN or infinite already"))
    rows += [("output", f"{escape_control(o.name)} ({o.dtype}): {_accuracy(o)}") for o in made.outputs]
    if made.onnx_casts is not None:
        error = (
            f"differs from torch by {made.onnx_error:.2g}" if made.onnx_error is not None else "not compared"
        )
        casts = f"{made.onnx_casts} cast{'s' if made.onnx_casts != 1 else ''} between float formats"
        rows.append(("onnx", f"{casts}; ONNX Runtime: {error}"))
    rows += [("note", escape_control(note)) for note in made.notes]
    rows.append(("files", _files(made.files)))
    head = Text.assemble(
        ("converted  ", "bold"),
        f"{escape_control(made.source)} to {escape_control(made.output)}: "
        f"policy {made.policy}, {made.dtype}, {made.mode}",
    )
    return Group(head, Text(), labelled(rows))


def _files(sizes: dict[str, int]) -> str:
    """The files that are ours, by size; how many others there are."""
    ours = {name: size for name, size in sizes.items() if name.startswith(_OURS)}
    others = len(sizes) - len(ours)
    parts = [f"{escape_control(name)} ({format_bytes(size)})" for name, size in list(ours.items())[:_SHOWN]]
    if len(ours) > _SHOWN:
        parts.append(f"{len(ours) - _SHOWN} more shards")
    return ", ".join(parts) + (f", and {others} copied from the source" if others else "")


def _accuracy(output: OutputRecord) -> str:
    if output.max_error is None:
        return "not finite, or not as in FP32"
    if output.max_error == 0:
        return "exactly as in FP32"
    accuracy = f", {output.sqnr_db:.0f} dB" if output.sqnr_db is not None else ""
    return f"largest error {output.max_error:.2g} against FP32{accuracy}"
