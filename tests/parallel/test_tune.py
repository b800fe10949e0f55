"""``tune`` under torchrun: the same policy and the same figures from any number of ranks."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.parallel import METRIC, MODEL, alone, started, torchrun, without_times, written
from tests.support.program import Program

TUNE = ("tune", "mixed.py", "--batches", "5", "--force", "--format", "json")

# a residual stream of a few hundred thousands, which is offered rescaled
STREAM = """
import torch
from torch import nn

class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.last, self.head = nn.LayerNorm(16), nn.LayerNorm(16, eps=1e-6), nn.Linear(16, 4)
        with torch.no_grad():
            self.down.weight.mul_(1e6)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x))

def get_model():
    return PreNorm()

def batches():
    for _ in range(5):
        yield torch.randn(6, 16)
"""


@pytest.mark.parametrize(
    ("body", "options", "count"),
    [
        (MODEL, ("--min-sqnr", "75"), 2),
        (MODEL + METRIC, ("--metric-drop", "0.00001"), 3),
        (STREAM, ("--min-sqnr", "30"), 2),
        (MODEL, ("--dtype", "auto", "--min-sqnr", "60", "--exhaustive"), 3),
        (MODEL, ("--min-sqnr", "60", "--cost", "bytes"), 7),
    ],
    ids=["accuracy", "metric", "rescale", "exhaustive", "more ranks than batches"],
)
def test_ranks_tune_as_one_process_does(
    folder: Path, body: str, options: tuple[str, ...], count: int
) -> None:
    written(folder, body)
    done = alone(folder, *TUNE, *options, "-o", "one.json")
    assert done.returncode == 0, done.stderr
    done = torchrun(folder, count, *TUNE, *options, "-o", "ranks.json")
    assert done.returncode == 0, done.stderr
    assert without_times(folder / "ranks.json") == without_times(folder / "one.json")
    assert bool(json.loads((folder / "one.json").read_text())["rescale"]) == (body == STREAM)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_is_killed_while_tuning_is_named(folder: Path, ranks: list[Program], seed: int) -> None:
    chance = random.Random(seed)
    ranks += started(folder, 3, *TUNE, "--min-sqnr", "75", "-o", "ranks.json", AMPAUDIT_RANK_TIMEOUT="30")
    victim = chance.randrange(1, 3)
    time.sleep(1 + chance.random() * 5)
    alive = ranks[victim].poll() is None
    ranks[victim].send_signal(signal.SIGKILL)
    said = [process.communicate(timeout=120) for process in ranks]
    if not alive or (folder / "ranks.json").exists():
        assert ranks[0].returncode == 0, said[0]
        return
    assert [process.returncode for process in ranks if process is not ranks[victim]] == [3, 3], said
    lines = [line for line in said[0][1].splitlines() if line.startswith("ampaudit: ")]
    how = ("ended", "not started within 30 s")
    assert lines in [[f"ampaudit: rank {victim} has {what}: nothing was reported"] for what in how]
