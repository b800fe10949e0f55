"""Ranks roundings by the error that each makes in the outputs, or in the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ampaudit.core.config import Config, Option
from ampaudit.core.instruments import RUNS, Instrument, Need
from ampaudit.core.text import plural
from ampaudit.render.blocks import Section, line
from ampaudit.report.tuning import Noise
from ampaudit.views.tuning_tables import format_accuracy, noise_section, untrusted

__all__ = ["INSTRUMENT", "Sensitivity", "SensitivityOptions"]


class SensitivityOptions(Config):
    """Options of the ranking."""

    sensitivity: Annotated[
        bool, Option("Rank roundings by the error that they make in the outputs, or in gradients.")
    ] = False


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The ranking of roundings, and whether they add up to the measured error.

    Attributes:
        dtype: The 16-bit format.
        rows: The ranking, largest error first.
        predicted_db: Accuracy of the worst output according to the sum of the rows; ``None`` if exact.
        measured_db: Measured accuracy of the worst output; ``None`` if exact or broken.
        probes: Number of backward passes.
        broken: Whether an output is inf or NaN.
        of: What the error is measured in.
    """

    dtype: str
    rows: tuple[Noise, ...]
    predicted_db: float | None
    measured_db: float | None
    probes: int
    broken: bool = False
    of: Literal["outputs", "gradients"] = "outputs"


def _view(sensitivity: Sensitivity, full: bool) -> Iterator[Section]:
    section = noise_section(sensitivity.rows, full=full, of=sensitivity.of)
    measured = format_accuracy(sensitivity.measured_db, broken=sensitivity.broken)
    how = f"all of them, from {plural(sensitivity.probes, 'backward pass')}"
    total = line(
        f"In {sensitivity.dtype}: {format_accuracy(sensitivity.predicted_db)} predicted as the sum of {how}; "
        f"{measured} measured."
    )
    warning = untrusted(sensitivity.predicted_db, sensitivity.measured_db)
    yield Section((*section.blocks, total, *warning), section.title)


def _cells(sensitivity: Sensitivity) -> Mapping[str, Mapping[str, float | None]]:
    return {
        row.name: {"alone_db": row.db, "error_share": row.share}
        for row in sensitivity.rows
        if row.kind == "op"
    }


INSTRUMENT = Instrument(
    name="sensitivity",
    title="Sensitivity",
    options=SensitivityOptions,
    needs=RUNS | {Need.ONE_STEP, Need.WHOLE_MODEL, Need.OWN_REFERENCE},
    section=Sensitivity,
    view=_view,
    columns=("alone_db", "error_share"),
    cells=_cells,
)
