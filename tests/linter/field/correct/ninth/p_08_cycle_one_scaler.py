# why correct: one scaler serves two optimizers; each is stepped once and update() comes once at the end of the iteration
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F


class Cycle:
    def __init__(self, gab, gba, da, db, lr=2e-4):
        self.gab, self.gba, self.da, self.db = (m.cuda() for m in (gab, gba, da, db))
        self.g_opt = torch.optim.Adam(itertools.chain(gab.parameters(), gba.parameters()), lr, betas=(0.5, 0.999))
        self.d_opt = torch.optim.Adam(itertools.chain(da.parameters(), db.parameters()), lr, betas=(0.5, 0.999))
        self.scaler = torch.amp.GradScaler("cuda")

    def freeze_d(self, flag):
        for p in itertools.chain(self.da.parameters(), self.db.parameters()):
            p.requires_grad_(not flag)

    @staticmethod
    def lsgan(pred, real):
        pred = pred.float()
        return F.mse_loss(pred, torch.ones_like(pred) if real else torch.zeros_like(pred))

    def generators(self, a, b):
        fb, fa = self.gab(a), self.gba(b)
        cyc = F.l1_loss(self.gba(fb).float(), a) + F.l1_loss(self.gab(fa).float(), b)
        idt = F.l1_loss(self.gab(b).float(), b) + F.l1_loss(self.gba(a).float(), a)
        adv = self.lsgan(self.db(fb), True) + self.lsgan(self.da(fa), True)
        return adv + 10 * cyc + 5 * idt, fa.detach(), fb.detach()

    def discriminators(self, a, b, fa, fb):
        return 0.5 * sum(self.lsgan(d(x), r) for d, x, r in
                         ((self.da, a, True), (self.da, fa, False), (self.db, b, True), (self.db, fb, False)))

    def iteration(self, a, b):
        self.freeze_d(True)
        self.g_opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            g, fa, fb = self.generators(a, b)
        self.scaler.scale(g).backward()
        self.scaler.step(self.g_opt)

        self.freeze_d(False)
        self.d_opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            d = self.discriminators(a, b, fa, fb)
        self.scaler.scale(d).backward()
        self.scaler.step(self.d_opt)

        self.scaler.update()
        return g.item(), d.item()


def main(loader_a, loader_b, build_g, build_d, epochs=200):
    c = Cycle(build_g(), build_g(), build_d(), build_d())
    for e in range(epochs):
        for a, b in zip(loader_a, loader_b):
            g, d = c.iteration(a.cuda(), b.cuda())
        print(f"{e} G {g:.3f} D {d:.3f}")
        torch.save({"g": c.gab.state_dict(), "scaler": c.scaler.state_dict()}, "cycle.pt")
