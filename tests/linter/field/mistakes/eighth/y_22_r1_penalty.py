# source: https://github.com/lucidrains/stylegan2-pytorch/pull/103
# mistake: the penalty's gradients come from scaled outputs but are never divided by the scale before they are squared, so the penalty is weighted by the square of the loss scale.
# severity: error
import argparse
from itertools import cycle

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from faces.data import Portraits
from faces.nets import Discriminator, Generator


def flag(module, value):
    for p in module.parameters():
        p.requires_grad_(value)


def gradient_penalty(images, scores, scaler, weight):
    grads = torch.autograd.grad(  # <- here
        outputs=scaler.scale(scores.sum()),  # <- here
        inputs=images,
        create_graph=True,
    )[0]
    grads = grads.reshape(len(images), -1)  # <- here
    return weight * ((grads.norm(2, dim=1) - 1) ** 2).mean()  # <- here


class Gan:
    def __init__(self, args):
        self.args = args
        self.G = Generator(args.latent, args.size).cuda()
        self.D = Discriminator(args.size).cuda()
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr * 2, betas=(0.5, 0.9))
        self.scale_g = GradScaler()
        self.scale_d = GradScaler()

    def noise(self, n):
        return torch.randn(n, self.args.latent, device="cuda")

    def step_d(self, real, with_penalty):
        flag(self.D, True)
        self.opt_d.zero_grad()
        real = real.requires_grad_()
        with autocast():
            with torch.no_grad():
                fake = self.G(self.noise(len(real)))
            real_score = self.D(real)
            fake_score = self.D(fake)
            loss = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        gp = torch.zeros((), device="cuda")
        if with_penalty:
            gp = gradient_penalty(real, real_score, self.scale_d, self.args.gp_weight)  # <- here
        self.scale_d.scale(loss + gp).backward()
        self.scale_d.step(self.opt_d)
        self.scale_d.update()
        return loss.item(), gp.item()

    def step_g(self, n):
        flag(self.D, False)
        self.opt_g.zero_grad()
        with autocast():
            loss = -self.D(self.G(self.noise(n))).mean()
        self.scale_g.scale(loss).backward()
        self.scale_g.step(self.opt_g)
        self.scale_g.update()
        return loss.item()

    def save(self, path, step):
        names = ("G", "D", "opt_g", "opt_d", "scale_g", "scale_d")
        torch.save({n: getattr(self, n).state_dict() for n in names} | {"step": step}, path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--size", type=int, default=128)
    p.add_argument("--latent", type=int, default=512)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=150000)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--gp-weight", type=float, default=10.0)
    args = p.parse_args()
    gan = Gan(args)
    stream = cycle(DataLoader(Portraits(args.folder, args.size), args.batch, shuffle=True, drop_last=True))
    for step in range(args.steps):
        d, gp = gan.step_d(next(stream).cuda(), with_penalty=step % 4 == 0)
        g = gan.step_g(args.batch)
        if step % 100 == 0:
            print(f"{step} d {d:.3f} g {g:.3f} gp {gp:.3f}")
        if step % 10000 == 0:
            gan.save(f"gan_{step}.pt", step)


if __name__ == "__main__":
    main()
