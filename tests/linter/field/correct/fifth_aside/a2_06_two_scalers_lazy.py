# why correct: generator and discriminator have their own GradScaler, and a scaler is only stepped and updated in the iterations in which its network had a backward pass
from collections import defaultdict

import torch
import torch.nn.functional as F


class Side:
    """A network with its optimizer and its loss scale."""

    def __init__(self, net, lr, every=1):
        self.net = net.cuda()
        self.opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.0, 0.99))
        self.scaler = torch.cuda.amp.GradScaler(init_scale=2.0**12)
        self.every = every

    def due(self, it):
        return it % self.every == 0

    def learn(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def state_dict(self):
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, sd):
        self.net.load_state_dict(sd["net"])
        self.opt.load_state_dict(sd["opt"])
        self.scaler.load_state_dict(sd["scaler"])


def play(gen: Side, dis: Side, loader, z_dim, total):
    meters = defaultdict(float)
    it = 0
    while it < total:
        for real in loader:
            real = real.cuda(non_blocking=True)
            z = torch.randn(len(real), z_dim, device="cuda")

            if dis.due(it):
                dis.net.requires_grad_(True)
                with torch.autocast("cuda", dtype=torch.float16):
                    with torch.no_grad():
                        fake = gen.net(z)
                    loss = F.softplus(dis.net(fake)).mean() + F.softplus(-dis.net(real)).mean()
                dis.learn(loss)
                meters["d"] = loss.item()

            if gen.due(it):
                dis.net.requires_grad_(False)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.softplus(-dis.net(gen.net(z))).mean()
                gen.learn(loss)
                meters["g"] = loss.item()

            it += 1
            if it % 1000 == 0:
                print(it, dict(meters))
                torch.save({"g": gen.state_dict(), "d": dis.state_dict(), "it": it}, f"gan_{it}.pt")
            if it >= total:
                break


def main(make_g, make_d, loader):
    play(Side(make_g(), 1e-4, every=5), Side(make_d(), 4e-4), loader, z_dim=256, total=200_000)
