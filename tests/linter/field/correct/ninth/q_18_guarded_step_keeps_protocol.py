# why correct: a rejected step still zeroes the gradients and calls update(), so the unscale/step/update cycle stays whole
import logging
import math

import torch
import torch.nn as nn

log = logging.getLogger(__name__)


class GradientGuard:
    """Rejects steps whose norm is far above the running average."""

    def __init__(self, factor=8.0, momentum=0.98, warm=200):
        self.factor, self.momentum, self.warm = factor, momentum, warm
        self.mean, self.n, self.rejected = None, 0, 0

    def accepts(self, norm):
        self.n += 1
        if not math.isfinite(norm):
            return True
        ok = self.mean is None or self.n < self.warm or norm < self.factor * self.mean
        if ok:
            self.mean = norm if self.mean is None else self.momentum * self.mean + (1 - self.momentum) * norm
        else:
            self.rejected += 1
        return ok


class Engine:
    def __init__(self, model, loss_fn, lr, clip, accum=1):
        self.model, self.loss_fn = model.cuda(), loss_fn
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.guard = GradientGuard()
        self.clip, self.accum, self.micro = clip, accum, 0

    def train_batch(self, batch):
        self.model.train()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss_fn(self.model, batch)
        self.scaler.scale(loss / self.accum).backward()
        self.micro += 1
        if self.micro % self.accum == 0:
            self._advance()
        return loss.detach()

    def _advance(self):
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip).item()
        if self.guard.accepts(norm):
            self.scaler.step(self.opt)
        else:
            log.warning("norm %.2f against mean %.2f: step rejected", norm, self.guard.mean)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)


def flow_loss(model, batch):
    first, second, flow, valid = (t.cuda(non_blocking=True) for t in batch)
    total = 0.0
    predictions = model(first, second)
    for i, pred in enumerate(predictions):
        weight = 0.8 ** (len(predictions) - i - 1)
        err = (pred.float() - flow).abs().sum(1)
        total = total + weight * (err * valid).sum() / valid.sum().clamp(min=1)
    return total


def train(model, batches, lr=4e-4):
    engine = Engine(model, flow_loss, lr, clip=1.0, accum=2)
    for i, batch in enumerate(batches):
        loss = engine.train_batch(batch)
        if i % 100 == 0:
            log.info("%d loss %.3f scale %.0f rejected %d", i, loss.item(), engine.scaler.get_scale(),
                     engine.guard.rejected)
    return engine.model
