"""Callbacks in the trainers of Lightning and Transformers record what the module itself sees."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(module: Any, callback: Any, *, batches: int = 8, **options: Any) -> None:
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        | {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": [callback]}
        | options
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8 * batches, 8)), batch_size=8))


def automatic(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """A module that keeps its losses and the peaks of its gradients."""
    import lightning.pytorch as lightning

    class Automatic(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = nn.Linear(8, 1)
            self.losses: list[float] = []
            self.peaks: list[float] = []
            self.without: tuple[int, ...] = ()

        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            if index in self.without:
                return None
            loss = (self.inner(batch[0]) - batch[0][:, :1]).square().mean()
            self.losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradient = self.inner.weight.grad
            self.peaks.append(0.0 if gradient is None else gradient.abs().max().item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.parameters())

    return Automatic()


def manual(scheme: str) -> Any:
    """Two networks and optimizers: a step of each, or one loss for both."""
    import lightning.pytorch as lightning

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
            self.losses: list[list[float]] = [[], []]
            self.peaks: list[list[float]] = [[], []]

        def training_step(self, batch: Any, index: int) -> None:
            optimizers = self.optimizers()
            if scheme == "both backward first":
                return self.step_both(batch[0], optimizers)
            groups = [(0, 1)] if scheme == "one loss" else [(0,), (1,)]
            for group in groups[: 1 if scheme == "alternating" and index % 2 else None]:
                output = self.second(torch.relu(self.first(batch[0])))
                loss = (1 + group[0]) * F.mse_loss(output, batch[0][:, :1])
                for number in group:
                    optimizers[number].zero_grad()
                self.manual_backward(loss)
                for number in group:
                    weight = (self.first, self.second)[number].weight
                    self.losses[number].append(loss.item())
                    self.peaks[number].append(weight.grad.abs().max().item())
                    optimizers[number].step()

        def step_both(self, x: torch.Tensor, optimizers: Any) -> None:
            losses = [10 * self.first(x).square().mean(), self.second(x).square().mean()]
            for number in range(2):
                optimizers[number].zero_grad()
                self.manual_backward(losses[number])
            for number, weight in enumerate((self.first.weight, self.second.weight)):
                self.losses[number].append(losses[number].item())
                self.peaks[number].append(weight.grad.abs().max().item())
                optimizers[number].step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [
                torch.optim.Adam(self.first.parameters(), lr=1e-2),
                torch.optim.SGD(self.second.parameters(), lr=1e-2),
            ]

    return Manual()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.LBFGS])
def test_automatic_optimization(tmp_path: Path, optimizer: Any) -> None:
    """The trainer hands the optimizer a closure, which computes the gradients of the step."""
    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(tmp_path / "health.json", every=3)
    own = {"lr": 1e-2} if optimizer is torch.optim.Adam else {"max_iter": 1}
    module = automatic(lambda p: optimizer(p, **own))
    fit(module, callback)
    health = callback.health
    assert health is not None
    assert health.watched == (0, 3, 6)
    assert [step.loss for step in health.steps] == pytest.approx(module.losses)
    weight = {p.name: p for p in health.parameters}["inner.weight"]
    assert weight.gradient_peaks == pytest.approx(tuple(module.peaks[::3]))
    data = json.loads((tmp_path / "health.json").read_text())
    assert data["optimizer"] == optimizer.__name__
    assert data["model"]["source"] == "Automatic"


def test_accumulation() -> None:
    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(every=1)
    module = automatic(lambda p: torch.optim.SGD(p, lr=0.1))
    fit(module, callback, accumulate_grad_batches=4)
    health = callback.health
    assert health is not None
    pairs = [sum(module.losses[i : i + 4]) / 4 for i in (0, 4)]
    assert [step.loss for step in health.steps] == pytest.approx(pairs)
    assert health.parameters[0].gradient_peaks == pytest.approx(tuple(module.peaks))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_without_a_loss(accumulated: int) -> None:
    """Lightning takes the step all the same; in accumulation, the other batches' losses are its own."""
    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(every=1)
    module = automatic(lambda p: torch.optim.SGD(p, lr=0.1))
    module.without = (3,)
    fit(module, callback, accumulate_grad_batches=accumulated)
    assert callback.health is not None
    own: list[float | None] = [*module.losses]
    own.insert(3, None)
    if accumulated == 2:  # each is divided by their number
        own = [sum(loss or 0.0 for loss in own[i : i + 2]) / 2 for i in range(0, 8, 2)]
    assert [step.loss for step in callback.health.steps] == pytest.approx(own)
    assert [step.recorded for step in callback.health.steps] == [loss is not None for loss in own]


