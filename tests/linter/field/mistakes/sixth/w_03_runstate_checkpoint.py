# source: ultralytics/ultralytics pull request #22189
# mistake: the checkpoint keeps model, optimizer, scheduler and step but not the GradScaler, so a resumed fp16 run starts again with the initial loss scale and growth count
# severity: warning
from __future__ import annotations

import dataclasses
import pathlib
import signal
from typing import Any

import torch
from torch import nn, optim


@dataclasses.dataclass
class RunState:
    """All that changes while we train."""

    net: nn.Module
    opt: optim.Optimizer
    sched: optim.lr_scheduler.LRScheduler
    amp: torch.cuda.amp.GradScaler
    it: int = 0
    best: float = float("inf")

    def dump(self) -> dict[str, Any]:  # <- here
        return {  # <- here
            "net": self.net.state_dict(),
            "opt": self.opt.state_dict(),
            "sched": self.sched.state_dict(),
            "it": self.it,
            "best": self.best,
            "rng": torch.get_rng_state(),
        }

    def restore(self, blob: dict[str, Any]) -> None:  # <- here
        self.net.load_state_dict(blob["net"])
        self.opt.load_state_dict(blob["opt"])
        self.sched.load_state_dict(blob["sched"])
        self.it = blob["it"]
        self.best = blob["best"]
        torch.set_rng_state(blob["rng"])


class Depot:
    def __init__(self, folder: pathlib.Path, keep: int = 3):
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def latest(self) -> pathlib.Path | None:
        files = sorted(self.folder.glob("it_*.pt"))
        return files[-1] if files else None

    def write(self, state: RunState) -> None:
        target = self.folder / f"it_{state.it:08d}.pt"
        tmp = target.with_suffix(".tmp")
        torch.save(state.dump(), tmp)  # <- here
        tmp.rename(target)
        for old in sorted(self.folder.glob("it_*.pt"))[: -self.keep]:
            old.unlink()


def make_state(lr: float, total: int) -> RunState:
    net = nn.Sequential(
        nn.Linear(64, 512), nn.SiLU(), nn.LayerNorm(512),
        nn.Linear(512, 512), nn.SiLU(), nn.LayerNorm(512),
        nn.Linear(512, 1),
    ).cuda()
    opt = optim.AdamW(net.parameters(), lr=lr)
    sched = optim.lr_scheduler.OneCycleLR(opt, max_lr=lr, total_steps=total)
    return RunState(net, opt, sched, torch.cuda.amp.GradScaler(init_scale=2.0 ** 14, growth_interval=500))


def one_iteration(st: RunState, x: torch.Tensor, y: torch.Tensor) -> float:
    st.opt.zero_grad(set_to_none=True)
    with torch.cuda.amp.autocast():
        loss = nn.functional.smooth_l1_loss(st.net(x).squeeze(-1).float(), y)
    st.amp.scale(loss).backward()
    st.amp.unscale_(st.opt)
    nn.utils.clip_grad_norm_(st.net.parameters(), 5.0)
    st.amp.step(st.opt)
    st.amp.update()
    st.sched.step()
    st.it += 1
    return loss.item()


def train(stream, folder="ckpt/load_forecast", total=200_000, lr=2e-3):
    depot = Depot(pathlib.Path(folder))
    st = make_state(lr, total)
    found = depot.latest()
    if found is not None:
        st.restore(torch.load(found, map_location="cpu"))  # <- here
        print("resuming at", st.it)

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    for x, y in stream:
        if st.it >= total:
            break
        loss = one_iteration(st, x.cuda(non_blocking=True), y.cuda(non_blocking=True))
        if st.it % 1000 == 0 or stop:
            st.best = min(st.best, loss)
            depot.write(st)
        if stop:
            break
