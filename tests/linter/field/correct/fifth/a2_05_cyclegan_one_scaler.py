# why correct: several losses and two optimizers share one GradScaler, each optimizer is stepped once and update() is called once, at the end of the iteration
import itertools
import random

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class Pool:
    def __init__(self, size=50):
        self.size, self.items = size, []

    def __call__(self, images):
        out = []
        for im in images.detach():
            if len(self.items) < self.size:
                self.items.append(im)
                out.append(im)
            elif random.random() < 0.5:
                k = random.randrange(self.size)
                out.append(self.items[k])
                self.items[k] = im
            else:
                out.append(im)
        return torch.stack(out)


def freeze(nets, flag):
    for net in nets:
        net.requires_grad_(not flag)


def train(AtoB, BtoA, DA, DB, loader, epochs=200, lr=2e-4, lam=10.0):
    g_opt = torch.optim.Adam(itertools.chain(AtoB.parameters(), BtoA.parameters()), lr, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(itertools.chain(DA.parameters(), DB.parameters()), lr, betas=(0.5, 0.999))
    decay = lambda e: 1.0 - max(0, e - epochs // 2) / (epochs // 2 + 1)
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, decay) for o in (g_opt, d_opt)]
    mse, l1 = nn.MSELoss(), nn.L1Loss()
    poolA, poolB = Pool(), Pool()
    scaler = GradScaler()

    def toward(logit, value):
        return mse(logit, torch.full_like(logit, value))

    for epoch in range(epochs):
        for a, b in loader:
            a, b = a.cuda(non_blocking=True), b.cuda(non_blocking=True)

            freeze((DA, DB), True)
            with autocast():
                fb, fa = AtoB(a), BtoA(b)
                cyc = l1(BtoA(fb), a) + l1(AtoB(fa), b)
                adv = toward(DB(fb), 1.0) + toward(DA(fa), 1.0)
            g_opt.zero_grad(set_to_none=True)
            scaler.scale(lam * cyc).backward(retain_graph=True)
            scaler.scale(adv).backward()

            freeze((DA, DB), False)
            qa, qb = poolA(fa), poolB(fb)
            d_opt.zero_grad(set_to_none=True)
            for D, real, fake in ((DA, a, qa), (DB, b, qb)):
                with autocast():
                    loss = 0.5 * (toward(D(real), 1.0) + toward(D(fake), 0.0))
                scaler.scale(loss).backward()

            scaler.unscale_(g_opt)
            nn.utils.clip_grad_norm_([p for g in g_opt.param_groups for p in g["params"]], 10.0)
            scaler.step(g_opt)
            scaler.step(d_opt)
            scaler.update()
        for s in scheds:
            s.step()
        print(epoch, cyc.item(), adv.item())
