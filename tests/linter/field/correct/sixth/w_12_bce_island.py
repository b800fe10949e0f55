# why correct: the product of probabilities can't be written with logits alone, so BCE on probabilities is computed in a float32 region with autocast off and float32 inputs
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


class GridHead(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        self.obj = nn.Conv2d(c, 1, 1)
        self.cls = nn.Conv2d(c, classes, 1)

    def forward(self, f):
        return self.obj(f), self.cls(f)


class CellDetector(nn.Module):
    def __init__(self, classes=6, c=128):
        super().__init__()
        def stage(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU())
        self.body = nn.Sequential(stage(3, 32), stage(32, 64), stage(64, c), stage(c, c))
        self.head = GridHead(c, classes)

    def forward(self, x):
        return self.head(self.body(x))


def joint_bce(obj_logit, cls_logit, target):
    """BCE between sqrt(P(obj) P(class)) and the one-hot map of cells."""
    with autocast("cuda", enabled=False):
        joint = (obj_logit.float().sigmoid() * cls_logit.float().sigmoid()).clamp(1e-7, 1 - 1e-6).sqrt()
        return F.binary_cross_entropy(joint, target.float())


def objectness(obj_logit, target):
    return F.binary_cross_entropy_with_logits(obj_logit, target.amax(1, keepdim=True).to(obj_logit.dtype))


class Session:
    def __init__(self, net, lr, steps, amp=True):
        self.net = net.cuda()
        self.opt = torch.optim.SGD(net.parameters(), lr, momentum=0.9, nesterov=True)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, lr, total_steps=steps)
        self.scaler = GradScaler("cuda", enabled=amp)
        self.amp = amp

    def step(self, image, target):
        with autocast("cuda", enabled=self.amp):
            obj, cls = self.net(image)
            loss = joint_bce(obj, cls, target) + 0.5 * objectness(obj, target)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        before = self.scaler.get_scale()
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.sched.step()
        return loss.item()

    def state_dict(self):
        return {k: getattr(self, k).state_dict() for k in ("net", "opt", "sched", "scaler")}


def run(loader, epochs=60):
    s = Session(CellDetector(), 0.05, epochs * len(loader))
    for e in range(epochs):
        s.net.train()
        losses = [s.step(i.cuda(non_blocking=True), t.cuda(non_blocking=True)) for i, t in loader]
        print(e, sum(losses) / len(losses))
        torch.save(s.state_dict(), "cells.pt")
