"""The part of the text report that is about gradients and the loss scale."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control, format_number, format_power, format_scale
from ampaudit.render.grid import labelled, open_table
from ampaudit.report.gradients import BackwardReport
from ampaudit.report.scales import LayerScales, ScaleAdvice

__all__ = ["gradient_tables", "scales_that_suit"]

_EVERY = 2  # rows of the table of scales; the JSON report has all
_BAR = 20


def gradient_tables(
    backward: BackwardReport, dtype: str, count: int, *, full: bool
) -> Iterable[RenderableType]:
    """Losses, the scales that suit, the table of scales, and the layers that set its ends."""
    yield Text("Gradients", style="bold")
    rows = [("Loss", _losses(backward, dtype)), ("Scale", _scale(backward))]
    rows += [("Suits", text) for text in _suits(backward)]
    if backward.frozen:
        rows.append(("Frozen", f"{len(backward.frozen)} parameters ask for no gradient"))
    rows += [("Note", escape_control(note)) for note in backward.notes]
    yield labelled(rows)
    if backward.advice is not None:
        yield Text()
        yield from _scales(backward.advice, dtype, 1 if full else _EVERY)
        yield Text()
        yield from _layers(backward.advice, len(backward.advice.layers) if full else count)


def scales_that_suit(backward: BackwardReport) -> str:
    """In one line, for several policies side by side."""
    advice = backward.advice
    if advice is None:
        return "no gradient is held in 16 bits"
    if not advice.exists:
        apart = (
            f"{escape_control(advice.high_at or '(top module)')} and "
            f"{escape_control(advice.low_at or '(top module)')}"
        )
        return f"no loss scale suits every layer: none fits both {apart}"
    return f"loss scales from 2^{advice.low} to 2^{advice.high} suit every layer"


def _losses(backward: BackwardReport, dtype: str) -> str:
    if not backward.losses:
        return "none"
    first = backward.losses[0]
    shown = [
        f"{format_number(value)} in {name}" if value is not None else f"not finite in {name}"
        for value, name in ((first.float32, "FP32"), (first.lower, dtype))
    ]
    more = f" (first of {len(backward.losses)} batches)" if len(backward.losses) > 1 else ""
    return f"{', '.join(shown)}{more}"


def _scale(backward: BackwardReport) -> str:
    kind = "dynamic" if backward.dynamic else "fixed"
    return f"{format_scale(backward.loss_scale)}, {kind} ({backward.scale_from})"


def _suits(backward: BackwardReport) -> list[str]:
    advice = backward.advice
    if advice is None:
        return ["any: no gradient is held in 16 bits"]
    low, high = (
        escape_control(advice.low_at or "(top module)"),
        escape_control(advice.high_at or "(top module)"),
    )
    share = f"{advice.share:.0%} of a layer's gradient"
    if not advice.exists:
        return [
            f"no single scale: {high} overflows above 2^{advice.high}, {low} needs 2^{advice.low} to lose no "
            f"more than {share}"
        ]
    return [
        f"2^{advice.low} to 2^{advice.high}: nothing overflows, and no more than {share} is flushed to zero; "
        f"use {format_power(backward.suggested or 0)}",
        f"the lower end is set by {low}, the upper by {high}",
    ]


def _scales(advice: ScaleAdvice, dtype: str, every: int) -> Iterable[RenderableType]:
    yield Text(f"What each scale would do to the {dtype} gradients", style="bold")
    table = open_table("scale", "flushed to zero", "", "overflow", "", left=("",))
    for row in advice.rows[::every]:
        bar = "#" * round(row.flushed * _BAR)
        fits = advice.low <= row.exponent <= advice.high
        over = str(row.overflowing) if row.overflowing else ""
        table.add_row(f"2^{row.exponent}", f"{row.flushed:.2%}", bar, over, "suits" if fits else "")
    yield table


def _layers(advice: ScaleAdvice, count: int) -> Iterable[RenderableType]:
    narrow = sorted(advice.layers, key=_width)[:count]
    yield Text(f"Layers with the least room, of {len(advice.layers)}", style="bold")
    table = open_table("layer", "largest", "flushed", "suits", "overflows first", left=("overflows first",))
    for layer in narrow:
        table.add_row(
            Text(escape_control(layer.layer or "(top module)"), overflow="fold"),
            format_number(layer.peak),
            f"{layer.flushed:.2%}",
            f"2^{layer.low} to 2^{layer.high}" if layer.low <= layer.high else "none",
            Text(escape_control(layer.high_at), overflow="fold"),
        )
    yield table


def _width(layer: LayerScales) -> int:
    return layer.high - layer.low
