"""Results beyond the given batches: proofs, searches, tail estimates, other contracts."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.core.assumptions import Assumption
from ampaudit.core.sites import SiteId

__all__ = ["Proofs", "Stressed", "Tail", "VerdictChange"]


@dataclass(frozen=True, slots=True)
class Stressed:
    """The search result of one site (``--stress``).

    Attributes:
        site: which.
        seen: the FP32 peak on the given batches.
        reached: the largest FP32 peak that an input of the domain was found to make.
        overflows: whether that input overflows in a run.
        file: where it was saved, to be used with ``--inputs``.
    """

    site: SiteId
    seen: float
    reached: float
    overflows: bool
    file: str | None


@dataclass(frozen=True, slots=True)
class Tail:
    """Expected overflows of a site beyond the data (``run/extreme_value.py``), with a 90 % interval."""

    site: SiteId
    per_million: float
    low: float
    high: float
    batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """A site with another gravest finding under another execution contract (``--contract``)."""

    site: SiteId
    usual: str
    here: str


@dataclass(frozen=True, slots=True)
class Proofs:
    """The assumptions of the proofs, and their count.

    Attributes:
        assumed: the range of each input: stated, of an embedding table's rows, or of the batches.
        proved: sites that cannot overflow by their own fault.
        sites: sites that the proofs are about.
        uncovered_ops: ops that nothing is known about; their values are taken to be anything.
        contract: what is taken for granted about kernels.
    """

    assumed: tuple[Assumption, ...]
    proved: int
    sites: int
    uncovered_ops: tuple[str, ...]
    contract: str
