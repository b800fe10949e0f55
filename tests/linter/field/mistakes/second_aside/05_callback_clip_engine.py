"""
# source: https://github.com/catalyst-team/catalyst/issues/1319
# mistake: the optimizer callback applies its clip function right after the engine's scaled backward, so an AMP run clips scaled gradients.
# severity: error
# torch: any
"""
from functools import partial

import torch


class DeviceEngine:
    def context(self):
        return torch.autocast("cuda", enabled=False)

    def backward_loss(self, loss):
        loss.backward()

    def optimizer_step(self, optimizer):
        optimizer.step()

    def zero_grad(self, optimizer):
        optimizer.zero_grad()


class AMPEngine(DeviceEngine):
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def context(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def backward_loss(self, loss):
        self.scaler.scale(loss).backward()

    def optimizer_step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()


class OptimizerCallback:
    def __init__(self, accumulation_steps=1, grad_clip_fn=None):
        self.accumulation_steps = accumulation_steps
        self.grad_clip_fn = grad_clip_fn
        self._counter = 0

    def on_batch_end(self, runner):
        self._counter += 1
        runner.engine.backward_loss(runner.loss / self.accumulation_steps)
        if self._counter % self.accumulation_steps == 0:
            if self.grad_clip_fn is not None:
                self.grad_clip_fn(runner.model.parameters())  # <- here
            runner.engine.optimizer_step(runner.optimizer)
            runner.engine.zero_grad(runner.optimizer)


class Runner:
    def __init__(self, model, optimizer, criterion, engine, callbacks):
        self.model, self.optimizer, self.criterion = model.cuda(), optimizer, criterion
        self.engine, self.callbacks = engine, callbacks
        self.loss = None

    def train(self, loader, num_epochs):
        for _ in range(num_epochs):
            self.model.train()
            for x, y in loader:
                with self.engine.context():
                    self.loss = self.criterion(self.model(x.cuda()), y.cuda())
                for callback in self.callbacks:
                    callback.on_batch_end(self)


def main(model, loader):
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=2.0)
    runner = Runner(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        torch.nn.CrossEntropyLoss(),
        AMPEngine(),
        [OptimizerCallback(accumulation_steps=2, grad_clip_fn=clip)],
    )
    runner.train(loader, 10)
