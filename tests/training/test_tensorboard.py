"""TensorBoard summaries, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import OutputError, UsageError
from ampaudit.report.training import TrainingReport
from ampaudit.training.tensorboard import write_summaries
from tests.support.saved import saved

Cli = Callable[..., subprocess.CompletedProcess[str]]


def training() -> TrainingReport:
    report = saved("training")
    assert isinstance(report, TrainingReport)
    return report


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return read


def test_every_number_comes_back(tmp_path: Path) -> None:
    report = training()
    write_summaries(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"fp32", "torch.amp", "apex-o3"}
    for variant in report.variants:
        read = events(tmp_path / variant.name)
        losses = read.Scalars("loss")
        assert [event.step for event in losses] == list(range(len(variant.health.steps)))
        for event, record in zip(losses, variant.health.steps, strict=True):
            expected = math.nan if record.loss is None else record.loss
            assert event.value == pytest.approx(expected, rel=1e-6, nan_ok=True)
        skipped = sum(event.value for event in read.Scalars("skipped"))
        assert skipped == variant.health.skipped
        for parameter in variant.health.parameters:
            peaks = read.Scalars(f"gradient peak/{parameter.name}")
            assert [event.step for event in peaks] == list(variant.health.watched[: len(peaks)])
            assert len(peaks) == len(parameter.gradient_peaks)
    found = events(tmp_path / "apex-o3").Tensors("findings/text_summary")
    assert b"AMP711" in found[0].tensor_proto.string_val[0]


def test_what_is_there_is_not_mixed_up(tmp_path: Path) -> None:
    write_summaries(training(), tmp_path)
    with pytest.raises(OutputError, match="holds summaries already"):
        write_summaries(training(), tmp_path)
    write_summaries(training(), tmp_path, force=True)


def test_names_of_runs_are_names_of_folders(tmp_path: Path) -> None:
    report = training()
    variant = replace(report.variants[0], name="../../rules/my policy.yaml")
    write_summaries(replace(report, variants=(variant,), findings=()), tmp_path / "logs")
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name == "..-..-rules-my-policy.yaml"


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="need the package tensorboard") as caught:
        write_summaries(training(), tmp_path)
    assert "ampaudit[tensorboard]" in caught.value.hint


def test_a_watched_loop(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampaudit.watch(model, optimizer, every=2) as watched:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            watched.loss(loss)
            optimizer.step()
    watched.tensorboard(tmp_path)
    read = events(tmp_path / "watched")
    assert len(read.Scalars("loss")) == 4
    assert [event.step for event in read.Scalars("gradient peak/weight")] == [0, 2]


def test_from_the_command_line(cli: Cli, model_file: Callable[..., Path], tmp_path: Path) -> None:
    path = model_file(
        "def get_model():\n    return nn.Linear(4, 1)\n"
        "def batches():\n    while True:\n        yield torch.randn(8, 4)\n"
        "def loss(output):\n    return output.square().mean()\n"
    )
    done = cli("train", path, "--steps", "3", "--tensorboard", tmp_path / "logs", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    assert "summaries written to" in done.stderr
    assert len(events(tmp_path / "logs" / "fp32").Scalars("loss")) == 3
