# source: mosaicml/composer PR #1376
# mistake: the scaler whose state was just restored is thrown away, since fit() builds a new one after the checkpoint has been loaded
# severity: warning
from dataclasses import dataclass, field
from typing import Callable, Iterable, List, Optional

import torch
from torch import nn


@dataclass
class RunState:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cuda"))
    batch: int = 0
    epoch: int = 0

    PARTS = ("model", "optimizer", "scaler")

    def state_dict(self):
        out = {name: getattr(self, name).state_dict() for name in self.PARTS}
        out.update(batch=self.batch, epoch=self.epoch)
        return out

    def load_state_dict(self, blob):
        for name in self.PARTS:
            getattr(self, name).load_state_dict(blob[name])
        self.batch, self.epoch = blob["batch"], blob["epoch"]


class Hook:
    def epoch_end(self, state: RunState):
        pass


class SaveEvery(Hook):
    def __init__(self, folder, n=1):
        self.folder, self.n = folder, n

    def epoch_end(self, state):
        if state.epoch % self.n == 0:
            torch.save(state.state_dict(), f"{self.folder}/ep{state.epoch}.pt")


class ForecastRunner:
    def __init__(self, model, optimizer, loss_fn: Callable, load_path: Optional[str] = None,
                 hooks: Optional[List[Hook]] = None):
        self.state = RunState(model.cuda(), optimizer)
        self.loss_fn = loss_fn
        self.hooks = hooks or []
        if load_path:
            self.state.load_state_dict(torch.load(load_path, map_location="cuda"))  # <- here

    def fit(self, loader: Iterable, max_epochs: int):
        self.state.scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)  # <- here
        self.state.model.train()
        while self.state.epoch < max_epochs:
            for fields, future in loader:
                self._train_batch(fields.cuda(non_blocking=True), future.cuda(non_blocking=True))
            self.state.epoch += 1
            for h in self.hooks:
                h.epoch_end(self.state)

    def _train_batch(self, fields, future):
        s = self.state
        s.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = self.loss_fn(s.model(fields), future)
        s.scaler.scale(loss).backward()
        s.scaler.unscale_(s.optimizer)
        nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.batch += 1


def build(resume=None):
    net = nn.Sequential(nn.Conv2d(20, 128, 5, padding=2), nn.GELU(), nn.Conv2d(128, 128, 5, padding=2), nn.GELU(),
                        nn.Conv2d(128, 20, 1)).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    return ForecastRunner(net, opt, nn.functional.smooth_l1_loss, load_path=resume, hooks=[SaveEvery("ckpt")])
