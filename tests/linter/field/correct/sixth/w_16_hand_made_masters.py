# why correct: half weights with float32 master copies and a hand-made dynamic loss scale: gradients are copied to float32 and divided by the scale before the overflow test, clipping and step
import torch
from torch import nn


class MasterWeights:
    def __init__(self, net: nn.Module, make_opt, scale=2.0**15, window=1000):
        self.net = net
        self.half = [p for p in net.parameters() if p.requires_grad]
        self.full = [nn.Parameter(p.detach().clone().float()) for p in self.half]
        self.opt = make_opt(self.full)
        self.scale, self.window, self.good = scale, window, 0

    def backward(self, loss):
        (loss.float() * self.scale).backward()

    def _collect(self):
        inv = 1.0 / self.scale
        finite = True
        for h, f in zip(self.half, self.full):
            if h.grad is None:
                f.grad = None
                continue
            f.grad = h.grad.float().mul_(inv)
            h.grad = None
            finite = finite and bool(torch.isfinite(f.grad).all())
        return finite

    def step(self, max_norm=None):
        if not self._collect():
            self.scale = max(self.scale / 2, 1.0)
            self.good = 0
            self.opt.zero_grad(set_to_none=True)
            return False
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.full, max_norm)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        with torch.no_grad():
            for h, f in zip(self.half, self.full):
                h.copy_(f)
        self.good += 1
        if self.good % self.window == 0:
            self.scale *= 2
        return True

    def state_dict(self):
        return {"full": [f.detach() for f in self.full], "opt": self.opt.state_dict(),
                "scale": self.scale, "good": self.good}

    def load_state_dict(self, sd):
        with torch.no_grad():
            for h, f, saved in zip(self.half, self.full, sd["full"]):
                f.copy_(saved)
                h.copy_(f)
        self.opt.load_state_dict(sd["opt"])
        self.scale, self.good = sd["scale"], sd["good"]


def to_half_but_norms(net):
    net.half()
    for m in net.modules():
        if isinstance(m, (nn.BatchNorm2d, nn.BatchNorm1d)):
            m.float()
    return net


def build(classes):
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, classes))


def train(loader, classes=62, epochs=20):
    net = to_half_but_norms(build(classes).cuda())
    masters = MasterWeights(net, lambda ps: torch.optim.Adam(ps, lr=1e-3))
    for e in range(epochs):
        net.train()
        skipped = 0
        for img, label in loader:
            logits = net(img.cuda().half())
            loss = nn.functional.cross_entropy(logits.float(), label.cuda())
            masters.backward(loss)
            skipped += not masters.step(max_norm=5.0)
        print(f"{e}: loss {loss.item():.3f} skipped {skipped} scale {masters.scale:.0f}")
        torch.save({"net": net.state_dict(), **masters.state_dict()}, "glyphs.pt")
