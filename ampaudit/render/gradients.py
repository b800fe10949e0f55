"""Renders the gradients and the loss scale of a scan."""

from __future__ import annotations

from collections.abc import Iterator

from ampaudit.core.text import escape_control, format_number, format_power, format_scale
from ampaudit.render.blocks import Section, facts, tabulate
from ampaudit.render.findings import TOP
from ampaudit.report.gradients import BackwardReport, ScaleAdvice

__all__ = ["gradient_sections", "scales_that_suit"]

_EVERY = 2  # step between the exponents in the table of scales; the JSON report has all
_BAR = 20


def gradient_sections(backward: BackwardReport, dtype: str, count: int, *, full: bool) -> Iterator[Section]:
    """Render losses, suitable scales, the table of scales, and the layers that limit them."""
    yield Section((facts(_summary(backward, dtype)),), "Gradients")
    advice = backward.advice
    if advice is not None:
        yield _scales(advice, dtype, 1 if full else _EVERY)
        yield _layers(advice, len(advice.layers) if full else count)


def _summary(backward: BackwardReport, dtype: str) -> Iterator[tuple[str, str]]:
    yield "Loss", _losses(backward, dtype)
    kind = "dynamic" if backward.dynamic else "fixed"
    yield "Scale", f"{format_scale(backward.loss_scale)}, {kind} ({backward.scale_from})"
    for number, text in enumerate(_suits(backward)):
        yield "" if number else "Suits", text
    if backward.frozen:
        yield "Frozen", f"{len(backward.frozen)} parameters require no gradient"
    for note in backward.notes:
        yield "Note", escape_control(note)


def scales_that_suit(backward: BackwardReport) -> str:
    """Summarize the suitable scales in one line."""
    advice = backward.advice
    if advice is None:
        return "no gradient is held in 16 bits"
    if not advice.exists:
        low, high = _ends(advice)
        return f"no loss scale suits every layer: none fits both {high} and {low}"
    return f"loss scales from 2^{advice.low} to 2^{advice.high} suit every layer"


def _ends(advice: ScaleAdvice) -> tuple[str, str]:
    """Return the layers that limit the scale from below and from above."""
    return escape_control(advice.low_at or TOP), escape_control(advice.high_at or TOP)


def _losses(backward: BackwardReport, dtype: str) -> str:
    if not backward.losses:
        return "none"
    first = backward.losses[0]
    values = [
        f"{format_number(value)} in {name}" if value is not None else f"not finite in {name}"
        for value, name in ((first.float32, "FP32"), (first.lower, dtype))
    ]
    if first.repaired is not None:
        values.append(
            f"{format_number(first.repaired)} with FP32's values where it breaks, as for the gradients"
        )
    more = f" (first of {len(backward.losses)} batches)" if len(backward.losses) > 1 else ""
    return f"{', '.join(values)}{more}"


def _suits(backward: BackwardReport) -> Iterator[str]:
    advice = backward.advice
    if advice is None:
        yield "any: no gradient is held in 16 bits"
        return
    low, high = _ends(advice)
    share = f"no more than {advice.share:.0%} of a layer's gradient"
    if not advice.exists:
        over = f"{high} overflows above 2^{advice.high}"
        yield f"no single scale: {over}, {low} needs 2^{advice.low} to lose {share}"
        return
    fits = f"2^{advice.low} to 2^{advice.high}: nothing overflows"
    use = f"; use {format_power(backward.suggested)}" if backward.suggested is not None else ""
    yield f"{fits}, and {share} is flushed to zero{use}"
    yield f"the lower end is set by {low}, the upper by {high}"


def _scales(advice: ScaleAdvice, dtype: str, every: int) -> Section:
    rows = [
        (
            f"2^{row.exponent}",
            f"{row.flushed:.2%}",
            "#" * round(row.flushed * _BAR),
            str(row.overflowing) if row.overflowing else "",
            "suits" if advice.low <= row.exponent <= advice.high else "",
        )
        for row in advice.rows[::every]
    ]
    table = tabulate(("scale", "flushed to zero", "", "overflow", ""), rows, left=("",))
    return Section((table,), f"What each scale would do to the {dtype} gradients")


def _layers(advice: ScaleAdvice, count: int) -> Section:
    rows = [
        (
            escape_control(layer.layer or TOP),
            format_number(layer.peak),
            f"{layer.flushed:.2%}",
            f"2^{layer.low} to 2^{layer.high}" if layer.low <= layer.high else "none",
            escape_control(layer.high_at),
        )
        for layer in sorted(advice.layers, key=lambda layer: layer.high - layer.low)[:count]
    ]
    heads = ("layer", "largest", "flushed", "suits", "overflows first")
    table = tabulate(heads, rows, left=("overflows first",))
    return Section((table,), f"Layers with the least room, of {len(advice.layers)}")
