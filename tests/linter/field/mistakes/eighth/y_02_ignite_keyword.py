# source: https://github.com/TorchSSL/TorchSSL/pull/59
# mistake: clip_grad_value_ is applied to scaled gradients (no unscale_ before), so all elements saturate at the clip value and the update is near zero after unscaling.
# severity: error
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch.cuda.amp import GradScaler, autocast

from kws.data import make_loaders


class KeywordNet(nn.Module):
    def __init__(self, mels=64, width=96, classes=35):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(mels, width, 9, padding=4), nn.BatchNorm1d(width), nn.ReLU(inplace=True),
            nn.Conv1d(width, width, 9, padding=4, groups=width), nn.BatchNorm1d(width), nn.ReLU(inplace=True),
        )
        self.rnn = nn.GRU(width, 128, batch_first=True, bidirectional=True)
        self.cls = nn.Linear(256, classes)

    def forward(self, x):
        h = self.front(x).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.cls(h.mean(dim=1))


def make_trainer(net, optim, limit, device):
    scaler = GradScaler(init_scale=2.0 ** 14)

    def limit_gradients():
        torch.nn.utils.clip_grad_value_(net.parameters(), clip_value=limit)  # <- here

    def update(engine, batch):
        net.train()
        optim.zero_grad()
        spec, word = (t.to(device, non_blocking=True) for t in batch)
        with autocast():
            logits = net(spec)
            loss = F.cross_entropy(logits, word, label_smoothing=0.1)
        scaler.scale(loss).backward()  # <- here
        limit_gradients()  # <- here
        scaler.step(optim)
        scaler.update()
        return {"loss": loss.item()}

    trainer = Engine(update)
    RunningAverage(output_transform=lambda o: o["loss"]).attach(trainer, "loss")
    return trainer, scaler


def make_evaluator(net, device):
    @torch.no_grad()
    def infer(engine, batch):
        net.eval()
        spec, word = (t.to(device) for t in batch)
        with autocast():
            logits = net(spec)
        return logits.float(), word

    ev = Engine(infer)
    Accuracy().attach(ev, "acc")
    Loss(F.cross_entropy).attach(ev, "nll")
    return ev


def run(args):
    device = "cuda"
    train_dl, val_dl = make_loaders(args.root, args.batch)
    net = KeywordNet().to(device)
    optim = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.MultiStepLR(optim, [20, 30], 0.1)
    trainer, scaler = make_trainer(net, optim, args.limit, device)
    evaluator = make_evaluator(net, device)
    ProgressBar().attach(trainer, ["loss"])

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        sched.step()
        evaluator.run(val_dl)
        print(engine.state.epoch, evaluator.state.metrics)

    saver = ModelCheckpoint(args.out, "kws", n_saved=2, require_empty=False)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, saver,
        {"net": net, "optim": optim, "sched": sched, "scaler": scaler, "trainer": trainer})
    trainer.run(train_dl, max_epochs=args.epochs)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--out", default="runs/kws")
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--limit", type=float, default=0.5)
    run(p.parse_args())
