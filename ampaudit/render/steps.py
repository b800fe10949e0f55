"""Renders the steps of an audit: a table, sentences about them, and charts of error and headroom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from ampaudit.core.text import escape_control, format_number, plural
from ampaudit.render.blocks import Section, line, tabulate
from ampaudit.report.steps import StepGrowth, StepReport, StepsReport

__all__ = ["step_section", "step_sentences", "steps_svg"]

_ROWS = 8
_NUMBERS = 6  # step numbers listed in a sentence
_LINE = 14  # height of a text in the chart
_MAX_TRACES = 3  # the first step, later ones, and those whose state has other dtypes
_WIDTH, _HEIGHT, _LEFT, _TOP = 380, 110, 36, 12


def step_section(steps: StepsReport, *, full: bool = False) -> Section:
    """Render a table of all or the most telling steps, and sentences about them."""
    visible = steps.steps if full else _most_telling(steps.steps)
    rows = (
        (
            str(step.step),
            _accuracy(step),
            "" if step.headroom_bits is None else f"{step.headroom_bits:.1f} bits",
            escape_control(step.headroom_at),
            _events(step),
        )
        for step in visible
    )
    heads = ("step", "accuracy", "headroom", "at", "")
    table = tabulate(heads, rows, left=("at", ""))
    more = "" if len(visible) == len(steps.steps) else f", {len(visible)} of {len(steps.steps)}; -v shows all"
    sentences = (line(sentence) for sentence in step_sentences(steps))
    return Section((table, *sentences), f"Steps{more}")


def _most_telling(rows: Sequence[StepReport]) -> tuple[StepReport, ...]:
    """Select the first, last and worst steps, the first one with each event, and some in between."""
    events: tuple[Callable[[StepReport], bool], ...] = (
        lambda step: step.broken,
        lambda step: bool(step.flipped),
        lambda step: step.poisoned,
    )
    indices = {round(index * (len(rows) - 1) / (_ROWS - 1)) for index in range(_ROWS)} if rows else set()
    for happens in events:
        indices |= {next((index for index, step in enumerate(rows) if happens(step)), 0)}
    for figures in ([step.accuracy_db for step in rows], [step.headroom_bits for step in rows]):
        measured = [(figure, index) for index, figure in enumerate(figures) if figure is not None]
        indices |= {min(measured)[1]} if measured else set()
    return tuple(step for index, step in enumerate(rows) if index in indices)


def _accuracy(step: StepReport) -> str:
    if step.accuracy_db is not None:
        return f"{step.accuracy_db:.0f} dB"
    return "wrong" if step.output else "exact"


def _events(step: StepReport) -> str:
    events = []
    if step.origins:
        more = f" and {len(step.origins) - 1} more" if len(step.origins) > 1 else ""
        events.append(f"{step.origins[0]}{more} out of range")
    if step.broken_inputs:
        events.append(f"next {', '.join(step.broken_inputs)} out of range")
    if step.flipped:
        events.append(f"another {', '.join(step.flipped)} in 16 bits")
    if step.poisoned:
        events.append("poisoned")
    return escape_control("; ".join(events))


def step_sentences(steps: StepsReport) -> Iterator[str]:
    """Describe when values leave the range, what grows, and where the 16-bit run would choose differently."""
    first, poisoned, flipped = steps.first_broken, steps.poisoned, steps.flipped
    if steps.fed_back:
        yield f"Fed back: {escape_control(steps.fed_back)}."
    if first is not None:
        what = (*first.origins, *(f"next_inputs: {name}" for name in first.broken_inputs))
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        yield f"The first step out of range is {first.step}: {escape_control(what[0])}{more}."
        if poisoned:
            yield f"If nothing is repaired, it poisons {_steps(poisoned)}."
        yield "After it, broken values are replaced by FP32's, within the range of the format."
    for growth in steps.growth:
        yield _growth(growth, len(steps.steps))
    if flipped:
        names = escape_control(", ".join(dict.fromkeys(n for step in steps.steps for n in step.flipped)))
        choice = f"The 16-bit run would choose another {names} after {_steps(flipped)}"
        yield f"{choice}; both runs go on with FP32's."
    if steps.traces > _MAX_TRACES:
        yield (
            f"The model was traced {steps.traces} times, since the shapes or Python values of its inputs "
            "change from step to step; tensors of a fixed size are faster."
        )


def _growth(growth: StepGrowth, count: int) -> str:
    every = f"doubles every {format_number(growth.doubles_every)} steps"
    name = escape_control(growth.name)
    if growth.what == "error":
        sentence = f"The error of {name} {every}"
    else:
        sentence = f"The largest value, at {name}, {every}"
    if growth.reaches is None or growth.reaches <= count:
        return f"{sentence}."
    end = "lost its required accuracy" if growth.what == "error" else "left the range"
    return f"{sentence}: at this rate it will have {end} at about step {growth.reaches}."


def _steps(numbers: Sequence[int]) -> str:
    """Format step numbers: ``step 12``, ``steps 3, 9 and 14``, ``steps 41 to 50``, or the first of many."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[: _NUMBERS - 1]))
    if len(numbers) >= _NUMBERS:
        return f"{plural(len(numbers), 'step')} ({listed} ...)"
    return f"steps {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def steps_svg(steps: StepsReport) -> str:
    """Return static SVG charts of headroom and accuracy over the steps."""
    headroom = [(step.step, step.headroom_bits) for step in steps.steps if step.headroom_bits is not None]
    accuracy = [(step.step, step.accuracy_db) for step in steps.steps if step.accuracy_db is not None]
    broken = {step.step for step in steps.steps if step.broken}
    last = steps.steps[-1].step if steps.steps else 1
    charts = ((headroom, "Headroom in bits", "--lower"), (accuracy, "Accuracy in dB", "--gradient"))
    return "".join(
        _panel(points, last, broken, label, color) for points, label, color in charts if len(points) > 1
    )


def _panel(points: Sequence[tuple[int, float]], last: int, broken: set[int], label: str, color: str) -> str:
    values = [value for _, value in points]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0

    def x(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * (step - 1) / max(last - 1, 1)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - 2 * _TOP) * (high - value) / (high - low)

    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    marks = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.5" fill="var(--broken)">'
        f"<title>step {step} leaves the range</title></circle>"
        for step, value in points
        if step in broken
    )
    ticks = (high, *((0.0,) if low < 0.0 < high and y(0.0) - y(high) > _LINE < y(low) - y(0.0) else ()), low)
    texts = "".join(
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        for value in ticks
    )
    caption = escape(f"{label} over {plural(last, 'step')}: from {values[0]:.1f} to {values[-1]:.1f}")
    return (
        f'<figure class="steps"><figcaption>{escape(label)}</figcaption>'
        f'<svg role="img" aria-label="{caption}" viewBox="0 0 {_WIDTH} {_HEIGHT + 14}" width="100%">'
        f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(0.0):.1f}" y2="{y(0.0):.1f}" stroke="var(--line)"/>'
        f'{texts}<text x="{_LEFT}" y="{_HEIGHT + 10}">1</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT + 10}" text-anchor="end">step {last}</text>'
        f'<polyline points="{path}" fill="none" stroke="var({color})" stroke-width="2"/>{marks}'
        "</svg></figure>"
    )
