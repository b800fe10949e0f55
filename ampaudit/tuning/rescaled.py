"""Says what a rescaled residual stream makes unnecessary."""

from __future__ import annotations

from ampaudit.audit.advice.residual import ResidualRescale
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.rescale import rescaled_model
from ampaudit.core.text import plural
from ampaudit.policy import load_policy
from ampaudit.report.tuning import TuningReport
from ampaudit.source import ModelSource
from ampaudit.tuning.config import TuneConfig

__all__ = ["rescale_text", "rescaled_source"]

_POLICY = "ampaudit"  # whose norms are in float32, as those of a tuned policy


def rescaled_source(
    source: ModelSource, dtype: str, config: TuneConfig
) -> tuple[ModelSource, tuple[ResidualRescale, ...]]:
    """Return a model whose residual streams are rescaled where they overflow, and the changes."""
    if source.kind == "onnx":
        return source, ()
    settings = ScanConfig(dtype=dtype, device=config.device, seed=config.seed)
    found = rescaled_model(source, load_policy(_POLICY), settings)
    return found.source, found.changes


def rescale_text(changes: tuple[ResidualRescale, ...], after: TuningReport) -> str:
    """Return the changes in words and as code, with what must stay in float32 after them."""
    ops = f"{len(after.kept)} of {plural(after.ops, 'op')} in float32"
    accuracy = "" if after.measured_db is None else f", {after.measured_db:.1f} dB"
    written = f"then: {ops}{accuracy}; written by: ampaudit convert --rescale --tune DB"
    said = "\n".join(change.change for change in changes)
    code = "\n\n".join(change.paste for change in changes)
    return f"{said}\n{written}\n\n{code}"
