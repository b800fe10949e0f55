# why correct: a hand-made dynamic loss scale does what GradScaler does: divide the gradients before clipping, skip on overflow, halve and grow, and is saved
import math
from typing import Iterable, List

import torch
from torch import Tensor, nn


class DynamicScale:
    def __init__(self, start=2.0**15, grow_every=2000, lowest=1.0, highest=2.0**24):
        self.value = start
        self.grow_every = grow_every
        self.lowest, self.highest = lowest, highest
        self.good = 0
        self.overflows = 0

    def unscale(self, params: Iterable[nn.Parameter]) -> bool:
        """Divides the gradients in place. Returns whether all of them are finite."""
        grads: List[Tensor] = [p.grad for p in params if p.grad is not None]
        torch._foreach_mul_(grads, 1.0 / self.value)
        total = torch.stack([g.abs().max() for g in grads]).max()
        return math.isfinite(total.item())

    def adapt(self, finite: bool):
        if not finite:
            self.value = max(self.value / 2, self.lowest)
            self.good = 0
            self.overflows += 1
            return
        self.good += 1
        if self.good == self.grow_every:
            self.value = min(self.value * 2, self.highest)
            self.good = 0

    def state_dict(self):
        return {"value": self.value, "good": self.good, "overflows": self.overflows}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Seq2Series(nn.Module):
    """Electricity load: one week of hourly values -> next day's quantiles."""

    def __init__(self, inputs=10, width=256, horizon=24, quantiles=9):
        super().__init__()
        self.shape = horizon, quantiles
        self.rnn = nn.GRU(inputs, width, 3, batch_first=True, dropout=0.1)
        self.out = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, horizon * quantiles))

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1]).view(-1, *self.shape)


def pinball(pred: Tensor, truth: Tensor, levels: Tensor) -> Tensor:
    diff = truth.unsqueeze(-1) - pred.float()
    return torch.maximum(levels * diff, (levels - 1) * diff).mean()


def train(loader, epochs=50, path="load.pt", resume=None):
    model = Seq2Series().cuda()
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-3)
    scale = DynamicScale()
    levels = torch.linspace(0.1, 0.9, 9, device="cuda")
    first = 0
    if resume:
        state = torch.load(resume, map_location="cuda")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scale.load_state_dict(state["scale"])
        first = state["epoch"] + 1

    for epoch in range(first, epochs):
        model.train()
        for week, day in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = model(week.cuda())
            loss = pinball(pred, day.cuda(), levels)
            (loss * scale.value).backward()
            finite = scale.unscale(params)
            if finite:
                nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
            scale.adapt(finite)
        print(epoch, loss.item(), scale.state_dict())
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scale": scale.state_dict(),
                "epoch": epoch,
            },
            path,
        )
