"""Runs a model with some values in float32 and all others in 16 bits, on the batches of all machines."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ampaudit.audit.advice.residual import ResidualRescale
from ampaudit.audit.config import MIN_SQNR, ScanConfig
from ampaudit.audit.metric import mean_metric, metric_of, metrics_of, within_drop
from ampaudit.audit.rescale import rescaled_model
from ampaudit.audit.scan import Audited, audit_policies
from ampaudit.audit.sensitivity import probing
from ampaudit.core.errors import InputError, RunFailed
from ampaudit.core.formats import low_precision_format
from ampaudit.core.sites import globs_of
from ampaudit.core.text import plural
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.schema import Cast, Reason
from ampaudit.report.tuning import TuningReport
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.outputs import compare_outputs
from ampaudit.run.sensitivity.measure import SensitivityProbe
from ampaudit.run.sensitivity.probe import PrecisionGraph
from ampaudit.run.share import ALONE, BatchNumbers, PartDone, Share
from ampaudit.source import ModelSource
from ampaudit.trace.values import torch_dtype
from ampaudit.tuning.config import TuneConfig
from ampaudit.tuning.search import Accuracy, Choice

__all__ = ["Trials", "follow", "loaded", "rescale_text", "rule_file"]


_POLICY = "ampaudit"  # keeps norms in float32, as a tuned policy does
BASE = "16-bit"


class Trials:
    """Run one model in one 16-bit format: with probes, and with chosen values in float32.

    Where machines share the batches, the first decides what to run, and the others follow it; on those, each
    method raises ``PartDone`` once this machine's batches are done.

    Args:
        source: Model to run.
        dtype: Name of the 16-bit format.
        config: Options of ``tune``.
        changes: Rescalings of the model.

    Attributes:
        base: Policy that puts everything in 16 bits.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: str,
        config: TuneConfig,
        changes: tuple[ResidualRescale, ...] = (),
    ) -> None:
        self.source, self.config, self.changes = source, config, changes
        self.number_format = low_precision_format(dtype)
        self.dtype = torch_dtype(self.number_format)
        self.device = pick_device(config.device, audits=True)
        self.base = _base(source).for_environment(environment_of(self.device))
        self._share: Share = config.share or ALONE
        self._probes: list[SensitivityProbe] = []

    @property
    def graph(self) -> PrecisionGraph:
        """The values of the programs of all batches."""
        return self._probes[-1].graph

    def probe(self) -> Audit:
        """Run with everything in 16 bits, and probe the outputs.

        Raises:
            AuditError: see ``run_audits``; an output has no gradient.
        """
        config = self.config
        self._share.tell("probe", *(change.change for change in self.changes))
        plan = RunConfig(self.base, load_policy("torch-cuda"), self.number_format, self.device, config.seed)
        plan = probing(plan, self.source, self._probes, decisions=config.metric_drop is not None)
        (audit,) = run_audits(self.source.model, self.source.batches, [plan], config.on_progress, self._share)
        return audit

    def accuracy(self, choice: Choice) -> Accuracy:
        """Run a choice on all batches; return the accuracy of the worst output in the worst batch."""
        self._share.tell("accuracy", *sorted(choice))
        config, outputs, results = self.config, dict[int, Any](), BatchNumbers()
        for batch in self._probes[-1].batches:
            self._share.mine("trial", batch.number)
            pairs = batch.run(choice, self.dtype)
            accuracies = (output.accuracy_db for output in compare_outputs(pairs, batch.number).values())
            results[batch.number] = [min((db for db in accuracies if db is not None), default=math.inf)]
            if config.metric_drop is not None:
                outputs[batch.number] = pairs
        for number, pair in (metrics_of(self.source, outputs) if outputs else {}).items():
            results[number] += pair
        every = self._share.gathered(results).values()
        least = min(db for db, *_ in every)
        worst = None if least == math.inf else least
        if config.metric_drop is None:
            assert config.target_db is not None
            return Accuracy(worst, worst is None or worst >= config.target_db)
        exact, lower = mean_metric([metric for _, *metric in every])
        if math.isinf(exact):
            raise InputError("metric(output, batch) is NaN or infinite in FP32", hint="return a number")
        return Accuracy(worst, within_drop(exact, lower, config.metric_drop), (exact, lower))

    def keep_low(self, casts: Collection[str]) -> None:
        """Treat these casts in the model's code as casts to 16 bits, whatever their inputs."""
        self._share.tell("keep_low", *sorted(casts))
        self._probes[-1].keep_low(casts)

    def audit(self, text: str) -> tuple[Audited, tuple[float, float] | None]:
        """Audit a rule file; return the audit with the metric in FP32 and in 16 bits, if one is asked for."""
        self._share.tell("audit", text)
        config, outputs = self.config, dict[int, Any]()
        target = config.target_db
        settings = ScanConfig(
            dtype=self.number_format.name,
            device=config.device,
            seed=config.seed,
            min_sqnr=MIN_SQNR if target is None else target,
            keep_outputs=outputs.__setitem__,
            share=config.share,
        )
        audited: Audited | None = None
        with suppress(PartDone):  # the outputs that this machine has are still to be judged
            (audited,) = audit_policies(self.source, [loaded(text)], settings)
        metric = None if config.metric_drop is None else metric_of(self.source, outputs, self._share)
        if audited is None:
            raise PartDone
        return audited, metric

    def rescaled(self) -> Trials | None:
        """Return trials of a model whose residual streams are rescaled; ``None`` if none overflows."""
        self._share.tell("rescale")
        source, changes = rescaled_source(self.source, self.number_format.name, self.config)
        if not changes:
            return None
        return Trials(source, self.number_format.name, self.config.changed(exhaustive=False), changes)


