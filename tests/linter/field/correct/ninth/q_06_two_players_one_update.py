# why correct: both losses are scaled with the same scale, both optimizers step, and update() follows once after the last step
import torch
import torch.nn as nn
import torch.nn.functional as F


class ColorGAN:
    def __init__(self, gen, dis, lr=(1e-4, 4e-4), l1=50.0):
        self.gen, self.dis, self.l1 = gen.cuda(), dis.cuda(), l1
        self.opts = {
            "gen": torch.optim.Adam(gen.parameters(), lr=lr[0], betas=(0.0, 0.99)),
            "dis": torch.optim.Adam(dis.parameters(), lr=lr[1], betas=(0.0, 0.99)),
        }
        self.scaler = torch.cuda.amp.GradScaler()

    def _gen_loss(self, gray, fake, real):
        score = self.dis(torch.cat([gray, fake], 1))
        return F.softplus(-score.float()).mean() + self.l1 * F.l1_loss(fake.float(), real)

    def _dis_loss(self, gray, fake, real):
        r = self.dis(torch.cat([gray, real], 1)).float()
        f = self.dis(torch.cat([gray, fake.detach()], 1)).float()
        return F.softplus(-r).mean() + F.softplus(f).mean()

    def step(self, gray, real):
        with torch.cuda.amp.autocast():
            fake = self.gen(gray)

        self.dis.requires_grad_(False)
        with torch.cuda.amp.autocast():
            g = self._gen_loss(gray, fake, real)
        self.opts["gen"].zero_grad(set_to_none=True)
        self.scaler.scale(g).backward()

        self.dis.requires_grad_(True)
        with torch.cuda.amp.autocast():
            d = self._dis_loss(gray, fake, real)
        self.opts["dis"].zero_grad(set_to_none=True)
        self.scaler.scale(d).backward()

        for opt in self.opts.values():
            self.scaler.step(opt)
        self.scaler.update()
        return g.detach(), d.detach()

    def state_dict(self):
        return {
            "gen": self.gen.state_dict(),
            "dis": self.dis.state_dict(),
            "opts": {k: o.state_dict() for k, o in self.opts.items()},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, sd):
        self.gen.load_state_dict(sd["gen"])
        self.dis.load_state_dict(sd["dis"])
        for k, o in self.opts.items():
            o.load_state_dict(sd["opts"][k])
        self.scaler.load_state_dict(sd["scaler"])


def fit(gan, loader, epochs, path):
    for epoch in range(epochs):
        for gray, real in loader:
            g, d = gan.step(gray.cuda(non_blocking=True), real.cuda(non_blocking=True))
        print(epoch, g.item(), d.item())
        torch.save(gan.state_dict(), path)
