"""Renders a conversion: its files, how weights are stored and why, and the program's accuracy."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.checkpoint import MASTER, PLAN, REFERENCE, REPORT, TORCH_NAMES
from ampaudit.core.text import format_bytes, plural, short_op
from ampaudit.findings.finding import GapKind
from ampaudit.render.blocks import Section, facts, line
from ampaudit.render.view import View
from ampaudit.report.conversion import Conversion, OutputRecord

_OURS = ("model", MASTER, PLAN, REPORT, REFERENCE)
_SHOWN = 8


class ConversionView(View[Conversion]):
    """Facts without findings or rows."""

    about = "source"

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the subject and the result of the conversion."""
        conversion = self.document
        how = f"policy {conversion.policy}, {conversion.dtype}, {conversion.mode}{conversion.audited_on}"
        title = f"{conversion.source} to {conversion.output}: {how}"
        yield Section((line(("converted  ", "bold"), title),))
        yield Section((facts((*_weights(conversion), *_program(conversion))),))


def _weights(conversion: Conversion) -> Iterator[tuple[str, str]]:
    if conversion.stored:
        yield "weights", _stored(conversion)
    for reason, (count, size, largest) in sorted(conversion.kept.items(), key=lambda item: -item[1][1]):
        which = largest if count == 1 else f"{count} tensors, such as {largest}"
        yield "", f"in float32: {which} ({format_bytes(size)}): {reason}"
    for name, count in conversion.overflow.items():
        yield "overflow", f"{name}: {plural(count, 'value')} became inf"
    for name, count in conversion.broken.items():
        yield "broken", f"{name}: NaN or infinite before the conversion in {plural(count, 'value')}"
    for gap in conversion.gaps:
        what = "written, but never run" if gap.kind is GapKind.NOT_RUN else gap.kind.in_words
        yield "unaudited", f"{short_op(gap.op)}: {what}: {gap.reason}"


def _stored(conversion: Conversion) -> str:
    sizes = f"{format_bytes(conversion.bytes_before)} -> {format_bytes(conversion.bytes_after)}"
    share = conversion.bytes_after / conversion.bytes_before if conversion.bytes_before else 1.0
    stored = sorted(conversion.stored.items())
    kinds = ", ".join(f"{count} in {TORCH_NAMES.get(dtype, dtype)}" for dtype, count in stored)
    masters = "; masters kept" if conversion.masters else "; no masters: FP32 cannot be restored"
    if conversion.in_place:
        masters = "; the original keeps the FP32 weights" if share < 1 else ""
    return f"{sizes} ({share:.0%}); tensors: {kinds}{masters}"


def _program(conversion: Conversion) -> Iterator[tuple[str, str]]:
    if conversion.inputs is not None and conversion.inputs.detail:
        yield "inputs", conversion.inputs.detail
    for output in conversion.outputs:
        yield "output", f"{output.name} ({output.dtype}): {_accuracy(output)}"
    if conversion.onnx_casts is not None:
        error = conversion.onnx_error
        compared = f"differs from torch by {error:.2g}" if error is not None else "not compared"
        how = "checked and run" if conversion.in_place else f"ONNX Runtime: {compared}"
        yield "onnx", f"{plural(conversion.onnx_casts, 'cast')} between float formats; {how}"
    if conversion.shapes is not None:
        yield "shapes", conversion.shapes.text
    for note in conversion.notes:
        yield "note", note
    yield "files", _files(conversion.files)


def _files(sizes: dict[str, int]) -> str:
    """List the files that ampaudit wrote with their sizes, and count the copied ones."""
    ours = {name: size for name, size in sizes.items() if name.startswith(_OURS)}
    others = len(sizes) - len(ours)
    parts = [f"{name} ({format_bytes(size)})" for name, size in list(ours.items())[:_SHOWN]]
    if len(ours) > _SHOWN:
        parts.append(f"{len(ours) - _SHOWN} more shards")
    return ", ".join(parts) + (f", and {others} copied from the source" if others else "")


def _accuracy(output: OutputRecord) -> str:
    if output.max_error is None:
        return "not finite, or of another shape than in FP32"
    if output.max_error == 0:
        return "exactly as in FP32"
    if output.differing is not None:
        return f"{100 * output.differing:.3g} % differ from FP32"
    accuracy = f", {output.sqnr_db:.0f} dB" if output.sqnr_db is not None else ""
    return f"largest error {output.max_error:.2g} against FP32{accuracy}"
