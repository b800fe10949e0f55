"""Counts the subnormal 16-bit values of each layer: the smallest instrument, which a test adds to a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from ampaudit.core.config import Config, Option
from ampaudit.core.instruments import RUNS, Instrument, Need
from ampaudit.render.blocks import Section, tabulate

__all__ = ["INSTRUMENT", "Subnormals"]


class SubnormalsOptions(Config):
    """Options of the count."""

    subnormals: Annotated[bool, Option("Count the subnormal values of each layer.")] = False


@dataclass(frozen=True, slots=True)
class Subnormals:
    """Number of subnormal values by layer."""

    layers: dict[str, int]


def _view(section: Subnormals, full: bool) -> Iterator[Section]:
    counts = [(layer or "(top)", f"{count:,}") for layer, count in section.layers.items() if count or full]
    yield Section((tabulate(("layer", "values"), counts),), "Subnormal values")


INSTRUMENT = Instrument(
    name="subnormals",
    title="Subnormal values",
    options=SubnormalsOptions,
    needs=RUNS | {Need.WHOLE_MODEL},
    section=Subnormals,
    view=_view,
)
