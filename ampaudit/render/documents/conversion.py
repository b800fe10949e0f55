"""Renders a conversion: its files, how weights are stored and why, and the program's accuracy."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checkpoint.header import TORCH_NAMES
from ampaudit.checkpoint.layout import MASTER, PLAN, REFERENCE, REPORT
from ampaudit.core.text import escape_control, format_bytes, plural, short_op
from ampaudit.render.blocks import Section, facts, line
from ampaudit.render.view import View
from ampaudit.report.conversion import Conversion, OutputRecord
from ampaudit.report.gap import GapKind

__all__ = ["ConversionView"]

_OURS = ("model", MASTER, PLAN, REPORT, REFERENCE)
_SHOWN = 8


class ConversionView(View[Conversion]):
    """Facts without findings or rows."""

    about = "source"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Return what was converted, and the result."""
        made = self.document
        how = f"policy {made.policy}, {made.dtype}, {made.mode}{made.audited_on}"
        said = f"{escape_control(made.source)} to {escape_control(made.output)}: {how}"
        yield Section((line(("converted  ", "bold"), said),))
        yield Section((facts((*_weights(made), *_program(made))),))


def _weights(made: Conversion) -> Iterator[tuple[str, str]]:
    if made.stored:
        yield "weights", _stored(made)
    for reason, (count, size, largest) in sorted(made.kept.items(), key=lambda item: -item[1][1]):
        name = escape_control(largest)
        which = name if count == 1 else f"{count} tensors, such as {name}"
        yield "", f"in float32: {which} ({format_bytes(size)}): {escape_control(reason)}"
    for name, count in made.overflow.items():
        yield "overflow", f"{escape_control(name)}: {count} values become inf"
    for name, count in made.broken.items():
        yield "broken", f"{escape_control(name)}: {count} values are NaN or infinite already"
    for gap in made.gaps:
        what = "written, but never run" if gap.kind is GapKind.NOT_RUN else gap.kind.in_words
        yield "unaudited", f"{escape_control(short_op(gap.op))}: {what}: {escape_control(gap.reason)}"


def _stored(made: Conversion) -> str:
    sizes = f"{format_bytes(made.bytes_before)} -> {format_bytes(made.bytes_after)}"
    share = made.bytes_after / made.bytes_before if made.bytes_before else 1.0
    stored = sorted(made.stored.items())
    kinds = ", ".join(f"{count} in {TORCH_NAMES.get(dtype, dtype)}" for dtype, count in stored)
    masters = "masters kept" if made.masters else "no masters: FP32 cannot be restored"
    masters = "the original keeps the FP32 weights" if made.in_place else masters
    return f"{sizes} ({share:.0%}); tensors: {kinds}; {masters}"


def _program(made: Conversion) -> Iterator[tuple[str, str]]:
    if made.inputs is not None and made.inputs.detail:
        yield "inputs", escape_control(made.inputs.detail)
    for output in made.outputs:
        yield "output", f"{escape_control(output.name)} ({output.dtype}): {_accuracy(output)}"
    if made.onnx_casts is not None:
        error = made.onnx_error
        compared = f"differs from torch by {error:.2g}" if error is not None else "not compared"
        how = "checked and run" if made.in_place else f"ONNX Runtime: {compared}"
        yield "onnx", f"{plural(made.onnx_casts, 'cast')} between float formats; {how}"
    if made.shapes is not None:
        yield "shapes", escape_control(made.shapes.text)
    for note in made.notes:
        yield "note", escape_control(note)
    yield "files", _files(made.files)


def _files(sizes: dict[str, int]) -> str:
    """Return our files by size, and the number of others."""
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
    if output.differing is not None:
        return f"{100 * output.differing:.2g} % differ from FP32"
    accuracy = f", {output.sqnr_db:.0f} dB" if output.sqnr_db is not None else ""
    return f"largest error {output.max_error:.2g} against FP32{accuracy}"
