"""Compares a model, such as an exported or converted one, with the model that it stands for."""

from __future__ import annotations

from typing import Annotated, Any

from ampaudit.core.config import Config, Option
from ampaudit.core.instruments import RUNS, Instrument, Need

__all__ = ["INSTRUMENT", "AgainstOptions"]


class AgainstOptions(Config):
    """Options of the comparison."""

    against: Annotated[
        Any, Option("Audit OTHER instead, with MODEL as its reference.", metavar="OTHER", file=False)
    ] = None


INSTRUMENT = Instrument(
    name="against",
    title="Reference",
    options=AgainstOptions,
    needs=RUNS | {Need.FORWARD_ONLY, Need.ONE_STEP, Need.ONE_SIZE, Need.WHOLE_MODEL},
    violates=Need.OWN_REFERENCE,
)
