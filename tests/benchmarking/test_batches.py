"""Batches of other sizes."""

from __future__ import annotations

import pytest
import torch

from ampaudit.benchmarking.modes import batch_size_of, moved, resized
from ampaudit.core.errors import InputError
from ampaudit.source import Batch

CPU = torch.device("cpu")


def test_batches_are_repeated_or_cut() -> None:
    images, labels, mask = torch.arange(12.0).reshape(3, 4), torch.arange(3), torch.ones(7, 7)
    batch = Batch((images,), {"mask": mask}, (images, labels))
    assert batch_size_of(batch) in (3, 7)
    batch = Batch((images,), {}, (images, labels))
    larger = resized(batch, 7)
    assert larger.args[0].shape == (7, 4)
    assert torch.equal(larger.args[0][3:6], images)
    assert larger.item[1].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert larger.item[0] is larger.args[0]
    assert resized(batch, 2).item[1].tolist() == [0, 1]
    assert resized(batch, 3) is batch
    assert moved(batch, CPU, torch.float16).item[1].dtype is torch.int64
    with pytest.raises(InputError, match="no batch dimension"):
        resized(Batch((torch.tensor(1.0),)), 4)
