"""Writes what a tuning keeps in float32 as PyTorch code, which is run before it is shown."""

from __future__ import annotations

from ampaudit.audit.advice.attempts import Attempts
from ampaudit.audit.advice.interface import AdviceContext, Kept
from ampaudit.audit.advice.pytorch import half_method, with_code
from ampaudit.audit.checks.mixed_dtypes import refused_sites
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.context import context_of
from ampaudit.core.errors import AuditError
from ampaudit.core.sites import SiteId
from ampaudit.policy import load_policy
from ampaudit.report.tuning import TuningReport
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.trace.entry import tensor_leaves
from ampaudit.tuning.trials import Trials

__all__ = ["pytorch_code"]

_KINDS = ("python", "import", "huggingface", "object")  # of sources whose layers are those of the user's code


def pytorch_code(trials: Trials, report: TuningReport) -> str:
    """Return code that casts a model and keeps the layers of what a tuning keeps in float32.

    Layers are kept as a whole, so more than the choice is in float32.

    Args:
        trials: have the model, the format and the device.
        report: of the tuning.

    Returns:
        The code; empty if it does not reach the accuracy, or no layer has the ops.
    """
    source, form = trials.source, trials.number_format
    if source.kind not in _KINDS or not report.reached:
        return ""
    least = report.measured_db if report.target_db is None else report.target_db
    settings = ScanConfig(dtype=form.name, device=trials.config.device, min_sqnr=least or 0.0)
    half = load_policy("half")
    plan = RunConfig(half, load_policy("torch-cuda"), form, trials.device, trials.config.seed)
    try:
        (audit,) = run_audits(source.model, source.batches, [plan], trials.config.on_progress)
    except AuditError:
        return ""
    context = context_of(audit, form, settings)
    subject = AdviceContext(source.model, half, context)
    attempts = Attempts(subject, source, plan, settings, refused_sites(context), ())
    members = [Kept(tuple(SiteId(kept.site) for kept in report.kept), "")] if report.kept else []
    members += [Kept((), "", weight.name) for weight in report.weights]
    tensors = (leaf for batch in source.batches for leaf in tensor_leaves(batch.args, batch.kwargs))
    floats = any(tensor.is_floating_point() for tensor in tensors)
    then = f"\n# it takes floating-point inputs in {form.name}" if floats else ""
    if not members:
        return f"model.{half_method(form)}(){then}" if attempts.judged(context).cures else ""
    written = with_code(subject, members)
    attempt = attempts.run(written[1]) if written is not None else None
    return f"{written[0]}{then}" if written is not None and attempt is not None and attempt.cures else ""
