# why correct: a float16 model with own float32 master weights and a hand-made dynamic loss scale: gradients are copied to float32, unscaled, checked, clipped and only then applied.
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LossScale:
    def __init__(self, start=2.0 ** 15, window=1000, floor=1.0):
        self.value, self.window, self.floor, self.good = start, window, floor, 0

    def adapt(self, overflow):
        if overflow:
            self.value = max(self.value / 2, self.floor)
            self.good = 0
        else:
            self.good += 1
            if self.good % self.window == 0:
                self.value *= 2

    def state_dict(self):
        return dict(value=self.value, good=self.good)

    def load_state_dict(self, state):
        self.value, self.good = state["value"], state["good"]


def to_half(net):
    net.half()
    for m in net.modules():
        if isinstance(m, (nn.BatchNorm2d, nn.GroupNorm)):
            m.float()
    return net


class HalfConv(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x).float())).half()


class SmallNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(HalfConv(3, 64), HalfConv(64, 128, 2), HalfConv(128, 256, 2), HalfConv(256, 512, 2))
        self.head = nn.Linear(512, classes)

    def forward(self, x):
        x = self.body(x.half())
        return self.head(x.float().mean((2, 3)).half()).float()


class HalfTrainer:
    def __init__(self, net, lr, clip=5.0):
        self.net = to_half(net.cuda())
        self.work = [p for p in self.net.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.work]
        self.opt = torch.optim.SGD(self.master, lr=lr, momentum=0.9, weight_decay=1e-4)
        self.scale = LossScale()
        self.clip = clip

    def step(self, x, y):
        self.net.train()
        for p in self.work:
            p.grad = None
        loss = F.cross_entropy(self.net(x), y)
        (loss * self.scale.value).backward()

        for m, p in zip(self.master, self.work):
            m.grad = p.grad.detach().float().div_(self.scale.value)
        norm = nn.utils.clip_grad_norm_(self.master, self.clip).item()
        overflow = not math.isfinite(norm)
        if not overflow:
            self.opt.step()
            with torch.no_grad():
                for m, p in zip(self.master, self.work):
                    p.copy_(m)
        self.scale.adapt(overflow)
        return loss.item(), norm, overflow

    def state_dict(self):
        return {"net": self.net.state_dict(), "master": [m.detach().cpu() for m in self.master],
                "opt": self.opt.state_dict(), "scale": self.scale.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        with torch.no_grad():
            for m, saved in zip(self.master, state["master"]):
                m.copy_(saved)
        self.opt.load_state_dict(state["opt"])
        self.scale.load_state_dict(state["scale"])


def main(loader, epochs=90):
    trainer = HalfTrainer(SmallNet(200), lr=0.1)
    plan = torch.optim.lr_scheduler.StepLR(trainer.opt, 30, 0.1)
    for epoch in range(epochs):
        skipped = 0
        for x, y in loader:
            loss, norm, overflow = trainer.step(x.cuda(), y.cuda())
            skipped += overflow
        plan.step()
        print(f"epoch {epoch} loss {loss:.3f} norm {norm:.2f} skipped {skipped} scale {trainer.scale.value:.0f}")
        torch.save({"trainer": trainer.state_dict(), "plan": plan.state_dict(), "epoch": epoch}, "half.pt")
