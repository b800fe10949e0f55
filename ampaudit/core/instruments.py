"""Defines instruments: what an audit can watch besides its usual measurements.

Each instrument is a package in ``ampaudit.instruments``. Those packages are on a higher floor, so they are
looked up by name here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ampaudit.core.config import Config

_PACKAGE = "ampaudit.instruments"


class Need(Enum):
    """What an option requires of a run, in the words of error messages."""

    LOW_PRECISION = "a 16-bit side"
    RUN = "a run"
    FORWARD_ONLY = "the forward pass alone"
    ONE_STEP = "a single step"
    ONE_SIZE = "one size of the inputs"
    WHOLE_MODEL = "the whole model at once"
    OWN_REFERENCE = "the model's own FP32 as its reference"
    DEFAULT_CONTRACT = "the default execution contract"


RUNS = frozenset({Need.LOW_PRECISION, Need.RUN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """One instrument: its options, and how its results are shown.

    The module ``measuring`` of its package measures, and is imported only when the instrument is requested.
    """

    name: str  # of the package, of the option that requests it, and of its section in a report
    title: str  # label of its section on the HTML page
    options: type[Config]  # type of its options, which become options of ``scan``
    needs: frozenset[Need]  # requirements on a run
    violates: Need | None = None  # requirement of other options that a run with it does not meet
    trains: bool = False  # whether it runs the model in training mode by default
    section: type | None = None  # type of its section in a report, if it has one
    # the ``render.blocks`` of a section, with all rows if the second argument is true
    view: Callable[[Any, bool], Iterator[Any]] = lambda section, full: iter(())
    columns: tuple[str, ...] = ()  # that it adds to tables of sites
    # the cells of these columns, by site and column, from a section
    cells: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda section: {}


@cache
def instruments() -> tuple[Instrument, ...]:
    """Return all instruments, in the order in which reports show them."""
    names = import_module(_PACKAGE).NAMES
    return tuple(import_module(f"{_PACKAGE}.{name}").INSTRUMENT for name in names)


def measuring(instrument: Instrument) -> Any:
    """Return the ``audit.instruments.Measuring`` of an instrument; this may import torch."""
    return import_module(f"{_PACKAGE}.{instrument.name}.measuring").MEASURING


@dataclass(frozen=True, slots=True)
class ByInstrument:
    """Validates the sections of a report, or the parts of a record, by the names of their instruments."""

    of: Literal["section", "part"]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = self.of == "section"
        kinds = {i.name: i.section if sections else measuring(i).part for i in instruments()}
        fields = {name: handler.generate_schema(kind) for name, kind in kinds.items() if kind}
        return core_schema.typed_dict_schema(
            {name: core_schema.typed_dict_field(field, required=False) for name, field in fields.items()}
        )