def follow(source: ModelSource, config: TuneConfig, share: Share) -> NoReturn:
    """Run the tasks of the first machine until it ends.

    Raises:
        PartDone: always.
        AuditError: this machine cannot run it.
    """
    trials: Trials | None = None
    for name, *words in share.tasks():
        with suppress(PartDone):
            if name == "start":
                trials = Trials(source, words[0], config)
            else:
                assert trials is not None, "a start comes first"
                trials = _followed(trials, name, words)
    raise PartDone


def _followed(trials: Trials, name: str, words: list[str]) -> Trials:
    """Run one task; return the trials that the next task belongs to."""
    if name == "rescale":
        return trials.rescaled() or trials
    if name == "probe":
        if words != [change.change for change in trials.changes]:
            raise RunFailed(
                "this machine rescales the model in another way than the first",
                hint="use machines of one kind",
            )
        trials.probe()
    elif name == "accuracy":
        trials.accuracy(frozenset(words))
    elif name == "keep_low":
        trials.keep_low(words)
    else:
        trials.audit(*words)
    return trials


def _base(source: ModelSource) -> RuleSet:
    """Return the initial policy, which puts everything in 16 bits."""
    if source.kind != "onnx":
        return load_policy(BASE)
    rules = load_policy("strongly-typed")
    static = tuple(rule for rule in rules.file.rules if not rule.measured)
    return RuleSet(rules.file.model_copy(update={"rules": static}), None, rules.environment, rules.location)


def rescaled_source(
    source: ModelSource, dtype: str, config: TuneConfig
) -> tuple[ModelSource, tuple[ResidualRescale, ...]]:
    """Return a model whose residual streams are rescaled where they overflow, and the changes."""
    if source.kind == "onnx":
        return source, ()
    settings = ScanConfig(dtype=dtype, device=config.device, seed=config.seed)
    rescaled = rescaled_model(source, load_policy(_POLICY), settings)
    return rescaled.source, rescaled.changes


def rescale_text(changes: tuple[ResidualRescale, ...], after: TuningReport) -> str:
    """Return the changes in words and as code, with what must stay in float32 after them."""
    ops = f"{len(after.kept)} of {plural(after.ops, 'op')} in float32"
    accuracy = "" if after.measured_db is None else f", {after.measured_db:.1f} dB"
    outcome = f"then: {ops}{accuracy}; written by: ampaudit convert --rescale --tune DB"
    summary = "\n".join(change.change for change in changes)
    code = "\n\n".join(change.paste for change in changes)
    return f"{summary}\n{outcome}\n\n{code}"


def rule_file(
    base: RuleSet,
    name: str,
    title: str,
    ops: Mapping[Reason, Sequence[str]],
    weights: Sequence[str],
    every: tuple[Sequence[str], Sequence[str]],
) -> str:
    """Return a rule file (YAML) that extends a policy and keeps ops and weights in float32.

    Args:
        base: Policy to extend.
        name: Name of the new policy.
        title: Title of the new policy.
        ops: Sites in float32, by reason.
        weights: Names of weights stored in float32.
        every: All sites and all weights, which the patterns must tell apart.
    """
    sites, names = every
    data: dict[str, Any] = {"name": name, "title": title, "extends": [base.location or base.name]}
    if weights:
        stored = base.file.weights.model_dump(mode="json", exclude_defaults=True)
        data["weights"] = stored | {"keep": [{"parameter": globs_of(weights, names)}]}
    rules = [_rule(reason, globs_of(members, sites)) for reason, members in ops.items() if members]
    if rules:
        data["rules"] = rules
    return yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True)


_WHY = {
    Reason.RANGE: "its values leave the range of the 16-bit format.",
    Reason.PRECISION: "the accuracy that was asked for needs it.",
    Reason.NO_KERNEL: "PyTorch has no 16-bit kernel for it.",
}


def _rule(reason: Reason, sites: list[str]) -> dict[str, Any]:
    return {
        "id": f"tuned/{reason.value}",
        "match": {"site": sites},
        "cast": Cast.FLOAT32.value,
        "reason": reason.value,
        "why": _WHY[reason],
        "source": "ampaudit tune",
    }


def loaded(text: str) -> RuleSet:
    """Return the rules of a rule file's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.yaml"
        path.write_text(text, "utf-8")
        rules = load_policy(path)
    return RuleSet(rules.file, rules.ops, rules.environment)
