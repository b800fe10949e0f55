# source: https://github.com/mosaicml/composer/pull/1376
# mistake: the scaler's saved state is loaded into an object that fit() afterwards replaces by a fresh GradScaler, so the restored loss scale is thrown away.
# severity: warning
from contextlib import nullcontext

import torch
from torch import nn
from torch.cuda import amp


class Callback:
    def on_epoch_end(self, learner, metrics):
        pass


class Printer(Callback):
    def on_epoch_end(self, learner, metrics):
        line = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        print(f"[{learner.epoch}] {line}")


class Learner:
    """Small supervised trainer; precision is 'fp32' or 'amp'."""

    def __init__(self, module, loss_fn, optimizer, precision="amp", device="cuda", callbacks=()):
        self.module = module.to(device)
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.precision = precision
        self.device = device
        self.callbacks = list(callbacks)
        self.epoch = 0
        self.scaler = amp.GradScaler(enabled=precision == "amp")

    def _context(self):
        return amp.autocast() if self.precision == "amp" else nullcontext()

    def save(self, path):
        torch.save(
            {
                "module": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "epoch": self.epoch,
            },
            path,
        )

    def load(self, path):
        blob = torch.load(path, map_location=self.device)
        self.module.load_state_dict(blob["module"])
        self.optimizer.load_state_dict(blob["optimizer"])
        self.scaler.load_state_dict(blob["scaler"])  # <- here
        self.epoch = blob["epoch"]

    def _train_batch(self, x, y):
        self.optimizer.zero_grad()
        with self._context():
            loss = self.loss_fn(self.module(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def fit(self, loader, epochs, valid=None, save_to=None):
        self.scaler = amp.GradScaler(enabled=self.precision == "amp")  # <- here
        last = self.epoch + epochs
        while self.epoch < last:
            self.module.train()
            total = torch.zeros((), device=self.device)
            for x, y in loader:
                total += self._train_batch(x.to(self.device), y.to(self.device))
            metrics = {"train": total.item() / len(loader)}
            if valid is not None:
                metrics["valid"] = self.evaluate(valid)
            self.epoch += 1
            for cb in self.callbacks:
                cb.on_epoch_end(self, metrics)
            if save_to:
                self.save(save_to)

    @torch.no_grad()
    def evaluate(self, loader):
        self.module.eval()
        total = 0.0
        for x, y in loader:
            with self._context():
                out = self.module(x.to(self.device))
                total += self.loss_fn(out, y.to(self.device)).item()
        return total / len(loader)


def continue_training(path, loader, valid):
    body = nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.GELU(), nn.Linear(1024, 10))
    body = body.cuda()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
    learner = Learner(body, nn.CrossEntropyLoss(), optimizer, callbacks=[Printer()])
    learner.load(path)  # <- here
    learner.fit(loader, epochs=10, valid=valid, save_to=path)  # <- here
    return learner
