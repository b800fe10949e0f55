"""Trains one model in one process, and under DDP, FSDP2 and tensor parallelism, one process for each rank.

``python -m tests.support.training_ranks FOLDER RANK RANKS POLICY...`` is one rank; what it sees is written to
the folder.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import ampaudit
from ampaudit.training import module
from ampaudit.training.module import round_through
from tests.support.paths import ROOT

STEPS = 5
BROKEN = 2  # the step in which gradients of the last rank alone are NaN
SCALE = 1024.0
WIDTH, LENGTH, HEADS, ROWS = 16, 8, 4, 16


class Block(nn.Module):
    """Attention with positions and a mask that the code makes itself, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position(torch.arange(x.shape[1]))
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -1e4).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@dataclass
class Seen:
    """What one rank sees of a run; losses are means over the ranks, weights are whole."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peaks: int = 0  # measured gradients
    traces: int = 0


@dataclass(frozen=True)
class Setting:
    """How a process takes part: its wrapper, its part of a batch, the mean over all, and what it spoils."""

    wrap: Callable[[ampaudit.Prepared], nn.Module] = lambda prepared: prepared.model
    part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    mean: Callable[[torch.Tensor], float] = float
    spoiled: str = "q.weight"


def train(setting: Setting, policy: str, group: Any = None, **options: Any) -> Seen:
    torch.manual_seed(0)
    prepared = ampaudit.prepare(Block(), policy=policy, loss_scale="torch", emulate=True, group=group)
    model = setting.wrap(prepared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)
    scaler, seen = prepared.scaler, Seen()
    scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE})
    with (
        patch.object(module, "trace", wraps=module.trace) as trace,
        ampaudit.watch(model, optimizer, scaler, every=1) as monitor,
    ):
        for step in range(STEPS):
            x = setting.part(torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), x[:, 0, :4].argmax(1))
            monitor.loss(loss)
            scaler.scale(loss).backward()
            if step == BROKEN and setting.spoiled:
                spoil(dict(model.named_parameters())[setting.spoiled].grad)
            scaler.step(optimizer)
            scaler.update()
            seen.losses.append(setting.mean(loss.detach()))
            seen.scales.append(scaler.get_scale())
    health = monitor.health()
    seen.skipped = [step.skipped for step in health.steps]
    seen.notes = list(monitor.report().notes)
    seen.peaks = sum(len(parameter.gradient_peaks) for parameter in health.parameters)
    seen.weights = [value for p in model.parameters() for value in whole(p).flatten().tolist()]
    seen.traces = trace.call_count
    return seen


def spoil(gradient: Any) -> None:
    """Make this process's part of a gradient NaN."""
    (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(math.nan)


def whole(parameter: Any) -> torch.Tensor:
    given = parameter.detach()
    return given.full_tensor() if hasattr(given, "full_tensor") else given  # type: ignore[no-any-return]


def alone(policy: str) -> Seen:
    """Train in one process on all rows."""
    return train(Setting(), policy)


class Rank:
    """One of several processes."""

    def __init__(self, rank: int, ranks: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.ranks = rank, ranks
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.last = rank == ranks - 1

    def runs(self, policies: Sequence[str]) -> dict[str, Seen]:
        """Train in all ways; ``told`` gives the scaler its group."""
        first = policies[0]
        return {
            **{f"ddp {policy}": train(self.ddp(), policy) for policy in policies},
            **{f"fsdp {policy}": train(self.fsdp(), policy) for policy in policies},
            **{f"tp {policy}": train(self.tp(), policy) for policy in policies},
            f"fsdp {first} told": train(self.fsdp(), first, group=True),
            f"fsdp {first} fused": train(self.fsdp(), first, fused=True),
            f"tp {first} whole": train(self.tp("head.weight"), first),
            "absent": self.absent(),
            "rounded": self.rounded(),
        }

    def ddp(self) -> Setting:
        calls: list[None] = []

        def spoiled(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            return gradient * math.nan if len(calls) == BROKEN + 1 and self.last else gradient

        def wrap(prepared: ampaudit.Prepared) -> nn.Module:
            weight: Any = prepared.model.get_parameter("q.weight")
            weight.register_hook(spoiled)  # runs before gradients are averaged
            return nn.parallel.DistributedDataParallel(prepared.model)

        return Setting(wrap, self.part, self.mean, "")

    def fsdp(self) -> Setting:
        def wrap(prepared: ampaudit.Prepared) -> nn.Module:
            from torch.distributed.fsdp import fully_shard

            return fully_shard(prepared.model, mesh=self.mesh)

        return Setting(wrap, self.part, self.mean, "q.weight" if self.last else "")

    def tp(self, spoiled: str = "q.weight") -> Setting:
        def wrap(prepared: ampaudit.Prepared) -> nn.Module:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
            plan |= {name: RowwiseParallel() for name in ("o", "down")}
            return parallelize_module(prepared.model, self.mesh, plan)

        return Setting(wrap, spoiled=spoiled if self.last else "")

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self.ranks)[self.rank]

    def mean(self, loss: torch.Tensor) -> float:
        torch.distributed.all_reduce(loss)
        return loss.item() / self.ranks

    def absent(self) -> Seen:
        """Step a weight that has gradients on the first rank only: finite, inf, and finite again."""
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler, seen = ampaudit.scaler("torch", "cpu", group=True), Seen()
        for gradient in (65536.0, math.inf, 0.0):
            scaler.scale(torch.ones(1))
            weight.grad = torch.tensor([gradient]) if self.rank == 0 else None
            scaler.step(optimizer)
            scaler.update()
            seen.scales.append(scaler.get_scale())
            seen.weights.append(weight.item())
        return seen

    def rounded(self) -> Seen:
        """Round 2049 and its gradient, of which the first rank holds 2048 and the others the rest."""
        own = 2048.0 if self.rank == 0 else 1 / (self.ranks - 1)
        seen, sums = Seen(), DTensor.from_local(torch.tensor([own]), self.mesh, [Partial()])
        seen.losses = whole(round_through(sums, torch.float16)).tolist()
        like = torch.ones(1, requires_grad=True)
        value = DTensor.from_local(like, self.mesh, [Replicate()])
        round_through(value, torch.float16).backward(sums)
        assert like.grad is not None
        seen.weights = like.grad.tolist()
        return seen


def seen_by_ranks(folder: Path, ranks: int, policies: Sequence[str]) -> list[Mapping[str, Seen]]:
    """Start the processes, and return what each has seen."""
    command = [sys.executable, "-m", "tests.support.training_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), *policies], env=environment, cwd=ROOT,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [{name: Seen(**seen) for name, seen in runs.items()} for runs in found]


def main(folder: Path, rank: int, ranks: int, policies: Sequence[str]) -> None:
    """Be one rank."""
    store = torch.distributed.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    runs = {name: asdict(seen) for name, seen in Rank(rank, ranks).runs(policies).items()}
    (folder / f"{rank}.json").write_text(json.dumps(runs), encoding="utf-8")
    torch.distributed.barrier()  # nobody leaves while another still talks


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    # torch 2.13 keeps gloo's threads where DDP was used, and one of them can abort the interpreter while it
    # ends (pytorch#190489)
    sys.stderr.flush()
    os._exit(0)
