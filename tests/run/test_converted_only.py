"""The 16-bit run without its reference computes the same bits as beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampaudit.core.formats import low_precision_format
from ampaudit.policy.load import load_policy
from ampaudit.run.config import RunConfig
from ampaudit.run.lockstep import LockStep, Observer
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import ExecutorCache
from ampaudit.source.interface import Batch


class Mixed(nn.Module):
    """Layers that round, ops on integers, random numbers, and a weight in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.scale = nn.Parameter(torch.randn(16, dtype=torch.float16), requires_grad=False)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layer(self.table(ids) + x * self.scale)
        return hidden, ids + 1, hidden.softmax(-1).argmax(-1)


@pytest.mark.parametrize("policy", ["half", "ampaudit", "as-is", "strongly-typed"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_computes_the_same_bits(policy: str, dtype: str) -> None:
    torch.manual_seed(0)
    batch = Batch((torch.randint(0, 20, (2, 5)), torch.randn(2, 5, 16)))
    cpu = torch.device("cpu")
    settings = RunConfig(load_policy(policy), load_policy("torch-cuda"), low_precision_format(dtype), cpu)
    executor = ExecutorCache(Mixed().eval(), settings, RunRecord("cpu", "emulated")).get(batch, 0)
    beside = executor.run(list(batch.args), Observer())
    alone = LockStep(executor.program, executor.placed, executor.backend, cpu, converted_only=True)
    found = alone.run(list(batch.args), Observer())
    for (_, expected), (_, value) in zip(beside, found, strict=True):
        assert torch.equal(expected, value)
    if policy != "as-is":  # it is the 16-bit run, and not the reference
        assert any(not torch.equal(first, second) for first, second in beside)
