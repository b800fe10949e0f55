"""
# style of: vballoli/nfnets-pytorch:nfnets/agc.py
# correct: adaptive clipping compares gradients with weights and so needs true gradients; prepare_gradients() unscales right before it, once per step.
# torch: 1.10+
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim

from nfnet import NFNet
from folders import imagenet_loader


def unitwise_norm(x):
    if x.ndim <= 1:
        return x.norm()
    return x.norm(dim=tuple(range(1, x.ndim)), keepdim=True)


@torch.no_grad()
def adaptive_clip_(parameters, clip_factor=0.01, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        limit = unitwise_norm(p).clamp(min=eps) * clip_factor
        norm = unitwise_norm(p.grad)
        p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm.clamp(min=1e-6)), p.grad))


class Stepper:
    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, amp: bool, clipping: float):
        self.model, self.optimizer, self.clipping = model, optimizer, clipping
        self.scaler = torch.cuda.amp.GradScaler() if amp else None

    def prepare_gradients(self):
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        body = [p for n, p in self.model.named_parameters() if not n.startswith("head")]
        adaptive_clip_(body, self.clipping)

    def backward(self, loss):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self):
        self.prepare_gradients()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def autocast(self):
        return torch.cuda.amp.autocast(enabled=self.scaler is not None)


def train(args):
    model = NFNet(variant=args.variant, num_classes=1000).cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    stepper = Stepper(model, optimizer, args.amp, args.clipping)
    for epoch in range(args.epochs):
        model.train()
        hits = seen = 0
        for x, y in imagenet_loader(args.batch):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with stepper.autocast():
                out = model(x)
                loss = F.cross_entropy(out, y, label_smoothing=0.1)
            stepper.backward(loss)
            stepper.step()
            hits += (out.argmax(1) == y).sum().item()
            seen += len(y)
        schedule.step()
        print(f"{epoch}: accuracy {hits / seen:.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if stepper.scaler is not None:
            state["scaler"] = stepper.scaler.state_dict()
        torch.save(state, f"nfnet_{epoch}.pt")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--variant", default="F0")
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--epochs", type=int, default=360)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--clipping", type=float, default=0.01)
    p.add_argument("--amp", action="store_true")
    train(p.parse_args())
