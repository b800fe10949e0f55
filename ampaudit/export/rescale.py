"""Rescales residual streams that overflow, before a model is converted (``--rescale``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ampaudit.audit.advice.residual_call import AttributeChange
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.rescale import rescaled_model
from ampaudit.audit.scan import Audited
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.checkpoint.parts import Part, RescaledPart
from ampaudit.core.errors import UsageError
from ampaudit.core.text import listed
from ampaudit.export.config import ConvertConfig
from ampaudit.export.huggingface import set_numbers
from ampaudit.source import ModelSource
from ampaudit.trace.converted import identity
from ampaudit.trace.fake_model import named_tensors

__all__ = ["Rescaling", "audit_rescaled"]

_NAMED = 4


@dataclass(frozen=True, slots=True)
class Rescaling:
    """The changes of ``--rescale``.

    Attributes:
        powers: Exponents of two, by every name of each weight.
        attributes: Changed numbers of modules.
        notes: Notes on the changes, or the reasons for none.
    """

    powers: Mapping[str, int]
    attributes: tuple[AttributeChange, ...]
    notes: tuple[str, ...]

    def of(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
        """Return a checkpoint of the original weights with the rescaled ones."""
        powers = {name: self.powers.get(names.get(name, name), 0) for name in checkpoint.entries}
        parts: tuple[Part, ...] = tuple(RescaledPart(part, powers) for part in checkpoint.parts)
        return replace(checkpoint, parts=parts)

    def written(self, directory: Path, source: ModelSource) -> tuple[str, ...]:
        """Set the numbers in a Hugging Face directory's configuration; return notes for the user."""
        if source.kind == "huggingface" and set_numbers(directory, source.model, self.attributes):
            return self.notes
        return (*self.notes, *self._numbers())

    def _numbers(self) -> Iterator[str]:
        """Describe the numbers that the code that loads the weights must set."""
        for name, old, new in dict.fromkeys((each.name, each.old, each.new) for each in self.attributes):
            paths = [a.module for a in self.attributes if (a.name, a.old, a.new) == (name, old, new)]
            where = listed([path or "the top module" for path in paths], _NAMED)
            yield f"with these weights, set {name} of {where} to {new!r} (it is {old!r} in the code)"


def audit_rescaled(source: ModelSource, config: ConvertConfig) -> tuple[ModelSource, Audited, Rescaling]:
    """Audit a model, and rescale each stream that overflows or is promoted for its range.

    Raises:
        AuditError: see ``audit_policies``.
    """
    if source.release is not None:
        raise UsageError("--rescale holds all weights in memory", hint="leave out --stream or --rescale")
    rescaled = rescaled_model(source, config.rules, ScanConfig.of(config))
    source, audited, changes = rescaled.source, rescaled.audited, rescaled.changes
    notes = [f"rescaled: {change.change}" for change in changes]
    notes += [
        f"--rescale: nothing at {site}: {reason}" for site, reason in list(rescaled.refused.items())[:1]
    ]
    if not notes:
        notes = ["--rescale: nothing overflows, so no weight was rescaled"]
    report = replace(audited.report, notes=(*audited.report.notes, *notes))
    tensors = named_tensors(source.model)
    powers: dict[tuple[object, ...], int] = {}
    for change in changes:
        for name, power in change.weights.items():
            powers[identity(tensors[name])] = powers.get(identity(tensors[name]), 0) + power
    every = {name: powers[identity(t)] for name, t in tensors.items() if identity(t) in powers}
    attributes = tuple(each for change in changes for each in change.attributes)
    return source, replace(audited, report=report), Rescaling(every, attributes, tuple(notes))
