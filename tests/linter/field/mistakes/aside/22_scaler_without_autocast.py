# source: https://github.com/microsoft/Cream/pull/137
# mistake: autocast follows --disable-amp but the scaler is always on, so full-precision training pays for scaling and may skip its first steps for nothing.
# severity: warning
# torch: any
import argparse

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy

from tiny_vit import build_loader, build_model


def parse_option():
    parser = argparse.ArgumentParser("distillation pretraining")
    parser.add_argument("--data-path", type=str, required=True)
    parser.add_argument("--disable_amp", action="store_true")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--clip-grad", type=float, default=5.0)
    return parser.parse_args()


def train_one_epoch(args, model, criterion, loader, optimizer, mixup_fn, loss_scaler):
    model.train()
    optimizer.zero_grad()
    for samples, targets in loader:
        samples = samples.cuda(non_blocking=True)
        targets = targets.cuda(non_blocking=True)
        samples, targets = mixup_fn(samples, targets)
        with torch.amp.autocast("cuda", enabled=not args.disable_amp):
            outputs = model(samples)
            loss = criterion(outputs, targets)
        loss_scaler.scale(loss).backward()
        loss_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        loss_scaler.step(optimizer)
        loss_scaler.update()
        optimizer.zero_grad()


def main(args):
    loader = build_loader(args.data_path, batch_size=256)
    model = build_model("tiny_vit_5m").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    loss_scaler = torch.amp.GradScaler("cuda")  # <- here
    mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000)
    for _ in range(args.epochs):
        train_one_epoch(args, model, SoftTargetCrossEntropy(), loader, optimizer, mixup_fn, loss_scaler)


if __name__ == "__main__":
    main(parse_option())
