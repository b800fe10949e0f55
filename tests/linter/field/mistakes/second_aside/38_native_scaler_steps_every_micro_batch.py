"""
# source: https://github.com/facebookresearch/mae/issues/84
# mistake: the scaler callable has no update_grad option and steps at each call, while the loop clears the gradients only every accum_iter batches; each micro batch's gradient is applied several times.
# severity: error
# torch: any
"""
import math
import sys

import torch
from torch.nn.utils import clip_grad_norm_


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, loss_scaler, max_norm, args, mixup_fn=None):
    model.train(True)
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for it, (samples, targets) in enumerate(data_loader):
        if it % accum_iter == 0:
            adjust_learning_rate(optimizer, it / len(data_loader) + epoch, args)
        samples, targets = samples.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if mixup_fn is not None:
            samples, targets = mixup_fn(samples, targets)

        with torch.cuda.amp.autocast():
            loss = criterion(model(samples), targets)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training")
            sys.exit(1)

        loss /= accum_iter
        loss_scaler(loss, optimizer, clip_grad=max_norm, parameters=model.parameters())  # <- here
        if (it + 1) % accum_iter == 0:
            optimizer.zero_grad()


def main(args, model, criterion, data_loader):
    device = torch.device(args.device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    loss_scaler = NativeScaler()
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loss_scaler.load_state_dict(checkpoint["scaler"])
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, loss_scaler, args.clip_grad, args)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": loss_scaler.state_dict()}
        torch.save(state, f"{args.output_dir}/checkpoint-{epoch}.pth")
