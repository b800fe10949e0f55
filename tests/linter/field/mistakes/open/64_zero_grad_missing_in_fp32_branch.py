# source: https://github.com/IDEA-Research/DINO/issues/20
# mistake: gradients are zeroed in the AMP branch only; without --amp they pile up over the whole run.
# severity: error
# torch: any
import math
import sys
from typing import Iterable

import torch


def train_one_epoch(model, criterion, data_loader: Iterable, optimizer, device, epoch, max_norm=0.0, args=None, scaler=None):
    model.train()
    criterion.train()
    running = []

    for samples, targets in data_loader:
        samples = samples.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]

        with torch.amp.autocast("cuda", enabled=args.amp):
            outputs = model(samples, targets)
            loss_dict = criterion(outputs, targets)
            losses = sum(loss_dict[k] * criterion.weight_dict[k] for k in loss_dict if k in criterion.weight_dict)

        value = losses.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training", loss_dict)
            sys.exit(1)

        if args.amp:
            optimizer.zero_grad()
            scaler.scale(losses).backward()
            if max_norm > 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()  # <- here
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        running.append(value)
    print(f"epoch {epoch}: {sum(running) / len(running):.4f}")


def fit(model, criterion, loader, args):
    device = torch.device(args.device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, loader, optimizer, device, epoch, args.clip_max_norm, args, scaler)
