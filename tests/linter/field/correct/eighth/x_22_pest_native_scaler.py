# why correct: the wrapper class scales, and only when a step is due unscales, clips, steps and updates; its own state goes into the checkpoint
import argparse
import time

import torch
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler

from pests.loaders import build_loaders


class LossScaler:
    key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        norm = None
        if clip is not None:
            self._scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train_one_epoch(model, criterion, loader, optimizer, epoch, loss_scaler, plan, mixup, args):
    model.train()
    optimizer.zero_grad()
    updates = len(loader) // args.update_freq
    begin = time.time()
    for i, (x, y) in enumerate(loader):
        step = i // args.update_freq
        if step >= updates:
            break
        if i % args.update_freq == 0:
            plan.step_update(epoch * updates + step)
        x, y = mixup(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        value = loss.item()
        loss = loss / args.update_freq
        due = (i + 1) % args.update_freq == 0
        norm = loss_scaler(loss, optimizer, clip=args.clip, parameters=model.parameters(), need_update=due)
        if due:
            optimizer.zero_grad()
            if step % 50 == 0:
                print(f"{epoch} {step}/{updates} {value:.4f} norm {norm} {time.time() - begin:.0f}s")


@torch.no_grad()
def top1(model, loader):
    model.eval()
    good = seen = 0
    for x, y in loader:
        with torch.cuda.amp.autocast():
            out = model(x.cuda())
        good += (out.argmax(1).cpu() == y).sum().item()
        seen += len(y)
    return good / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--update_freq", type=int, default=4)
    ap.add_argument("--clip", type=float, default=None)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    train, valid, classes = build_loaders(args.data)
    model = create_model("convnext_small", pretrained=False, num_classes=classes, drop_path_rate=0.3).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    plan = CosineLRScheduler(
        optimizer, t_initial=args.epochs * (len(train) // args.update_freq), warmup_t=1000, t_in_epochs=False
    )
    loss_scaler = LossScaler()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=classes)
    start = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        loss_scaler.load_state_dict(ckpt[LossScaler.key])
        start = ckpt["epoch"] + 1
    for epoch in range(start, args.epochs):
        train_one_epoch(model, SoftTargetCrossEntropy(), train, optimizer, epoch, loss_scaler, plan, mixup, args)
        print(epoch, top1(model, valid))
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                LossScaler.key: loss_scaler.state_dict(),
                "epoch": epoch,
            },
            "pests.pth",
        )


if __name__ == "__main__":
    main()
