# why correct: the last, shorter accumulation window is divided by its own length and stepped too, and the schedule moves only when the scaler did not skip
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from torchvision.models import swin_v2_s

from slides.tiles import TileBags


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("bags")
    ap.add_argument("--accum", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    return ap.parse_args()


def build():
    net = swin_v2_s(weights="IMAGENET1K_V1")
    net.head = nn.Linear(net.head.in_features, 3)
    return net.cuda()


def window_length(i, total, accum):
    start = i // accum * accum
    return min(accum, total - start)


def train_epoch(net, loader, optimizer, scaler, plan, args):
    net.train()
    optimizer.zero_grad(set_to_none=True)
    total = len(loader)
    mean = 0.0
    for i, (tiles, label) in enumerate(loader):
        n = window_length(i, total, args.accum)
        with autocast("cuda", enabled=args.amp):
            loss = F.cross_entropy(net(tiles.cuda(non_blocking=True)), label.cuda(non_blocking=True))
        scaler.scale(loss / n).backward()
        mean += loss.item() / total
        last_of_window = (i + 1) % args.accum == 0 or i + 1 == total
        if not last_of_window:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            plan.step()
        optimizer.zero_grad(set_to_none=True)
    return mean


def main():
    args = parse()
    net = build()
    loader = DataLoader(TileBags(args.bags), 16, shuffle=True, num_workers=8, pin_memory=True)
    optimizer = torch.optim.AdamW(net.parameters(), args.lr, weight_decay=0.05)
    updates = -(-len(loader) // args.accum) * args.epochs
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 100) * max(0.0, 1 - s / updates))
    scaler = GradScaler("cuda", enabled=args.amp)
    for epoch in range(args.epochs):
        print(epoch, train_epoch(net, loader, optimizer, scaler, plan, args))
        torch.save(
            {
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "plan": plan.state_dict(),
                "scaler": scaler.state_dict(),
                "epoch": epoch,
            },
            "tumour.pt",
        )


if __name__ == "__main__":
    main()
