# re-expressed from github.com/lucidrains/stylegan2-pytorch pull 103: the gradient penalty was taken from gradients that still carried the loss scale
import argparse
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image


def up(cin, cout):
    return nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(cin, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(True)
    )


def down(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 4, 2, 1), nn.LeakyReLU(0.2))


class Generator(nn.Module):
    def __init__(self, z=128, c=64):
        super().__init__()
        self.fc = nn.Linear(z, c * 8 * 4 * 4)
        self.body = nn.Sequential(up(c * 8, c * 8), up(c * 8, c * 4), up(c * 4, c * 2), up(c * 2, c))
        self.out = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, z):
        return torch.tanh(self.out(self.body(self.fc(z).view(z.size(0), -1, 4, 4))))


class Critic(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.body = nn.Sequential(down(3, c), down(c, c * 2), down(c * 2, c * 4), down(c * 4, c * 8))
        self.fc = nn.Linear(c * 8 * 4 * 4, 1)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1)).squeeze(1)


def gradient_penalty(critic, real, fake, scaler):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        score = critic(mixed)
    (grad,) = torch.autograd.grad(  # <- here
        outputs=scaler.scale(score.float().sum()), inputs=mixed, create_graph=True
    )
    norm = grad.flatten(1).norm(2, dim=1)  # <- here
    return ((norm - 1) ** 2).mean()


def critic_step(critic, gen, real, opt, scaler, args):
    z = torch.randn(real.size(0), args.z, device=real.device)
    with torch.autocast("cuda", dtype=torch.float16):
        with torch.no_grad():
            fake = gen(z)
        wdist = critic(real).float().mean() - critic(fake).float().mean()
    gp = gradient_penalty(critic, real, fake.float(), scaler)
    loss = args.gp * gp - wdist
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return wdist.item(), gp.item()


def gen_step(critic, gen, n, opt, scaler, args, device):
    critic.requires_grad_(False)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = -critic(gen(torch.randn(n, args.z, device=device))).float().mean()
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    critic.requires_grad_(True)
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="data/celeba")
    ap.add_argument("--z", type=int, default=128)
    ap.add_argument("--gp", type=float, default=10.0)
    ap.add_argument("--n-critic", type=int, default=5)
    ap.add_argument("--epochs", type=int, default=60)
    args = ap.parse_args()
    device = torch.device("cuda")
    os.makedirs("samples", exist_ok=True)
    tf = transforms.Compose(
        [transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    )
    loader = DataLoader(datasets.ImageFolder(args.data, tf), 128, shuffle=True, num_workers=8, drop_last=True)
    gen, critic = Generator(args.z).to(device), Critic().to(device)
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
    for epoch in range(args.epochs):
        for i, (real, _) in enumerate(loader):
            w, gp = critic_step(critic, gen, real.to(device), opt_c, scaler, args)
            if (i + 1) % args.n_critic == 0:
                g = gen_step(critic, gen, real.size(0), opt_g, scaler, args, device)
        print(f"epoch {epoch} w {w:.3f} gp {gp:.3f} g {g:.3f} scale {scaler.get_scale():.0f}")
        save_image(gen(torch.randn(64, args.z, device=device)) * 0.5 + 0.5, f"samples/{epoch:03d}.png")


if __name__ == "__main__":
    main()
