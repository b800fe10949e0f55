# why correct: the only 16-bit dtype that can be chosen is bfloat16, which has float32's range, so no loss scaling is needed; plain backward, clip, step spread over callbacks
import contextlib
from collections import namedtuple

import torch
from torch import nn

Precision = namedtuple("Precision", "name context")


def precision(name):
    if name == "bf16":
        return Precision(name, lambda: torch.autocast("cuda", dtype=torch.bfloat16))
    if name == "fp32":
        return Precision(name, contextlib.nullcontext)
    raise ValueError(f"unsupported precision {name!r}")


class Callback:
    def before_batch(self, run): ...
    def after_loss(self, run): ...
    def before_step(self, run): ...
    def after_step(self, run): ...
    def after_epoch(self, run): ...


class Zero(Callback):
    def before_batch(self, run):
        run.opt.zero_grad(set_to_none=True)


class Backward(Callback):
    def after_loss(self, run):
        run.loss.backward()


class Clip(Callback):
    def __init__(self, value):
        self.value = value

    def before_step(self, run):
        run.norm = nn.utils.clip_grad_norm_(run.model.parameters(), self.value)


class Schedule(Callback):
    def __init__(self, make):
        self.make, self.sched = make, None

    def after_step(self, run):
        if self.sched is None:
            self.sched = self.make(run.opt)
        self.sched.step()


class Report(Callback):
    def after_epoch(self, run):
        print(f"{run.precision.name} epoch {run.epoch}: {run.loss.item():.4f} |g| {float(run.norm):.2f}")


class Run:
    def __init__(self, model, opt, loss_fn, callbacks, precision_name="bf16"):
        self.model, self.opt, self.loss_fn, self.callbacks = model, opt, loss_fn, callbacks
        self.precision = precision(precision_name)

    def emit(self, event):
        for cb in self.callbacks:
            getattr(cb, event)(self)

    def fit(self, loader, epochs):
        self.model.cuda().train()
        for self.epoch in range(epochs):
            for x, y in loader:
                self.emit("before_batch")
                with self.precision.context():
                    self.pred = self.model(x.cuda(non_blocking=True))
                    self.loss = self.loss_fn(self.pred, y.cuda(non_blocking=True))
                self.emit("after_loss")
                self.emit("before_step")
                self.opt.step()
                self.emit("after_step")
            self.emit("after_epoch")


if __name__ == "__main__":
    from soil import loader

    net = nn.Sequential(nn.Linear(220, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 7))
    Run(net, torch.optim.AdamW(net.parameters(), 2e-3), nn.CrossEntropyLoss(),
        [Zero(), Backward(), Clip(1.0), Schedule(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9999)), Report()],
        ).fit(loader(), 30)