def test_a_loss_scale() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(every=1)
    module = automatic(lambda p: torch.optim.SGD(p, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)  # the first steps overflow
    fit(module, callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    health = callback.health
    assert health is not None
    assert [step.loss for step in health.steps] == pytest.approx(module.losses, rel=1e-3)
    assert health.steps[0].scale == 2.0**19
    skipped = sum(step.skipped for step in health.steps)
    assert 0 < skipped < 8
    assert health.steps[-1].scale == 2.0 ** (19 - skipped)
    assert callback._monitor is not None
    assert callback._monitor.latest()["skipped_steps"] == skipped


@pytest.mark.parametrize("scheme", ["each its own", "one loss", "alternating", "both backward first"])
def test_several_optimizers(tmp_path: Path, scheme: str) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(every=1)
    module = manual(scheme)
    fit(module, callback, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    report = callback.report
    assert report is not None
    assert [v.name for v in report.variants] == ["optimizer 0 (Adam)", "optimizer 1 (SGD)"]
    assert report.optimizer == "Adam, SGD"
    for index, variant in enumerate(report.variants):
        assert [step.loss for step in variant.health.steps] == pytest.approx(module.losses[index])
        weight = {p.name: p for p in variant.health.parameters}[f"{('first', 'second')[index]}.weight"]
        assert weight.gradient_peaks == pytest.approx(tuple(module.peaks[index]))
    with next(tmp_path.rglob("metrics.csv")).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for index, variant in enumerate(report.variants):
        logged = [float(row[f"ampaudit/gradient_peak/{index}"]) for row in rows]
        peaks = [max(p.gradient_peaks[-1] or 0.0 for p in variant.health.parameters)]
        assert len(logged) == 4
        assert logged[-1:] == pytest.approx(peaks)


class Full(list[float]):
    """Takes three numbers."""

    def append(self, value: float) -> None:
        super().append(value / (3 - len(self)))


def test_a_run_that_fails_keeps_its_record(tmp_path: Path) -> None:
    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback(tmp_path / "health.json")
    module = automatic(lambda p: torch.optim.SGD(p, lr=0.1))
    module.losses = Full()
    with pytest.raises(ZeroDivisionError):
        fit(module, callback)
    data = json.loads((tmp_path / "health.json").read_text())
    assert len(data["variants"][0]["health"]["steps"]) == 3


def transformer(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, report_to=[],
        use_cpu=True, disable_tqdm=True, **({"logging_steps": 1} | options),
    )  # fmt: skip
    return Trainer(
        BertForSequenceClassification(config), arguments, train_dataset=data, callbacks=list(callbacks)
    )


def test_a_transformers_trainer_logs_our_numbers_and_resumes(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from ampaudit.training.huggingface import TransformersHealthCallback

    seen: list[tuple[int, dict[str, float]]] = []

    class Reporter(TrainerCallback):
        """What ``report_to`` puts before a user's callbacks."""

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, dict(kwargs["logs"])))

    trainer = transformer(tmp_path, Reporter(), max_steps=4, save_steps=4)
    callback = TransformersHealthCallback(tmp_path / "health.json", every=2, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    health = callback.health
    assert health is not None
    assert health.watched == (0, 2)
    assert health.parameters[0].name.startswith("bert.embeddings")
    own = [logs["loss"] for _, logs in seen if "loss" in logs]
    assert [step.loss for step in health.steps] == pytest.approx(own)
    assert len(own) == 4
    peaks = [logs["ampaudit/gradient_peak"] for _, logs in seen if "ampaudit/gradient_peak" in logs]
    largest = [max(p.gradient_peaks[i] or 0.0 for p in health.parameters) for i in (0, 0, 1, 1)]
    assert peaks == pytest.approx(largest)
    assert (tmp_path / "health.json").is_file()

    seen.clear()
    again = TransformersHealthCallback(every=1)
    resumed = transformer(tmp_path, Reporter(), again, max_steps=6, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.health is not None
    losses = [logs["loss"] for _, logs in seen if "loss" in logs]
    assert [step.loss for step in again.health.steps] == pytest.approx(losses)
    assert len(losses) == 2


def test_a_mean_over_steps_is_that_of_each_step(tmp_path: Path) -> None:
    """The Trainer logs the mean of the losses since its last log; the model keeps its own."""
    from ampaudit.training.huggingface import TransformersHealthCallback

    callback = TransformersHealthCallback(every=1)
    trainer = transformer(tmp_path, callback, max_steps=7, logging_steps=3, save_strategy="no")
    own: list[float] = []
    trainer.model.register_forward_hook(lambda *call: own.append(call[-1].loss.item()))
    trainer.train()
    assert callback.health is not None
    means = [sum(own[i : i + 3]) / 3 for i in (0, 3)]
    losses = [step.loss for step in callback.health.steps]
    assert losses[:6] == pytest.approx([means[0]] * 3 + [means[1]] * 3, abs=1e-4)
    assert [step.recorded for step in callback.health.steps] == [True] * 6 + [False]


@pytest.mark.parametrize(
    ("precision", "expected", "why"),
    [
        ("bf16-mixed", "bfloat16", "the trainer's format"),
        ("bf16-true", "bfloat16", "the trainer's format"),
        ("32-true", "float16", "by default"),
    ],
)
def test_the_format_is_lightnings(precision: str, expected: str, why: str) -> None:
    from ampaudit.training.lightning import LightningHealthCallback

    callback = LightningHealthCallback()
    fit(automatic(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), callback, precision=precision)
    assert callback.report is not None
    assert callback.report.dtype == expected
    assert any(note.startswith(f"judged by {expected}, {why}") for note in callback.report.notes)


def test_the_format_is_transformers(tmp_path: Path) -> None:
    from ampaudit.training.huggingface import TransformersHealthCallback

    callback = TransformersHealthCallback()
    transformer(tmp_path, callback, bf16=True, max_steps=2).train()
    assert callback.report is not None
    assert callback.report.dtype == "bfloat16"
    assert "judged by bfloat16, the trainer's format" in callback.report.notes
