"""What ``scan --advise`` proposes, applied by hand: it does what is printed, and keeps the user's model."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.audit.advice import Proposal
from ampaudit.audit.scan import scan
from ampaudit.core.formats import low_precision_format
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.fold import fold_casts, folded_weights
from ampaudit.export.program import GraphModel
from ampaudit.findings.finding import Finding, Trial
from ampaudit.policy import load_policy
from ampaudit.report.model import Report
from ampaudit.source import ModelSource
from ampaudit.source.open import open_source
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.converted import attach_weights
from tests.support.cures.case import Case
from tests.support.cures.table import CASES
from tests.support.diffs import patched

NEAR = 4.0  # dB between what is printed and what a rescan, or torch's own kernels, give
MIN_SQNR = 20.0


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == "error"]


def opened(text: str, path: Path, batches: int) -> ModelSource:
    path.write_text(text, encoding="utf-8")
    return open_source(str(path), SourceConfig(batches=batches))


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def decibels(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal to error ratio by its definition; of booleans by the share that differs."""
    if not reference.is_floating_point():
        share = float((reference != value).double().mean())
        return -20 * math.log10(share) if share else math.inf
    error = (reference.double() - value.double()).square().sum()
    if not bool(value.isfinite().all()):
        return -math.inf
    return 10 * math.log10(float(reference.double().square().sum() / error)) if error else math.inf


def worst(source: ModelSource, model: nn.Module, policy: str, dtype: torch.dtype) -> float:
    """Accuracy of the worst output, on all batches, of a real 16-bit run against the user's FP32 model."""
    autocast = policy == "torch-cpu"

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and not autocast else tensor

    model = copy.deepcopy(model) if autocast else copy.deepcopy(model).to(dtype)
    found = []
    for batch in source.batches:
        with torch.no_grad():
            wanted = tensors(copy.deepcopy(source.model)(*batch.args))
            with torch.autocast("cpu", dtype, enabled=autocast):
                got = tensors(model(*pytree.tree_map_only(torch.Tensor, lower, batch.args)))
        found += [decibels(a, b) for a, b in zip(wanted, got, strict=True)]
    return min(found)


class Native:
    """The converted graph under a policy, run by torch's own kernels."""

    def __init__(self, source: ModelSource, policy: str, dtype: str) -> None:
        self.source, self.policy, self.dtype = source, policy, dtype

    def worst(self) -> float:
        found = []
        for batch in self.source.batches:
            made = trace(
                self.source.model,
                batch.args,
                batch.kwargs,
                TraceConfig(
                    load_policy(self.policy), load_policy("torch-cuda"), low_precision_format(self.dtype)
                ),
            )
            converted = attach_weights(made)
            deployed = fold_casts(converted, "inference")
            names = {f"output.{i}": i for i in range(len(made.outputs))}
            model = GraphModel(deployed, folded_weights(converted, deployed, {}), names, train=False)
            with torch.no_grad():
                wanted = tensors(copy.deepcopy(self.source.model)(*batch.args))
                got = tensors(model(*batch.args))
            found += [decibels(a, b) for a, b in zip(wanted, got, strict=True)]
        return min(found)


def pasted_rules(trial: Trial, policy: str, place: Path) -> str:
    """The rule in a file of the user's."""
    path = place / "mine.yaml"
    rules = trial.paste if trial.paste.startswith("weights:") else f"rules:\n{trial.paste}"
    path.write_text(f"name: mine\ntitle: mine\nextends: [{policy}]\n{rules}\n", encoding="utf-8")
    return str(path)


def applied(
    case: Case, trial: Trial, source: ModelSource, place: Path
) -> tuple[ModelSource, str, str, float]:
    """The changed model, its policy and dtype, and the accuracy that it really has."""
    policy, dtype = case.policy, "float16"
    changed = source
    if trial.kind == "rewrite":
        assert case.rewrite is not None, f"another model: {trial}"
        assert bool(trial.diff) != case.by_hand, trial.diff
        if trial.diff:
            assert patched(case.source, trial.diff) == case.rewritten
        changed = opened(case.rewritten, place / "changed.py", case.count)
        for name, tensor in changed.model.state_dict().items():
            assert torch.equal(tensor, source.model.state_dict()[name])
    elif trial.kind == "rescale":
        changed = opened(case.source, place / "changed.py", case.count)
        exec(trial.paste, {"torch": torch, "model": changed.model})
    elif trial.kind == "rule":
        policy = pasted_rules(trial, case.policy, place)
        return source, policy, dtype, Native(source, policy, dtype).worst()
    else:
        assert trial.paste == "--dtype bfloat16"
        dtype = "bfloat16"
    if case.policy == "torch-cuda":
        return changed, policy, dtype, Native(changed, policy, dtype).worst()
    lower = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    return changed, policy, dtype, worst(source, changed.model, case.policy, lower)


def near(first: float, second: float) -> bool:
    return first == second or abs(first - second) <= NEAR


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_what_the_change_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    least = float(case.options.get("min_sqnr", MIN_SQNR))  # type: ignore[arg-type]
    source = opened(case.source, tmp_path / "model.py", case.count)
    report = scan(source, policy=case.policy, dtype="float16", diff=True, **case.options)  # type: ignore[arg-type]
    found = errors(report)
    assert found, "the model has no fault"
    trials = [(finding, trial) for finding in found for trial in finding.tried]
    kinds = {trial.kind for _, trial in trials}
    assert ("rewrite" in kinds) == (case.rewrite is not None), [f.code for f in found]
    assert set(case.kinds) <= kinds
    assert not kinds & set(case.never)
    for finding, trial in trials:
        changed, policy, dtype, real = applied(case, trial, source, tmp_path)
        again = scan(changed, policy=policy, dtype=dtype, min_sqnr=least)
        left = errors(again)
        assert finding.site not in {f.site for f in left}, trial
        assert len(left) == trial.left
        assert (trial.outcome == "cure") == (not left)
        assert trial.after.endswith(f"{len(left)} error{'s' if len(left) != 1 else ''}")
        if trial.outcome == "cure":
            printed = math.inf if trial.after_db is None else trial.after_db
            accuracies = [o.sqnr_db for o in again.outputs if o.sqnr_db is not None]
            rescanned = min(accuracies, default=math.inf)
            assert printed >= least
            if "eps" in trial.paste:  # the rescan compares with FP32 under the new eps
                assert rescanned >= min(printed, 80.0) - NEAR, (printed, rescanned, trial)
            else:
                assert near(printed, rescanned), (printed, rescanned, trial)
            assert near(printed, real), (printed, real, trial)


PROVED = [
    name
    for name, case in CASES.items()
    if "rescale" in case.never
    or (name.startswith(("log_", "scale", "constant")) and case.rewrite is None and not case.by_runs)
]


@pytest.mark.parametrize("name", PROVED)
def test_without_proof_a_change_is_not_even_tried(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run shows that these inputs do not tell the difference; the proof, that none do."""
    offered: list[str] = []

    def noted(advisor: object, proposal: Proposal, finding: Finding) -> Trial:
        offered.append(proposal.kind)
        return Trial(proposal.kind, proposal.change, proposal.paste, "", "", "failed")

    monkeypatch.setattr("ampaudit.audit.advise._Advisor._try", noted)
    case = CASES[name]
    source = opened(case.source, tmp_path / "model.py", case.count)
    scan(source, policy=case.policy, dtype="float16", advise=True)
    assert offered
    assert not {"rewrite", "rescale"} & set(offered)
