"""Rescales the residual streams of a model that overflow, without changing a bit of its FP32 results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ampaudit.audit.advice.attempts import same_function
from ampaudit.audit.advice.residual import ResidualRescale, residual_rescale
from ampaudit.audit.advice.residual_stream import Refusal
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Session
from ampaudit.core.sites import SiteId
from ampaudit.policy import RuleSet
from ampaudit.source import ModelSource

_STREAMS = 8  # each costs an audit


@dataclass(frozen=True, slots=True)
class RescaledModel:
    """A model whose streams were rescaled."""

    source: ModelSource  # the changed model
    audited: Audited  # audit of the changed model
    changes: tuple[ResidualRescale, ...]  # changes of weights and eps
    # reason why a site whose value leaves the range could not be rescaled, by site
    refused: dict[SiteId, str]


def rescaled_model(
    source: ModelSource, rules: RuleSet, config: ScanConfig, session: Session = DEFAULT_SESSION
) -> RescaledModel:
    """Audit a model, and rescale each stream that overflows or is promoted for its range.

    Raises:
        AuditError: See ``audit_policies``.
    """
    changes: list[ResidualRescale] = []
    refused: dict[SiteId, str] = {}
    (audited,) = audit_policies(source, [rules], config, session)
    while len(changes) < _STREAMS:
        step = next(_changes(source, audited, rules, config, session, refused), None)
        if step is None:
            break
        source, audited, change = step
        changes.append(change)
    return RescaledModel(source, audited, tuple(changes), refused)


def _changes(
    source: ModelSource,
    audited: Audited,
    rules: RuleSet,
    config: ScanConfig,
    session: Session,
    refused: dict[SiteId, str],
) -> Iterator[tuple[ModelSource, Audited, ResidualRescale]]:
    """Yield models with a rescaled stream, and record the sites that cannot be rescaled in ``refused``."""
    audit = audited.audit
    flow, form = audit.flow, low_precision_format(config.dtype)
    peaks = {site: stats.ref_peak for site, stats in audit.record.observations.items()}
    sites = {site.id: site for site in audit.sites}
    failing = [origin.site for origin in audit.record.origins]
    stored = source.model.state_dict().keys()
    for name in dict.fromkeys((*failing, *audit.promoted)):
        if name in refused or name not in sites:
            continue
        try:
            change = residual_rescale(source.model, flow, sites[name], peaks, form, audit.promoted)
            if other := next((weight for weight in change.weights if weight not in stored), None):
                raise Refusal(f"{other} is not stored with the weights")
            changed = replace(source, model=change.applied(source.model))
            if not same_function(source, changed.model):
                raise Refusal("FP32 does not give the same bits")
        except Refusal as refusal:
            refused[name] = str(refusal)
            continue
        (after,) = audit_policies(changed, [rules], config, session)
        if change.is_in(flow, after.audit.flow):
            yield changed, after, change
        refused[name] = "the code reads the eps elsewhere as well"
