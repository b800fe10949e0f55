# why correct: the static loss scale is divided out of the float32 master gradients before they are checked, clipped and stepped
import torch
from torch import nn


class MasterWeights:
    def __init__(self, model):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.high = [nn.Parameter(p.detach().clone().float()) for p in self.low]

    def pull_grads(self, inv_scale):
        for h, l in zip(self.high, self.low):
            if l.grad is None:
                h.grad = None
            else:
                h.grad = l.grad.detach().float().mul_(inv_scale)
                l.grad = None

    def finite(self):
        flags = [torch.isfinite(h.grad).all() for h in self.high if h.grad is not None]
        return bool(torch.stack(flags).all())

    @torch.no_grad()
    def push_weights(self):
        for h, l in zip(self.high, self.low):
            l.copy_(h)


class BackoffScale:
    def __init__(self, start=2.0**15, every=1000):
        self.value, self.every, self.good = start, every, 0

    def report(self, ok):
        if not ok:
            self.value = max(self.value / 2, 1.0)
            self.good = 0
            return
        self.good += 1
        if self.good == self.every:
            self.value *= 2
            self.good = 0


class PureHalfTrainer:
    def __init__(self, model, lr, clip):
        self.model = model.cuda().half()
        self.master = MasterWeights(self.model)
        self.opt = torch.optim.Adam(self.master.high, lr=lr)
        self.scale = BackoffScale()
        self.clip = clip

    def step(self, x, y):
        logits = self.model(x.cuda().half())
        loss = nn.functional.cross_entropy(logits.float(), y.cuda())
        (loss * self.scale.value).backward()
        self.master.pull_grads(1.0 / self.scale.value)
        ok = self.master.finite()
        if ok:
            nn.utils.clip_grad_norm_(self.master.high, self.clip)
            self.opt.step()
            self.master.push_weights()
        self.scale.report(ok)
        return loss.item()


def mlp(d_in, d_out, width=1024):
    return nn.Sequential(nn.Linear(d_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, d_out))


def main(loader, d_in, d_out):
    trainer = PureHalfTrainer(mlp(d_in, d_out), lr=1e-3, clip=1.0)
    for epoch in range(20):
        for x, y in loader:
            loss = trainer.step(x, y)
        print(epoch, loss, trainer.scale.value)
