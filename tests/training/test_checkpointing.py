"""Models that recompute activations train with the values that they have without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.report.training import TrainingReport
from ampaudit.source.interface import Batch, ModelSource
from ampaudit.training.module import KEEPS_ACTIVATIONS
from ampaudit.training.train import train
from tests.support.own_backwards import WIDTH, Block
from tests.support.training.cases import classes


class Stack(nn.Module):
    """A stem, residual blocks with dropout, and a head."""

    def __init__(self, reentrant: bool | None, stem: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.blocks = nn.Sequential(Block(reentrant), nn.Dropout(0.2), Block(reentrant))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


def trained(model: nn.Module, batch: Batch, loss: Callable[..., Any] | None) -> TrainingReport:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the graph does is a note of the report
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        source = ModelSource("m", "object", model, (batch,), loss=loss)
        return train(source, steps=4, policies=("torch-cuda", "apex-o2", "ampaudit"))


def losses(report: TrainingReport) -> list[list[float | None]]:
    return [[step.loss for step in variant.health.steps] for variant in report.variants]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_bit_of_a_run(reentrant: bool) -> None:
    batch = Batch((torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)),))
    plain, recomputing = (trained(Stack(kind), batch, classes) for kind in (None, reentrant))
    assert losses(recomputing) == losses(plain)
    own = set(recomputing.notes) - set(plain.notes)
    assert own == {f"torch-cuda, apex-o2, ampaudit: {KEEPS_ACTIVATIONS}"}


def test_a_reentrant_checkpoint_of_an_input_gives_no_gradients_as_in_eager() -> None:
    """Autograd does not see what such a checkpoint computes from a tensor that requires no gradient."""
    rows = torch.randn(8, WIDTH)
    for reentrant in (False, True):
        eager, model = Stack(reentrant, stem=False), Stack(reentrant, stem=False)
        prepared = ampaudit.prepare(model.eval(), policy="apex-o0", emulate=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in (eager.eval(), prepared.model):
                classes(module(rows)).backward()
        expected = {name: p.grad for name, p in eager.named_parameters()}
        assert (expected["blocks.0.inner.0.weight"] is None) is reentrant
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [None, {"use_reentrant": True}])
def test_a_transformer_with_gradient_checkpointing_trains(options: dict[str, bool] | None) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def made(recomputes: bool) -> nn.Module:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
        )
        if recomputes:
            model.gradient_checkpointing_enable(options)
        return model

    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = Batch((), {"input_ids": ids, "labels": ids})
    plain, recomputing = (trained(made(kind), batch, None) for kind in (False, True))
    assert losses(recomputing) == losses(plain)
    assert any(KEEPS_ACTIVATIONS in note for note in recomputing.notes)


def test_prepare_says_once_that_activations_are_kept() -> None:
    prepared = ampaudit.prepare(Stack(False), policy="torch-cuda", emulate=True)
    with pytest.warns(UserWarning, match="autocast.*recomputes them") as caught:
        prepared.model(torch.randn(2, WIDTH))
    prepared.model(torch.randn(3, WIDTH))  # warnings are errors
    assert len(caught) == 1
