"""The document of ``plan``: the effect of a policy without a run in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ampaudit.report.card import CardRows, Displayable, counted


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """The planned precision of one op.

    Attributes:
        role: Effect of the op on its input.
        precision: Dtype of its output.
        rule: Id of the rule that decided; ``None`` for the default of the policy.
        reason: Range, precision, no-kernel, speed, semantics, author or default.
        why: Sentence of the rule, with the measurements if they decided.
        casts: Number of conversions that the policy inserts before it.
        cast_bytes: Number of bytes that these read and write.
    """

    site: str
    layer: str
    op: str
    role: str
    precision: str
    rule: str | None
    reason: str
    why: str
    casts: int
    cast_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    """Bytes of parameters, buffers and constants, counting tied ones once.

    Attributes:
        before: Bytes in the model.
        after: Bytes in a converted checkpoint, with weights in 16 bits where the policy stores them so or
            every use takes them in 16 bits.
        masters: Bytes of FP32 masters that training keeps beside 16-bit weights; 0 without any.
    """

    before: int
    after: int
    masters: int


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A part of the model that all batches pass before the next.

    Attributes:
        first: Name of the first site.
        weights: Bytes of the FP32 weights that it reads.
        values: Peak bytes of live values, of both runs of one batch.
        boundary: Bytes of live values at its end, of both runs of one batch.
    """

    first: str
    weights: int
    values: int
    boundary: int


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory that a scan by segment needs, if all batches have the shapes of the first."""

    limit: int  # in bytes
    batches: int
    segments: tuple[PlannedSegment, ...]  # in execution order

    @property
    def largest(self) -> int:
        """Bytes of the largest segment: its weights and values."""
        return max(segment.weights + segment.values for segment in self.segments)

    @property
    def waiting(self) -> int:
        """Peak bytes of the boundaries of all batches, which are kept on the host or on disk."""
        return max(segment.boundary for segment in self.segments) * self.batches


@dataclass(frozen=True, slots=True)
class RuleUse:
    """A rule and the number of sites that it decides."""

    rule: str | None
    reason: str
    why: str
    sites: int


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(Displayable):
    """A plan. ``lower``, ``float32`` and ``other`` count sites that compute floating-point values."""

    model: str
    policy: str
    dtype: str
    sites: tuple[PlannedSite, ...]
    rules: tuple[RuleUse, ...]
    lower: int
    float32: int
    other: int
    casts: int
    cast_bytes: int
    author_casts: int
    weights: PlannedWeights
    notes: tuple[str, ...]
    memory: PlannedMemory | None = None
    schema: Literal[1] = 1
    kind: Literal["plan"] = "plan"

    def select_layers(self, layer: str) -> PlanReport | None:
        """Return the plan of the layers that match a glob; ``None`` if none does."""
        sites = tuple(site for site in self.sites if fnmatchcase(site.layer, layer))
        note = f"only the layers that match {layer!r} are shown; totals are for the whole model"
        return replace(self, sites=sites, notes=(*self.notes, note)) if sites else None

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        casts = counted(self.casts, "cast")
        sites = f"{self.lower} sites in {self.dtype}, {self.float32} in float32"
        return f"{self.model} under {self.policy}: {sites}, {casts}"

    def card_rows(self) -> CardRows:
        """Return the rules that decided."""
        return [(use.rule or "", counted(use.sites, "site"), use.why) for use in self.rules]
