# style of: mlfoundations/open_clip:src/training/train.py
# torch: 1.12+
import logging
import math
from contextlib import suppress

import torch


def get_autocast(precision):
    if precision == "amp":
        return torch.cuda.amp.autocast
    if precision in ("amp_bf16", "amp_bfloat16"):
        return lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16)
    return suppress


def create_scaler(precision):
    return torch.cuda.amp.GradScaler() if precision == "amp" else None


def unwrap_model(model):
    return model.module if hasattr(model, "module") else model


def backward(total_loss, scaler):
    if scaler is not None:
        scaler.scale(total_loss).backward()
    else:
        total_loss.backward()


def train_one_epoch(model, loader, loss_fn, epoch, optimizer, scaler, scheduler, args, device):
    """scheduler is a function of the step number that writes the learning rate."""
    autocast = get_autocast(args.precision)
    model.train()
    num_batches = len(loader)
    for i, (images, texts) in enumerate(loader):
        step = num_batches * epoch + i
        scheduler(step)
        images = images.to(device=device, non_blocking=True)
        texts = texts.to(device=device, non_blocking=True)

        optimizer.zero_grad()
        with autocast():
            image_features, text_features, logit_scale = model(images, texts)
            losses = loss_fn(image_features, text_features, logit_scale, output_dict=True)
            total_loss = sum(losses.values())
        backward(total_loss, scaler)

        if scaler is not None:
            if args.grad_clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm, norm_type=2.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            if args.grad_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm, norm_type=2.0)
            optimizer.step()

        # the temperature is stored as a logarithm, and kept in [1, 100]
        with torch.no_grad():
            unwrap_model(model).logit_scale.clamp_(0, math.log(100))

        if i % args.log_every == 0:
            scale = unwrap_model(model).logit_scale.exp().item()
            logging.info("%d/%d loss %.4f logit scale %.2f", epoch, i, total_loss.item(), scale)


def save_checkpoint(path, epoch, model, optimizer, scaler):
    state = {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    torch.save(state, path)


def resume(path, model, optimizer, scaler):
    checkpoint = torch.load(path, map_location="cpu")
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if scaler is not None and "scaler" in checkpoint:
        scaler.load_state_dict(checkpoint["scaler"])
    return checkpoint["epoch"]
