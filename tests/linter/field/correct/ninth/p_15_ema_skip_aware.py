# why correct: parameters and average are both float32, and average and schedule advance only if the scale did not fall, i.e. the step was really taken
import copy

import torch
import torch.nn.functional as F


class Ema:
    def __init__(self, net, decay=0.9998, warmup=2000):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay, self.warmup, self.n = decay, warmup, 0

    @torch.no_grad()
    def push(self, src):
        self.n += 1
        d = self.decay * min(1.0, self.n / self.warmup)
        for a, b in zip(self.net.state_dict().values(), src.state_dict().values()):
            if a.is_floating_point():
                a.lerp_(b.to(a.dtype), 1 - d)
            else:
                a.copy_(b)


class Loop:
    def __init__(self, net, total, cfg):
        self.net = net.cuda()
        self.cfg = cfg
        self.ema = Ema(self.net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg["lr"], weight_decay=cfg["wd"])
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, cfg["lr"], total_steps=total)
        self.amp = cfg["amp"]
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)

    def update(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["clip"])
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        taken = before <= self.scaler.get_scale()
        if taken:
            self.sched.step()
            self.ema.push(self.net)
        return taken

    def train(self, loader):
        self.net.train()
        skipped = 0
        for img, heat in loader:
            img, heat = img.cuda(), heat.cuda()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                pred = self.net(img)
            loss = F.mse_loss(pred.float(), heat)
            skipped += not self.update(loss)
        return skipped

    @torch.no_grad()
    def pck(self, loader, radius=3.0):
        hit = n = 0
        for img, heat in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                p = self.ema.net(img.cuda()).flatten(2).argmax(-1).cpu()
            w = heat.size(-1)
            g = heat.flatten(2).argmax(-1)
            d = torch.stack([p % w - g % w, p // w - g // w], -1).float().norm(dim=-1)
            hit += (d < radius).sum().item()
            n += d.numel()
        return hit / n


def main(net, train, val, epochs=140):
    cfg = dict(lr=5e-4, wd=1e-4, clip=1.0, amp=True)
    loop = Loop(net, epochs * len(train), cfg)
    for e in range(epochs):
        print(e, "skipped", loop.train(train), "pck", loop.pck(val))
