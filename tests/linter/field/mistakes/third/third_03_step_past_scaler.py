import argparse
import math
import sys
from contextlib import nullcontext

import timm
import torch
import torch.nn as nn
from timm.data import create_loader, create_dataset
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, accuracy


def get_parser():
    parser = argparse.ArgumentParser("ViT finetuning")
    parser.add_argument("--data", default="/data/imagenet")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    return parser


def train_one_epoch(model, criterion, loader, optimizer, scaler, scheduler, epoch, args):
    model.train()
    losses = AverageMeter()
    num_updates = epoch * len(loader)
    for i, (samples, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(samples)
            loss = criterion(output, targets)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training")
            sys.exit(1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()  # <- here
        scaler.update()
        num_updates += 1
        scheduler.step_update(num_updates)
        losses.update(loss.item(), samples.size(0))
        if i % 50 == 0:
            print(f"[{epoch}][{i}/{len(loader)}] loss {losses.avg:.4f} scale {scaler.get_scale():.0f}")
    return losses.avg


@torch.no_grad()
def validate(model, loader, criterion, amp=True):
    model.eval()
    top1, losses = AverageMeter(), AverageMeter()
    ctx = torch.autocast("cuda", dtype=torch.float16) if amp else nullcontext()
    for samples, targets in loader:
        with ctx:
            output = model(samples)
            loss = criterion(output, targets)
        acc1, = accuracy(output, targets, topk=(1,))
        top1.update(acc1.item(), samples.size(0))
        losses.update(loss.item(), samples.size(0))
    return top1.avg, losses.avg


def main(args):
    model = timm.create_model(args.model, pretrained=True, num_classes=1000).cuda()
    train_set = create_dataset("", root=args.data, split="train", is_training=True)
    val_set = create_dataset("", root=args.data, split="val")
    train_loader = create_loader(train_set, (3, 224, 224), args.batch_size, is_training=True)
    val_loader = create_loader(val_set, (3, 224, 224), args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs * len(train_loader), t_in_epochs=False)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    best = 0.0
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, train_loader, optimizer, scaler, scheduler, epoch, args)
        acc, _ = validate(model, val_loader, nn.CrossEntropyLoss())
        if acc > best:
            best = acc
            torch.save(model.state_dict(), "best.pth")
    print(f"best top-1 {best:.2f}")


if __name__ == "__main__":
    main(get_parser().parse_args())
