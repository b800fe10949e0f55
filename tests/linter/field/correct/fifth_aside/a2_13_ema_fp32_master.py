# why correct: the network runs in bfloat16 for speed, but master weights, optimizer state and the moving average are all kept in float32
import copy

import torch
import torch.nn.functional as F
from torch import nn


class MasterWeights:
    """float32 copies that the optimizer updates; the bfloat16 network is refreshed from them."""

    def __init__(self, net):
        self.low = [p for p in net.parameters() if p.requires_grad]
        self.high = [nn.Parameter(p.detach().float().clone()) for p in self.low]

    def pull_grads(self):
        for lo, hi in zip(self.low, self.high):
            hi.grad = None if lo.grad is None else lo.grad.float()
            lo.grad = None

    @torch.no_grad()
    def push(self):
        for lo, hi in zip(self.low, self.high):
            lo.copy_(hi)


class Ema:
    def __init__(self, params, decay=0.9999):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in params]
        assert all(s.dtype is torch.float32 for s in self.shadow)

    @torch.no_grad()
    def update(self, params, step):
        d = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in params], 1.0 - d)

    @torch.no_grad()
    def materialise(self, net):
        twin = copy.deepcopy(net)
        for p, s in zip((q for q in twin.parameters() if q.requires_grad), self.shadow):
            p.copy_(s)
        return twin.eval()


def train(net, loader, steps, lr=1e-4, sample_fn=None):
    net = net.cuda()
    net.load_state_dict(torch.load("init_fp32.pt", map_location="cuda"))
    master = MasterWeights(net)
    net.to(torch.bfloat16)
    master.low = [p for p in net.parameters() if p.requires_grad]
    ema = Ema(master.high)
    opt = torch.optim.AdamW(master.high, lr=lr, weight_decay=0.0)
    for step, (x, cond) in enumerate(loader):
        if step >= steps:
            break
        x, cond = x.cuda(), cond.cuda()
        noise = torch.randn_like(x)
        u = torch.rand(len(x), device=x.device)
        a = u.view(-1, *[1] * (x.ndim - 1))
        xt = (1 - a) * x + a * noise
        pred = net(xt.bfloat16(), u, cond)
        loss = F.mse_loss(pred.float(), noise - x)
        loss.backward()
        master.pull_grads()
        nn.utils.clip_grad_norm_(master.high, 1.0)
        opt.step()
        master.push()
        ema.update(master.high, step)
        if step % 10_000 == 0:
            torch.save({"master": [p.detach().cpu() for p in master.high],
                        "ema": [s.cpu() for s in ema.shadow], "opt": opt.state_dict(), "step": step}, "run.pt")
            if sample_fn is not None:
                sample_fn(ema.materialise(net), step)
