# style of: facebookresearch/mae:engine_pretrain.py
# torch: 1.6+
import math
import sys

import torch


def set_lr(optimizer, epoch, args):
    """Half-cycle cosine after a linear warm-up, set per iteration from the fractional epoch."""
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        progress = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def train_one_epoch(model, data_loader, optimizer, device, epoch, loss_scaler, log_writer=None, args=None):
    """loss_scaler is a callable that owns the GradScaler: (loss, optimizer, parameters, update_grad)."""
    model.train(True)
    accum_iter = args.accum_iter
    # an epoch holds a whole number of accumulation windows
    usable = len(data_loader) - len(data_loader) % accum_iter
    optimizer.zero_grad()

    for it, (samples, _) in enumerate(data_loader):
        if it >= usable:
            break
        if it % accum_iter == 0:
            set_lr(optimizer, it / len(data_loader) + epoch, args)

        samples = samples.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"loss is {loss_value}, stopping")
            sys.exit(1)

        loss = loss / accum_iter
        window_done = (it + 1) % accum_iter == 0
        loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=window_done)
        if window_done:
            optimizer.zero_grad()

        torch.cuda.synchronize()
        if log_writer is not None and window_done:
            x_axis = int((it / len(data_loader) + epoch) * 1000)
            log_writer.add_scalar("train_loss", loss_value, x_axis)
            log_writer.add_scalar("lr", optimizer.param_groups[0]["lr"], x_axis)
