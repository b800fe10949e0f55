"""Predicted memory, against what is measured; and why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ampaudit.audit.inputs import as_source
from ampaudit.source import ModelSource
from tests.support.bench import bert, example, resnet, rows_of

ALL = "fp32,autocast,half,bf16,converted"


MODELS = {
    "bert": (bert, False), "bert training": (bert, True),
    "resnet": (resnet, False), "resnet training": (resnet, True),
    "text training": (example("training/text.py"), True),
    "digits training": (example("training/digits.py"), True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "train"),
    [pytest.param(*case, id=name) for name, case in MODELS.items()],
)
def test_memory_is_predicted_but_for_what_kernels_take(
    made: Callable[[bool], ModelSource], train: bool
) -> None:
    """What kernels take for themselves differs between processors; all the rest is predicted, on any."""
    for mode, row in rows_of(made(train), ALL, train=train).items():
        assert row.status == "ok", row.note
        assert row.memory is not None, row.note
        assert row.peak_bytes is not None
        assert row.workspace_bytes is not None
        assert row.peak_bytes - row.workspace_bytes == pytest.approx(row.memory.peak, rel=0.02), mode


def test_weights_gradients_and_states_are_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    count = sum(p.numel() for p in model.parameters())
    source = replace(
        as_source(model.train(), batches=[torch.randn(4, 64)]),
        loss=lambda output: output.float().square().mean(),
    )
    found = rows_of(source, "fp32,half,autocast", train=True)
    for mode, size in (("fp32", 4), ("autocast", 4), ("half", 2)):
        memory = found[mode].memory
        assert memory is not None
        assert memory.weights == size * count
        assert memory.optimizer == 2 * size * count + 4 * len(list(model.parameters()))
        assert memory.peak == sum(
            (memory.weights, memory.masters, memory.gradients, memory.optimizer, memory.activations)
        )
    plain = rows_of(replace(source, model=model.eval()), "fp32,half,converted", policy="half")
    assert [found.memory.weights for found in plain.values() if found.memory] == [
        4 * count,
        2 * count,
        2 * count,
    ]


def test_masters_are_told_apart_from_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    source = replace(
        as_source(model.train(), batches=[torch.randn(4, 64)]), loss=lambda output: output.float().mean()
    )
    memory = rows_of(source, "converted", train=True, policy="apex-o2")["converted"].memory
    assert memory is not None
    assert memory.masters == 4 * (64 * 64 + 64)  # O2 keeps the norm as it is
    assert memory.weights == 4 * (4 * 64) + 8  # weight, bias, two running statistics, and their count
    pure = rows_of(source, "converted", train=True, policy="apex-o3")["converted"]
    assert pure.status == "ok", pure.note
    assert pure.memory is not None
    assert pure.memory.masters == 0


def test_a_prediction_that_is_not_possible_says_why() -> None:
    class Counting(nn.Module):
        """Branches on data, which a tensor without data does not have."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    row = rows_of(as_source(Counting().eval(), batches=[torch.ones(2, 8)]), "fp32")["fp32"]
    assert row.status == "ok"
    assert row.memory is None
    assert row.note.startswith("no prediction: Python control flow depends on the values")


class WithTable(nn.Module):
    """A model with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x) * self.table
        return made


def test_a_tensor_that_the_model_does_not_register_prevents_no_prediction() -> None:
    row = rows_of(as_source(WithTable().eval(), batches=[torch.ones(2, 8)]), "fp32")["fp32"]
    assert row.memory is not None, row.note
