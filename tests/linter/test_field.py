"""Mistakes of the field, re-expressed from public issues and fixes, and correct loops in others' styles.

Each file names its source, and marks the lines where a linter should speak. The folders called ``aside`` are
for judging the rules once they are written; until then nothing looks at them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ampaudit.report.finding import Severity
from ampaudit.report.lint import LintFinding
from tests.linter.examples import lint
from tests.support.paths import ROOT

FIELD = ROOT / "tests" / "linter" / "field"
MISTAKES = sorted((FIELD / "mistakes" / "open").glob("*.py"))
CORRECT = sorted((FIELD / "correct" / "open").glob("*.py"))
MARK = "# <- here"

MISSED = {
    "03_clip_then_unscale": "found, but in the function that clips and not at its call",
    "07_noise_on_scaled_grads": "found, but in the function that adds the noise and not at its call",
    "10_skip_step_without_update": "behind a condition that is no setting, update() may have run",
    "21_scaler_remade_after_load": "methods of a class are followed one by one",
    "30_lightning_loss_backward": "frameworks are left alone",
    "33_accelerate_clip_each_micro_batch": "frameworks are left alone",
    "34_deepspeed_loss_backward": "frameworks are left alone",
    "36_apex_clip_model_params": "frameworks are left alone",
    "38_bceloss_under_autocast": "module(x) is not followed into forward",
    "39_minmax_eps_vanishes": "a note: no flow shows that the values are float16",
    "43_half_model_with_scaler": "frameworks are left alone",
    "44_index_put_dtype": "no rule",
    "46_stale_weight_cache": "called harmless, at another line (AMP840)",
    "47_forward_outside_autocast": "no rule",
    "50_torch_amp_autocast_without_device": "no rule",
    "52_growth_taken_for_skip": "no rule",
    "54_ema_on_skipped_step": "no rule",
    "60_compile_under_autocast": "no rule",
    "61_autocast_does_not_reach_threads": "the thread's function is not known",
    "63_xpu_scaler_defaults_to_cuda": "no rule",
    "64_zero_grad_missing_in_fp32_branch": "no rule",
}

FALSE_ALARMS = {
    "52_flax_dynamic_scale": {"AMP860"},  # another framework's code
    "64_notebook_export": {"AMP860"},  # what is filled is float32: the line before says .float()
}


def alarms(path: Path) -> list[LintFinding]:
    """Return the errors and warnings in a file."""
    linted = lint(path.read_text(encoding="utf-8"))
    assert not linted.unread
    return [finding for finding in linted.findings if finding.severity != Severity.NOTE]


def is_found(path: Path) -> bool:
    """Return whether an alarm is on, or next to, a marked line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    marked = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(MARK)]
    assert marked
    return any(f.line - 1 <= mark <= f.end_line + 1 for f in alarms(path) for mark in marked)


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_of_the_field_is_found_or_listed(path: Path) -> None:
    assert is_found(path) == (path.stem not in MISSED)


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: path.stem)
def test_a_correct_loop_of_the_field_raises_no_alarm_that_is_not_listed(path: Path) -> None:
    assert {finding.code for finding in alarms(path)} == FALSE_ALARMS.get(path.stem, set())


def test_the_corpus_is_whole() -> None:
    assert (len(MISTAKES), len(CORRECT)) == (32, 32)
    assert MISSED.keys() <= {path.stem for path in MISTAKES}
